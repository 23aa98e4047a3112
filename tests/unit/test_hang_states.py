"""Where each rank of a communicator that hangs stands, and how the collector says it."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from lanterne.agent import inflight, plugin_memory
from lanterne.agent.encode import Context
from lanterne.collector.decode import decode
from lanterne.collector.diagnose import diagnose
from lanterne.collector.errors import BatchRefused
from lanterne.collector.handover import Packer, Unpacker
from lanterne.collector.hang_log import HangLog
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.view import view
from lanterne.probes.layout import Func
from lanterne.proto import telemetry_pb2 as pb
from tests.unit.test_core_engine import noisy, simulate
from tests.unit.test_core_hang import hung, standing

CUDA = {"syncs": 5, "launches": 9}


def states(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    hang = snapshot.communicators[0].hang
    assert hang is not None
    found = {s.state: s.ranks for s in hang.states}
    assert sorted(r for ranks in found.values() for r in ranks) == [0, 1, 2, 3]
    return found


def texts(snapshot: Snapshot) -> dict[int, str]:
    hang = snapshot.communicators[0].hang
    assert hang is not None
    return {rank: s.text for s in hang.states for rank in s.ranks}


def test_a_host_that_does_something_else() -> None:
    job = standing(evidence=0)
    job.hosts = {2: CUDA}
    snapshot = job.wait(12, enqueued=(0, 1, 3))
    assert states(snapshot) == {"arrived": (0, 1, 3), "not_arrived_host_running": (2,)}
    assert "its host is not waiting for its GPU" in snapshot.ranks.why[2]
    assert "3 ranks in all_reduce 600" in snapshot.ranks.why[2]


def test_a_host_that_waits_for_its_gpu() -> None:
    job = standing(evidence=0)
    job.hosts = {2: CUDA | {"synchronising_seconds": 11.5}}
    snapshot = job.wait(12, enqueued=(0, 1, 3))
    assert states(snapshot) == {"arrived": (0, 1, 3), "not_arrived_host_synchronising": (2,)}
    assert "in a synchronise call for 12 s" in texts(snapshot)[2]


def test_a_host_of_which_nothing_is_seen() -> None:
    job = standing()
    snapshot = job.wait(12, inside=(0, 1, 3))
    assert states(snapshot) == {"arrived_in_call": (0, 1, 3), "not_arrived": (2,)}
    assert "not known" in texts(snapshot)[2]


def test_gpus_that_are_in_it_wait_for_the_rank_that_has_not_come() -> None:
    job = standing(evidence=1)
    job.hosts = dict.fromkeys(range(4), CUDA)
    snapshot = job.wait(12, on_device={0: True, 1: True, 3: False})
    assert hung(snapshot) == [2]
    assert states(snapshot) == {
        "arrived_device_started": (0, 1),
        "arrived_device_not_started": (3,),
        "not_arrived_host_running": (2,),
    }
    assert "their GPUs have been in the operation for" in texts(snapshot)[0]


def test_the_gpu_that_has_not_started_what_the_others_are_in_is_late() -> None:
    job = standing(evidence=1)
    snapshot = job.wait(12, on_device={0: True, 1: True, 2: False, 3: True})
    assert hung(snapshot) == [2]
    assert states(snapshot) == {
        "arrived_device_started": (0, 1, 3),
        "arrived_device_not_started": (2,),
    }
    hang = snapshot.communicators[0].hang
    assert hang is not None
    assert (hang.op, hang.seq, hang.missing) == ("all_reduce", 600, (2,))
    assert "its GPU has not started the operation it was given" in snapshot.ranks.why[2]


def test_all_gpus_in_it_or_none_started_blames_nobody() -> None:
    for started in (True, False):
        job = standing(evidence=1)
        snapshot = job.wait(12, on_device=dict.fromkeys(range(4), started))
        assert hung(snapshot) == []
        name = "arrived_device_started" if started else "arrived_device_not_started"
        assert states(snapshot) == {name: (0, 1, 2, 3)}


def test_where_a_gpu_is_told_of_and_another_is_not_nobody_is_guessed() -> None:
    """One rank is known by its call alone, ahead of what its GPU does: the others are in it."""
    job = standing(evidence=1)
    snapshot = job.wait(12, enqueued=(3,), on_device=dict.fromkeys((0, 1, 2), True))
    assert hung(snapshot) == []


def test_a_process_that_has_ended_and_one_that_nothing_is_known_of() -> None:
    job = standing(alive={0, 1, 2})
    assert states(job.wait(15, inside=(0, 1, 2))) == {"arrived_in_call": (0, 1, 2), "gone": (3,)}


def test_it_is_said_in_top_in_json_and_by_diagnose() -> None:
    job = standing(evidence=1)
    job.hosts = {2: CUDA}
    snapshot = job.wait(12, on_device={0: True, 1: True, 3: True})
    (message,) = [m.text for m in view(snapshot).messages if m.kind == "hang"]
    assert "missing 2. Rank 2: it has not come" in message
    assert "Ranks 0-1,3: their GPUs have been in the operation for" in message
    shown = msgspec.json.decode(snapshot_json(snapshot))
    (hang,) = [c["hang"] for c in shown["communicators"]]
    assert {s["state"] for s in hang["states"]} == {
        "arrived_device_started", "not_arrived_host_running",
    }  # fmt: skip
    findings = [f for step in diagnose(shown) for f in step.findings if "stand in" in f.title]
    (found,) = findings
    assert found.severity == "critical"
    assert any(line.startswith("rank 2: it has not come") for line in found.evidence)
    assert "stack" in found.try_[0]


def test_it_is_logged_once_and_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanterne.collector.hang_log")
    log = HangLog()
    job = standing(evidence=1)
    job.hosts = {2: CUDA}
    for _ in range(3):
        log.tell(job.wait(6, on_device={0: True, 1: True, 3: True}))
    (line,) = caplog.records
    assert line.message == "hang"
    assert "Rank 2: it has not come" in vars(line)["state"]
    job.hosts = {2: CUDA | {"synchronising_seconds": 3.0}}
    log.tell(job.wait(1, on_device={0: True, 1: True, 3: True}))
    assert len(caplog.records) == 2
    assert job.snapshot is not None
    (comm,) = job.snapshot.communicators
    log.tell(replace(job.snapshot, communicators=(replace(comm, hang=None),)))
    log.tell(replace(job.snapshot, communicators=()))
    assert [r.message for r in caplog.records[2:]] == ["hang over"]


def test_state_crosses_the_wire_and_the_process_boundary() -> None:
    batch = simulate(noisy(np.random.default_rng(2), 20, 2)).batches()[0]
    rows = np.zeros(2, "<u4").tobytes()
    batch.pending.CopyFrom(
        pb.Pending(rows=2, communicator=rows, seq=rows, lane=bytes(2), op=bytes(2),
                   evidence=bytes(2), entered_ns=bytes(16), state=bytes([1, 2]))
    )  # fmt: skip
    decoded = decode(batch.SerializeToString())
    assert decoded.pending.small[3].tolist() == [1, 2]
    (again,) = Unpacker().unpack(Packer().pack([decoded]))
    assert again.pending.small.tolist() == decoded.pending.small.tolist()  # type: ignore[union-attr]
    batch.pending.state = b""
    assert decode(batch.SerializeToString()).pending.small[3].tolist() == [0, 0]
    batch.pending.state = bytes([1])
    with pytest.raises(BatchRefused, match=r"pending\.state"):
        decode(batch.SerializeToString())
    batch.pending.state = bytes([1, 7])  # of a later version
    assert decode(batch.SerializeToString()).pending.small[3].tolist() == [1]


def test_what_the_plugin_has_open_is_the_next_operation_of_its_lane() -> None:
    rows = np.zeros(4, plugin_memory.OPEN)
    rows["func"] = (Func.ALL_REDUCE, Func.P2P_GROUP, Func.ALL_GATHER, Func.ALL_REDUCE)
    rows["enqueue_ns"] = (10, 10, 99, 10)
    rows["started"], rows["since_ns"] = (False, True, True, True), (10, 20, 99, 30)
    told = np.array([[4, 7], [5, 8], [6, 9], [3, 3]])
    slots, quiet = np.array([0, 1, 2, 3], np.uint16), np.array([0, 1, 2])
    found = inflight.on_device(rows, slots, quiet, told, 50)
    assert found.slot.tolist() == [0, 1]  # not launched just now, not of one that goes on
    assert found.lane.tolist() == [0, 1]
    assert found.seq.tolist() == [5, 9]
    assert found.op.tolist() == [Func.ALL_REDUCE, Func.P2P_GROUP]
    assert found.state.tolist() == [inflight.LAUNCHED, inflight.STARTED]
    assert found.entered_ns.tolist() == [10, 20]
    both = inflight.joined(inflight.NOTHING, found)
    assert both.seq.tolist() == [5, 9]
    assert len(Context(in_flight=both).in_flight) == 2
