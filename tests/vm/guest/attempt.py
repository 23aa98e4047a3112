"""Loads, attaches and counts, as the agent would: prints "right" or what went wrong instead.

`attempt.py LIBRARY`: a stub of libnccl that was compiled before, in a folder of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lanterne.agent.attach import Attacher
from lanterne.agent.errors import AgentError
from lanterne.agent.kernel import load
from lanterne.agent.ring import Ring
from lanterne.probes.layout import COMM_EVENT, RECORD
from tests.kernel.stub import Caller

import patience  # isort: skip


def attempt(library: Path) -> str:
    """Two calls: one with arguments on the stack, one with a structure read from memory."""
    with (
        load() as programs,
        Ring(programs.ring_fd, programs.ring_bytes, RECORD) as ring,
        Ring(programs.comm_ring_fd, programs.comm_ring_bytes, COMM_EVENT) as comm_ring,
        Attacher(programs, include=[f"{library.parent}/*"]) as attacher,
        Caller(library) as caller,
    ):
        (found,) = attacher.scan().new_libraries
        if found.state != "attached":
            return found.error
        slot = caller.memory(bytes(8))
        caller.call("pncclCommInitRank", slot, 16, "5a" * 128, 11, 0)
        caller.call("pncclReduce", 0, 0, 96, 7, 0, 5, 0x4560, 0x99)
        records, events = ring.drain(), comm_ring.drain()
    told = [(int(one["comm"]), int(one["stream"]), int(one["peer"])) for one in records]
    if told != [(0x4560, 0x99, 5)]:
        return f"records: {told}"
    ranks = [(int(one["rank"]), bytes(one["id"])) for one in events[:1]]
    if ranks != [(11, b"\x5a" * 128)]:
        return f"events: {ranks}"
    return "right"


if __name__ == "__main__":
    patience.loader()
    try:
        print(attempt(Path(sys.argv[1])))
    except (AgentError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}"[:400])
