"""kernel.h, as the C compiler lays it out, against the numpy dtypes; stages on both ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lanterne.agent.kernel_names import Stage
from lanterne.collector.columns import STAGE_SMALL
from lanterne.collector.snapshot import STAGES
from lanterne.probes import layout, parcagpu

BPF = Path(layout.__file__).parent / "bpf"
STRUCTS = {"lanterne_kernel": parcagpu.KERNEL, "lanterne_told": parcagpu.TOLD}
TYPES = "typedef unsigned int __u32;\ntypedef unsigned long long __u64;\n"


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    lines = ['printf("NAME_BYTES %d\\n", LANTERNE_NAME_BYTES);']
    for struct, dtype in STRUCTS.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof(struct {struct}));')
        for name in dtype.names or ():
            member = f"((struct {struct} *)0)->{name}"
            lines.append(
                f'printf("{struct}.{name} %zu\\n{struct}.{name}: %zu\\n", '
                f"offsetof(struct {struct}, {name}), sizeof({member}));"
            )
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(
        f'#include <stdio.h>\n#include <stddef.h>\n{TYPES}#include "kernel.h"\n'
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    command = ["gcc", "-Wall", "-Werror", f"-I{BPF}", "-o", folder / "layout", folder / "layout.c"]
    subprocess.run(command, check=True, timeout=60)
    text = subprocess.check_output([folder / "layout"], text=True, timeout=10)
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS)
def test_offsets_and_sizes(struct: str, header: dict[str, int]) -> None:
    dtype = STRUCTS[struct]
    assert header[struct] == dtype.itemsize
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]  # type: ignore[index]
        assert (header[f"{struct}.{name}"], header[f"{struct}.{name}:"]) == (offset, field.itemsize)
    assert sum(dtype.fields[name][0].itemsize for name in dtype.names or ()) == dtype.itemsize  # type: ignore[index]


def test_names_and_the_ring(header: dict[str, int]) -> None:
    assert header["NAME_BYTES"] == parcagpu.NAME_BYTES
    assert (layout.RING_HEADER_BYTES + parcagpu.KERNEL.itemsize) % 8 == 0


def test_the_collector_knows_the_agents_stages() -> None:
    shown = tuple(stage.name.lower() for stage in Stage if stage < Stage.COMPUTE)
    assert shown == STAGES
    assert [limit for name, limit, _ in STAGE_SMALL if name == "stage"] == [len(Stage)]
