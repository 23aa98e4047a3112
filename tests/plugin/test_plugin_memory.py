"""What the plugin has open, read from outside while the process runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lanterne.agent.plugin_memory import OPEN, PluginMemory
from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler import open_memory
from tests.plugin import notes
from tests.plugin.build import SOURCES, build
from tests.plugin.play import Player, spec


class Job(Player):
    """With somebody listening."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process)
        self.memory = PluginMemory()

    def open(self) -> list[tuple[int, ...]]:
        """(hash, rank, ranks, func, seq, started) of each."""
        rows = self.memory.read([self.process.pid])
        assert rows.dtype == OPEN
        names = ["comm_hash", "rank", "n_ranks", "func", "seq", "started"]
        return sorted(tuple(int(row[n]) for n in names) for row in rows)


@pytest.fixture
def job() -> Iterator[Job]:
    built = build()
    specs = [spec(note) for note in notes.read(built.library).values()]
    command = [str(built.driver), str(built.library), *specs]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               bufsize=0)  # fmt: skip
    try:
        job = Job(process)
        job.say("version 5", "init 1 abc 3 8 2", "arm op_done 1")
        yield job
    finally:
        process.kill()
        process.communicate()


def test_an_operation_is_open_from_its_launch_to_its_end(job: Job) -> None:
    assert job.open() == []
    job.say("coll 1 1 0 0 AllReduce 7 50 ncclFloat64 0 2", "stop 1")
    assert job.open() == [(0xABC, 3, 8, Func.ALL_REDUCE, 7, 0)]
    job.say("kernel 1 2 1 0 1000")
    assert job.open() == [(0xABC, 3, 8, Func.ALL_REDUCE, 7, 1)]
    (row,) = job.memory.read([job.process.pid])
    assert 0 < row["enqueue_ns"] <= row["since_ns"]
    job.say("state 2 22 1700", "stop 2", "kernel 1 3 1 1 1100", "state 3 22 1900", "stop 3")
    assert job.open() == []


def test_the_oldest_that_is_not_over_counts(job: Job) -> None:
    job.say("coll 1 1 0 0 AllReduce 7 50 ncclFloat64 0 2", "stop 1")
    job.say("kernel 1 2 1 0 1000", "state 2 22 1700", "stop 2")  # the other channel never comes
    job.say("coll 1 3 0 0 AllGather 0 50 ncclFloat64 0 1", "stop 3")
    assert job.open() == [(0xABC, 3, 8, Func.ALL_GATHER, 0, 0)]


def test_what_was_launched_before_something_that_is_over_is_over(job: Job) -> None:
    """Its channels were not told of: events of kernels were not asked for yet."""
    job.say("coll 1 1 0 0 AllReduce 7 50 ncclFloat64 0 1", "stop 1")
    assert len(job.open()) == 1
    job.say("coll 1 2 0 0 AllReduce 8 50 ncclFloat64 0 1", "stop 2")
    job.say("kernel 1 3 2 0 1000", "state 3 22 1700", "stop 3")
    assert job.open() == []
    job.say("coll 1 4 0 0 AllReduce 9 50 ncclFloat64 0 1", "stop 4")
    assert job.open() == [(0xABC, 3, 8, Func.ALL_REDUCE, 9, 0)]


def test_every_communicator_that_lives_has_its_own(job: Job) -> None:
    job.say("init 2 def 0 2 1", "coll 2 1 0 0 Broadcast 0 50 ncclFloat64 1 1", "stop 1")
    job.say("coll 1 2 0 0 AllReduce 1 50 ncclFloat64 0 1", "stop 2", "kernel 1 3 2 0 1000")
    assert job.open() == [
        (0xABC, 3, 8, Func.ALL_REDUCE, 1, 1),
        (0xDEF, 0, 2, Func.BROADCAST, 0, 0),
    ]
    job.say("finalize 2")
    assert job.open() == [(0xABC, 3, 8, Func.ALL_REDUCE, 1, 1)]


def test_what_a_rank_sends_to_itself_is_left_out(job: Job) -> None:
    job.say("raw 1 1 1", "p2p 1 2 0 1 Send 10 ncclInt8 3 1", "stop 2", "stop 1")
    assert job.open() == []
    job.say("raw 1 3 1", "p2p 1 4 0 3 Send 10 ncclInt8 2 1", "stop 4", "stop 3")
    ((_, _, _, func, _, started),) = job.open()
    assert (func, started) == (Func.P2P_GROUP, 0)


def test_other_processes_and_plugins_have_nothing() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert len(PluginMemory().read([process.pid, 1 << 22])) == 0
        finally:
            process.kill()


def test_dtypes_mirror_the_header(tmp_path: Path) -> None:
    types = {"struct lanterne_open": open_memory.OPEN, "struct context": open_memory.CONTEXT,
             "struct op": open_memory.SLOT}  # fmt: skip
    lines = "".join(
        f'printf("{struct}.{name} %zu %zu\\n", offsetof({struct}, {name}),'
        f" sizeof((({struct} *)0)->{name}));\n"
        for struct, dtype in types.items()
        for name in dtype.names or ()
    )
    program = tmp_path / "offsets.c"
    program.write_text(
        '#include <stdio.h>\n#include "context.h"\nint main(void) {' + lines
        + 'printf("magic %u %d\\n", LANTERNE_OPEN_MAGIC, LANTERNE_OPEN_VERSION); }\n'
    )  # fmt: skip
    binary = tmp_path / "offsets"
    subprocess.run(["gcc", "-std=gnu11", f"-I{SOURCES}", "-o", binary, program], check=True)
    told = subprocess.run([binary], capture_output=True, text=True, check=True).stdout
    seen = {name: (int(a), int(b)) for name, a, b in (x.rsplit(" ", 2) for x in told.splitlines())}
    expected = {
        f"{struct}.{name}": (field[1], field[0].itemsize)
        for struct, dtype in types.items()
        for name, field in (dtype.fields or {}).items()
    }
    assert seen == expected | {"magic": (open_memory.MAGIC, open_memory.VERSION)}
    assert np.dtype(open_memory.SLOT).itemsize <= 256
