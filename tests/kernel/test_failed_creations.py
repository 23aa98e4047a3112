"""Communicators that do not come to be: calls of the rig's library that fail, by reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.comms import Registry
from lanterne.agent.identity import MAX_ATTEMPTS
from lanterne.agent.process import Processes
from tests.kernel.stub import Caller
from tests.rig.build import build

pytestmark = pytest.mark.kernel

INVALID_ARGUMENT = 4
HOUR_NS = 3_600_000_000_000  # longer than any pause between two attempts


class Job:
    """A process with a communicator of its own, whose calls are the test's; what is known of it."""

    def __init__(self, loaded: Any, attacher: Attacher, caller: Caller) -> None:
        self._loaded, self.attacher, self.caller = loaded, attacher, caller
        self.registry = Registry(
            libraries=lambda pid: [
                attacher.libraries[key] for key in attacher.processes[pid].libraries
            ],
            processes=Processes(),
        )
        place = caller.memory(bytes(128))
        assert caller.call("ncclGetUniqueId", place) == 0
        self.unique_id = caller.peek(place, 128).hex()
        slot = caller.memory(bytes(8))
        assert caller.call("ncclCommInitRank", slot, 1, self.unique_id, 0) == 0
        self.comm = int.from_bytes(caller.peek(slot, 8), "little")
        self.read()

    def init_beyond_its_size(self) -> None:
        slot = self.caller.memory(bytes(8))
        said = self.caller.call("ncclCommInitRank", slot, 2, self.unique_id, 5)
        assert said == INVALID_ARGUMENT

    def split(self, color: int) -> None:
        """Inside a group, where it is done at the group's end."""
        slot = self.caller.memory(bytes(8))
        assert self.caller.call("ncclCommSplit", self.comm, color, 0, slot, 0) == 0

    def read(self) -> None:
        self.registry.apply(self._loaded.events(self.caller.pid))
        self.registry.resolve(time.monotonic_ns())

    def wait_long(self) -> None:
        now = time.monotonic_ns()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self.registry.resolve(now + attempt * HOUR_NS)

    def lost(self) -> dict[str, int]:
        return {reason: count for reason, count in self.registry.creations_lost.items() if count}


@pytest.fixture
def job(either: Any, tmp_path: Path) -> Iterator[Job]:
    paths = build(dest=tmp_path)
    with Caller(paths.nccl) as caller, either.attacher(tmp_path) as attacher:
        assert not attacher.scan().failed
        either.events(0)
        job = Job(either, attacher, caller)
        assert (len(job.registry.alive()), job.lost()) == (1, {})
        yield job


def test_a_call_that_fails(job: Job) -> None:
    job.init_beyond_its_size()
    job.read()
    assert job.lost() == {"failed": 1}
    assert (len(job.registry.alive()), job.registry.unresolved) == (1, 0)


def test_a_group_that_fails_leaves_its_other_creations_without_a_pointer(job: Job) -> None:
    job.caller.call("ncclGroupStart")
    job.split(0)
    job.init_beyond_its_size()
    assert job.caller.call("ncclGroupEnd") == INVALID_ARGUMENT
    job.read()
    assert (job.lost(), job.registry.unresolved) == ({"failed": 1}, 1)
    job.wait_long()
    assert (job.lost(), job.registry.unresolved) == ({"failed": 1, "no_pointer": 1}, 0)
    assert [comm.pointer for comm in job.registry.alive()] == [job.comm]


def test_a_process_that_ends_before_its_group_does(job: Job) -> None:
    job.caller.call("ncclGroupStart")
    job.split(0)
    job.read()
    assert (job.lost(), job.registry.unresolved) == ({}, 1)
    job.caller.close()
    job.registry.forget_processes(job.attacher.scan().gone_pids, time.monotonic_ns())
    assert (job.lost(), job.registry.unresolved) == ({"process_ended": 1}, 0)
    assert job.registry.alive() == []


def test_no_color_and_what_succeeds_are_no_loss(job: Job) -> None:
    job.caller.call("ncclGroupStart")
    job.split(0)
    job.split(-1)
    assert job.caller.call("ncclGroupEnd") == 0
    job.read()
    job.wait_long()
    assert (len(job.registry.alive()), job.lost(), job.registry.unresolved) == (2, {}, 0)
