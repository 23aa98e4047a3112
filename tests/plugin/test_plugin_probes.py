"""The probes in the built library, and what a BPF tracer gets from them."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler import usdt
from tests.plugin import notes
from tests.plugin.build import SOURCES, build
from tests.plugin.play import Player
from tests.plugin.tracer_process import BpfTracer

NOP5 = bytes.fromhex("0f1f440000")
CALL, BREAKPOINT = 0xE8, 0xCC
x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 machine code")


@pytest.fixture(scope="module")
def library() -> Path:
    return build().library


def test_exports_are_the_tables_and_nothing_else(library: Path) -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True,
                            text=True, check=True)  # fmt: skip
    symbols = [line.split()[1:] for line in listed.stdout.splitlines()]
    assert symbols == [["D", f"ncclProfiler_v{n}"] for n in (4, 5, 6, 7)]


def test_library_stays_when_nccl_unloads_it(library: Path) -> None:
    dynamic = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True,
                             check=True)  # fmt: skip
    assert "NODELETE" in dynamic.stdout


def test_notes_name_every_probe_once(library: Path) -> None:
    found = notes.read(library)
    assert set(found) == set(usdt.PROBES)
    assert {note.provider for note in found.values()} == {usdt.PROVIDER}
    assert all(note.semaphore for note in found.values())
    assert len({note.semaphore for note in found.values()}) == len(found)
    assert found["op_done"].arguments[1] == (8, usdt.OP.itemsize)


@x86_64
def test_probed_instruction_is_a_nop_of_five_bytes(library: Path) -> None:
    code = library.read_bytes()
    for note in notes.read(library).values():
        assert code[note.offset : note.offset + 5] == NOP5
        # Within a page: the kernel replaces only such.
        assert note.address % 4096 <= 4096 - 5


def _instructions(library: Path, function: str) -> list[tuple[int, str]]:
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", str(library)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = re.findall(r"^\s*([0-9a-f]+):\s+(.+?)\s*$", text, re.MULTILINE)
    return [(int(address, 16), code) for address, code in found]


@x86_64
@pytest.mark.parametrize(
    ("function", "probe"),
    [("tell_op", "op_done"), ("tell_init", "comm_init"), ("tell_p2p", "p2p_task"),
     ("tell_end", "comm_end")],
)  # fmt: skip
def test_nothing_is_made_ready_while_the_semaphore_is_zero(
    library: Path, function: str, probe: str
) -> None:
    """The function begins with the test of the semaphore, and jumps behind the site."""
    note = notes.read(library)[probe]
    code = [(at, text) for at, text in _instructions(library, function) if text != "endbr64"]
    load = re.fullmatch(r"movzwl\s+.*# ([0-9a-f]+) <.*>", code[0][1])
    assert load is not None, code[0]
    assert int(load[1], 16) == note.semaphore
    assert code[1][1].split()[0] == "test"
    jump = re.fullmatch(r"je\s+([0-9a-f]+) <.*>", code[2][1])
    assert jump is not None, code[2]
    after = [text for at, text in code if at >= int(jump[1], 16)]
    assert int(jump[1], 16) > note.address
    assert after[0] == "ret"


def test_dtype_mirrors_the_header(tmp_path: Path) -> None:
    names = [name for name in usdt.OP.names or () if name]
    lines = "".join(
        f'printf("{name} %zu %zu\\n", offsetof(struct lanterne_op, {name}),'
        f" sizeof(((struct lanterne_op *)0)->{name}));\n"
        for name in names
    )
    flags = "".join(
        f'printf("{flag.name} %d 0\\n", LANTERNE_U_{flag.name});' for flag in usdt.OpFlag
    )
    program = tmp_path / "offsets.c"
    program.write_text(
        f'#include <stdio.h>\n#include "lanterne_usdt.h"\nint main(void) {{ {lines} {flags}'
        'printf("size %zu %d\\n", sizeof(struct lanterne_op), LANTERNE_OP_VERSION); }\n'
    )
    binary = tmp_path / "offsets"
    subprocess.run(["gcc", f"-I{SOURCES}", "-o", str(binary), str(program)], check=True)
    told = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    seen = {name: (int(a), int(b)) for name, a, b in map(str.split, told.splitlines())}
    fields = usdt.OP.fields or {}
    expected = {name: (fields[name][1], fields[name][0].itemsize) for name in names}
    expected |= {str(flag.name): (int(flag), 0) for flag in usdt.OpFlag}
    assert seen == expected | {"size": (usdt.OP.itemsize, usdt.OP_VERSION)}
    header = (SOURCES / "lanterne_usdt.h").read_text()
    assert f"LANTERNE_FUNC_P2P_GROUP {int(Func.P2P_GROUP)} " in header


class Job(Player):
    """Where it has the plugin mapped, and what stands there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process)
        self.base = 0

    def find(self, library: Path) -> None:
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        (first, *_) = [line for line in maps if line.endswith(str(library))]
        self.base = int(first.split("-")[0], 16)

    def memory(self, address: int, size: int) -> bytes:
        fd = os.open(f"/proc/{self.process.pid}/mem", os.O_RDONLY)
        try:
            return os.pread(fd, size, self.base + address)
        finally:
            os.close(fd)


@contextmanager
def running(library: Path) -> Iterator[Job]:
    process = subprocess.Popen([str(build().driver), str(library)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, bufsize=0)  # fmt: skip
    try:
        job = Job(process)
        job.say("version 6")
        job.find(library)
        yield job
    finally:
        process.kill()
        process.communicate()


def operation(seq: int) -> list[str]:
    return [
        f"coll 1 1 0 0 Reduce {seq} 50 ncclFloat64 2 2", "stop 1",
        "kernel 1 2 1 0 1000", "state 2 22 1700", "stop 2",
        "kernel 1 3 1 1 1100", "state 3 22 1900", "stop 3",
    ]  # fmt: skip


def semaphore(job: Job, note: notes.Note) -> int:
    return ctypes.c_uint16.from_buffer_copy(job.memory(note.semaphore, 2)).value


@pytest.fixture
def tracer(library: Path) -> Iterator[BpfTracer]:
    with BpfTracer(library) as tracer:
        yield tracer


@pytest.mark.kernel
def test_bpf_tracer_reads_every_field(library: Path, tracer: BpfTracer) -> None:
    note = tracer.note
    with running(library) as job:
        job.say("init 1 abc 3 8 2", *operation(0))
        assert semaphore(job, note) == 0
        tracer.attach()
        assert semaphore(job, note) == 1
        for seq in range(1, 6):
            job.say(*operation(seq))
        first = job.memory(note.address, 1)[0]
        tracer.detach()
        assert semaphore(job, note) == 0
        job.say(*operation(9))
        tgids, rows = tracer.read()
        assert set(tgids.tolist()) == {job.process.pid}
    assert rows["seq"].tolist() == [1, 2, 3, 4, 5]
    row = rows[0]
    assert (row["comm_hash"], row["rank"], row["n_ranks"]) == (0xABC, 3, 8)
    assert (row["func"], row["bytes"], row["dtype"], row["peer"]) == (1, 400, 8, 2)
    assert (row["channels"], row["channels_expected"], row["tasks"]) == (2, 2, 1)
    assert (row["flags"], row["version"], row["dropped"]) == (0, 1, 0)
    assert (rows["stop_ns"] - rows["start_ns"] == 900).all()
    assert (np.diff(rows["enqueue_ns"].astype(np.int64)) > 0).all()
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if platform.machine() == "x86_64" and release >= (6, 18):
        assert first == CALL, "the kernel has not replaced the trap"
    elif platform.machine() == "x86_64":
        assert first in (CALL, BREAKPOINT)


@pytest.mark.kernel
def test_process_that_comes_later_is_armed(library: Path, tracer: BpfTracer) -> None:
    tracer.attach()
    with running(library) as job:
        assert semaphore(job, tracer.note) == 1
        job.say("init 1 abc 3 8 2", *operation(0))
        _, rows = tracer.read()
    assert rows["seq"].tolist() == [0]
