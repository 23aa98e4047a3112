"""The ring at its limits: nothing is lost without being counted."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.errors import KernelError, LoaderError
from lanterne.agent.kernel import load
from lanterne.agent.ring import Ring
from lanterne.probes import layout
from tests.kernel.stub import Caller, compile_stub

pytestmark = pytest.mark.kernel

TINY = mmap.PAGESIZE
CALLS = TINY // 4
COMMS = TINY // 100


@pytest.mark.parametrize("method", ["multi", "perf"], indirect=True)
def test_overflow_is_counted_exactly(method: str, tmp_path: Path) -> None:
    library = compile_stub(tmp_path, "nccl", enqueue=False)
    with (
        load(method=method, ring_bytes=TINY, comm_ring_bytes=TINY) as programs,
        Ring(programs.ring_fd, TINY, layout.RECORD) as ring,
        Ring(programs.comm_ring_fd, TINY, layout.COMM_EVENT) as comm_ring,
        Attacher(programs, include=[f"{tmp_path}/*"]) as attacher,
        Caller(library) as caller,
    ):
        assert len(attacher.scan().new_libraries) == 1
        parts = []
        for _ in range(10):
            caller.call("call_all_gather", CALLS // 10, 0x5550)
            parts.append(ring.drain())
            assert len(ring.drain()) == 0
        records = np.concatenate(parts)
        counts = programs.counters()
        assert counts["submitted"] == len(records) == ring.read == ring.submitted
        assert counts["lost_ring"] > 0
        assert counts["submitted"] + counts["lost_ring"] == CALLS // 10 * 10
        # Numbers are given before room is found, so that a gap shows what is missing.
        assert (np.diff(records["seq"].astype(int)) >= 1).all()
        for comm in range(1, COMMS + 1):
            caller.call("call_all_gather", 1, comm * 4096)
        counts = programs.counters()
        events = comm_ring.drain()
        assert counts["comm_submitted"] == len(events)
        assert counts["comm_submitted"] + counts["lost_comm_ring"] == COMMS + 1
        assert counts["lost_comm_ring"] > 0


def test_wrap_and_cap(either: Any, tmp_path: Path) -> None:
    """Many times round a small ring, in drains that do not divide it."""
    library = compile_stub(tmp_path, "nccl", enqueue=False)
    with (
        load(ring_bytes=TINY) as programs,
        Ring(programs.ring_fd, TINY, layout.RECORD) as ring,
        Attacher(programs, include=[f"{tmp_path}/*"]) as attacher,
        Caller(library) as caller,
    ):
        attacher.scan()
        seen: list[int] = []
        for _ in range(60):
            caller.call("call_all_gather", 20, 0x5550)
            while len(found := ring.drain(7)):
                assert len(found) <= 7
                seen += found["seq"].tolist()
        assert seen == list(range(1200))
        assert programs.counters()["lost_ring"] == 0


def test_more_communicators_than_room_is_counted(either: Any, tmp_path: Path) -> None:
    """Sets of four: whatever does not fit is lost by cause, and the sum is right."""
    library = compile_stub(tmp_path, "nccl", enqueue=False)
    with Caller(library) as caller, either.attacher(tmp_path) as attacher:
        attacher.scan()
        either.records(caller.pid)
        before = either.programs.counters()
        read = 0
        for comm in range(1, 20001):
            caller.call("call_all_gather", 1, comm * 4096)
            if comm % 2000 == 0:
                read += len(either.records(caller.pid))
                either.events(caller.pid)
        after = either.programs.counters()
        lost = after["lost_state"] - before["lost_state"]
        assert lost > 0
        assert read + lost == 20000
    attacher.scan()


@pytest.mark.parametrize("size", [0, 1000, 12288])
def test_ring_size_that_cannot_be(size: int) -> None:
    with pytest.raises(KernelError, match="power of two"):
        load(ring_bytes=size)


def test_interpreter_without_bcc(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nexec /usr/bin/python3 -S "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(LoaderError, match="python3-bpfcc"):
        load(interpreter=str(fake))


def test_interpreter_that_is_not_there() -> None:
    with pytest.raises(LoaderError, match="cannot run the interpreter"):
        load(interpreter="/nonexistent/python")


def test_interpreter_that_ends_at_once() -> None:
    with pytest.raises(LoaderError, match="ended early"):
        load(interpreter="/bin/true")
