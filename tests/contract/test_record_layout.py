"""record.h and row.h, as the C compiler lays them out, against the numpy dtypes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lanterne.probes import layout, rows
from lanterne.probes.nccl_profiler.usdt import OP

BPF = Path(layout.__file__).parent / "bpf"
STRUCTS = {
    "lanterne_record": layout.RECORD,
    "lanterne_comm_event": layout.COMM_EVENT,
    "lanterne_cuda": layout.CUDA,
    "lanterne_cuda_key": layout.CUDA_KEY,
    "lanterne_process": rows.PROCESS,
    "lanterne_source": rows.SOURCE,
    "lanterne_row": rows.ROW,
    "lanterne_thread": rows.THREAD,
    "lanterne_comm": rows.COMM,
}
TYPES = "".join(
    f"typedef {'un' if sign == 'u' else ''}signed {name} __{sign}{bits};\n"
    for sign in "us"
    for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
)


@pytest.fixture(scope="module")
def header() -> dict[str, int]:
    """Everything that the headers say in numbers, computed by the compiler."""
    text = (BPF / "record.h").read_text() + (BPF / "row.h").read_text()
    constants = re.findall(r"#define (LANTERNE_[A-Z_0-9]+)[ \t]+[^\s\\]", text)
    enums = re.findall(r"^\t(LANTERNE_[A-Z_]+),", text, re.MULTILINE)
    lines = [f'printf("{name} %lld\\n", (long long)({name}));' for name in constants + enums]
    for name in ("tgid", "tid", "op"):
        lines.append(
            f'printf("lanterne_device.{name} %zu\\nlanterne_device.{name}: %zu\\n", '
            f"offsetof(struct lanterne_device, {name}), "
            f"sizeof(((struct lanterne_device *)0)->{name}));"
        )
    lines.append('printf("lanterne_device %zu\\n", sizeof(struct lanterne_device));')
    for struct, dtype in STRUCTS.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof(struct {struct}));')
        lines += [
            f'printf("{struct}.{name} %zu\\n{struct}.{name}: %zu\\n", '
            f"offsetof(struct {struct}, {name}), sizeof(((struct {struct} *)0)->{name}));"
            for name in dtype.names or ()
        ]
    program = (
        f'#include <stdio.h>\n#include <stddef.h>\n{TYPES}#include "record.h"\n'
        f'#include "row.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
    )
    return _run(program)


def _run(program: str) -> dict[str, int]:
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    try:
        (folder / "layout.c").write_text(program)
        subprocess.run(
            ["gcc", "-Wall", "-Werror", f"-I{BPF}", "-o", folder / "layout", folder / "layout.c"],
            check=True,
            timeout=60,
        )
        text = subprocess.check_output([folder / "layout"], text=True, timeout=10)
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS)
def test_offsets_and_sizes(struct: str, header: dict[str, int]) -> None:
    dtype = STRUCTS[struct]
    assert header[struct] == dtype.itemsize
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]  # type: ignore[index]
        assert header[f"{struct}.{name}"] == offset, name
        assert header[f"{struct}.{name}:"] == field.itemsize, name
    # No byte of the C struct is left out, except padding that is named.
    covered = sum(dtype.fields[name][0].itemsize for name in dtype.names or ())  # type: ignore[index]
    assert covered == dtype.itemsize


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("LANTERNE_F_", layout.Flag),
        ("LANTERNE_C_", layout.CommKind),
        ("LANTERNE_CF_", layout.CommFlag),
        ("LANTERNE_S_", rows.SourceKind),
        ("LANTERNE_R_", rows.Trait),
    ],
)
def test_constants(prefix: str, names: type, header: dict[str, int]) -> None:
    short = {"LANTERNE_S_STACK_ADDR": "STACK_ADDRESS"}
    in_c = {
        short.get(name, name.removeprefix(prefix)): value
        for name, value in header.items()
        if name.startswith(prefix) and "." not in name
    }
    assert in_c == {name: int(value) for name, value in names.__members__.items()}


def test_counters_are_in_the_order_of_the_enum(header: dict[str, int]) -> None:
    in_c = {
        name.removeprefix("LANTERNE_N_").lower(): value
        for name, value in header.items()
        if name.startswith("LANTERNE_N_") and name != "LANTERNE_N_RANKS"
    }
    assert in_c.pop("counters") == len(layout.COUNTERS)
    assert sorted(in_c, key=lambda name: in_c[name]) == list(layout.COUNTERS)


def test_fields_and_limits(header: dict[str, int]) -> None:
    for field in rows.Field:
        assert header[f"LANTERNE_{field.name}"] == field
    assert header["LANTERNE_FIELDS"] == len(rows.Field)
    limits = ("THREADS", "COMMS", "ROWS", "PEERS", "PENDING")
    for name in limits:
        assert header[f"LANTERNE_{name}"] == getattr(rows, f"MAX_{name}")
    assert header["LANTERNE_SYNC_BINS"] == layout.SYNC_BINS


def test_ring_stride_is_a_whole_number_of_words() -> None:
    for dtype in (layout.RECORD, layout.COMM_EVENT):
        assert (layout.RING_HEADER_BYTES + dtype.itemsize) % 8 == 0
        assert np.dtype(dtype).isbuiltin == 0


def test_device_record_holds_the_plugins_own(header: dict[str, int]) -> None:
    """tests/plugin compares usdt.OP with the plugin's header."""
    assert header["lanterne_device"] == layout.DEVICE.itemsize
    assert (header["lanterne_device.tgid"], header["lanterne_device.tid"]) == (0, 4)
    fields = layout.DEVICE.fields
    assert fields is not None
    for name in OP.names or ():
        assert fields[name][1] == header["lanterne_device.op"] + OP.fields[name][1]  # type: ignore[index]
    assert header["lanterne_device.op:"] == OP.itemsize
