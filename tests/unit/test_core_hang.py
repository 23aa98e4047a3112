"""Hangs: who is missing, since when, and what is none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.collector.export import families
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import CLASSES, Snapshot
from lanterne.collector.view import view
from lanterne.proto import telemetry_pb2 as pb
from tests.unit.test_core_engine import ALL_REDUCE, BOOT, MS, SMALL, Job, noisy, simulate

SECOND = 1000 * MS
NOWHERE: Mapping[int, bool] = {}


class Standing:
    """A job of which nothing comes any more after its last whole second, told second by second."""

    def __init__(self, job: Job, *, alive: set[int] | None = None) -> None:
        self.engine = Engine(SMALL, boot_id=BOOT)
        self.job = job
        self.last: pb.Batch | None = None
        self.sequence = 0
        self.alive = set(range(job.ranks)) if alive is None else alive
        self.hosts: dict[int, dict[str, float]] = {}  # by rank: more fields of its process
        self.snapshot: Snapshot | None = None
        for batch in job.batches():
            self._apply(batch, set(range(job.ranks)))
            self.last = batch
        self.steps = len(job.arrival)
        self.entered = 0

    def _apply(self, batch: pb.Batch, alive: set[int]) -> Snapshot:
        self.sequence += 1
        batch.sequence = self.sequence
        del batch.processes[:]
        for r in sorted(alive):
            batch.processes.add(pid=100 + r, pid_start_ticks=7, **self.hosts.get(r, {}))  # type: ignore[arg-type]
        self.engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns + 50 * MS))
        self.snapshot = self.engine.snapshot(0.0)
        return self.snapshot

    def wait(
        self,
        seconds: int,
        *,
        inside: tuple[int, ...] = (),
        ahead: tuple[int, ...] = (),
        enqueued: tuple[int, ...] = (),
        on_device: Mapping[int, bool] = NOWHERE,
        destroyed: bool = False,
    ) -> Snapshot:
        """Seconds without a return. inside: ranks in the next call, ahead: in the one
        after; enqueued: told of it once; on_device: ranks whose GPU was given it, and whether it
        has started it."""
        assert self.last is not None
        start = self.last.end_ns
        self.entered = self.entered or start
        shown = None
        for second in range(seconds):
            batch = pb.Batch()
            batch.CopyFrom(self.last)
            batch.ClearField("instances")
            batch.start_ns, batch.end_ns = start + second * SECOND, start + (second + 1) * SECOND
            keep = [c for c in batch.communicators if c.rank in self.alive]
            del batch.communicators[:]
            if not destroyed:
                batch.communicators.extend(keep)
            states = dict.fromkeys(inside, 0) | {r: 1 + s for r, s in on_device.items()}
            if states:
                index = [i for i, c in enumerate(keep) if c.rank in states]
                rows = len(index)
                batch.pending.CopyFrom(
                    pb.Pending(
                        rows=rows,
                        communicator=np.array(index, "<u4").tobytes(),
                        seq=np.array(
                            [self.steps + (keep[i].rank in ahead) for i in index], "<u4"
                        ).tobytes(),
                        lane=bytes(rows),
                        op=bytes([ALL_REDUCE] * rows),
                        evidence=bytes([2] * rows),
                        state=bytes([states[keep[i].rank] for i in index]) if on_device else b"",
                        entered_ns=np.full(rows, self.entered, "<u8").tobytes(),
                    )
                )
            if enqueued and second == 0:
                rows = len(enqueued)
                index = [i for i, c in enumerate(keep) if c.rank in enqueued]
                batch.instances.CopyFrom(_instances(index, self.steps, start))
            shown = self._apply(batch, self.alive)
        assert shown is not None
        self.last.end_ns = batch.end_ns
        return shown


def _instances(index: list[int], seq: int, now: int) -> pb.Instances:
    rows = len(index)
    return pb.Instances(
        rows=rows,
        communicator=np.array(index, "<u4").tobytes(),
        seq=np.full(rows, seq, "<u4").tobytes(),
        lane=bytes(rows),
        op=bytes([ALL_REDUCE] * rows),
        role=bytes(rows),
        evidence=bytes(rows),
        flags=bytes(rows),
        arrival_ns=np.full(rows, now, "<u8").tobytes(),
        duration_ns=bytes(8 * rows),
        payload_bytes=bytes(8 * rows),
        sync_blocked_ns=bytes(8 * rows),
    )


def standing(*, evidence: int = 2, alive: set[int] | None = None) -> Standing:
    own = noisy(np.random.default_rng(1), 600, 4)
    return Standing(simulate(own, evidence=evidence), alive=alive)


def hung(snapshot: Snapshot) -> list[int]:
    r = snapshot.ranks
    return r.rank[r.klass == CLASSES.index("hang")].tolist()


def test_the_rank_that_does_not_come_is_missing() -> None:
    job = standing()
    assert hung(job.wait(9, inside=(0, 1, 3))) == []
    snapshot = job.wait(3, inside=(0, 1, 3))
    hang = snapshot.communicators[0].hang
    assert hang is not None
    assert (hang.missing, hang.arrived, hang.gone) == ((2,), (0, 1, 3), ())
    assert (hang.op, hang.seq) == ("all_reduce", 600)
    assert hang.seconds == pytest.approx(12, abs=1.5)
    assert hung(snapshot) == [2]
    assert "has not come" in snapshot.ranks.why[2]
    rows = view(snapshot).rows
    assert (rows[0].rank, rows[0].klass, rows[0].method) == (2, "hang", "hang")
    assert "missing 2" in view(snapshot).messages[0].text


@pytest.mark.parametrize("held", [(2,), ()])
def test_the_call_of_an_earlier_operation_is_no_fault_of_who_is_in_it(
    held: tuple[int, ...],
) -> None:
    """An operation that has not ended for 0 and 3: they wait in it, for 2."""
    job = standing()
    job.hosts = {rank: {"stopped": True} for rank in held}
    snapshot = job.wait(12, inside=(0, 1, 3, *held), ahead=(1,), enqueued=() if held else (2,))
    assert hung(snapshot) == [2]
    hang = snapshot.communicators[0].hang
    assert hang is not None
    assert (hang.missing, hang.arrived, hang.seq) == ((2,), (0, 1, 3), 601)
    state = "stopped" if held else "not_arrived"
    assert {s.state: s.ranks for s in hang.states} == {
        "arrived_in_call": (1,), "in_earlier_call": (0, 3), state: (2,),
    }  # fmt: skip
    assert "3 ranks in all_reduce 601" in snapshot.ranks.why[2]


def test_where_all_are_in_a_call_and_none_is_stopped_the_later_ones_are_missing() -> None:
    job = standing()
    assert hung(job.wait(12, inside=(0, 1, 2, 3), ahead=(1,))) == [0, 2, 3]


def test_a_stopped_process_is_missing_from_the_operation_that_it_is_in() -> None:
    job = standing()
    assert hung(job.wait(12, inside=(0, 1, 2, 3))) == []
    job.hosts = {2: {"stopped": True}}
    snapshot = job.wait(1, inside=(0, 1, 2, 3))
    assert hung(snapshot) == [2]
    assert "its process is stopped" in snapshot.ranks.why[2]
    assert "3 ranks in all_reduce 600" in snapshot.ranks.why[2]


def test_a_host_that_enqueued_waits_for_those_that_did_not() -> None:
    """NCCL returns at once: nobody is seen in a call."""
    job = standing(evidence=0)
    assert hung(job.wait(9, enqueued=(0, 1))) == []
    assert hung(job.wait(3)) == [2, 3]


def test_all_arrived_and_none_comes_out() -> None:
    snapshot = standing().wait(12, inside=(0, 1, 2, 3))
    hang = snapshot.communicators[0].hang
    assert hang is not None
    assert (hang.missing, hang.arrived) == ((), (0, 1, 2, 3))
    assert hung(snapshot) == []
    assert "does not end" in view(snapshot).messages[0].text


def test_idle_is_no_hang() -> None:
    snapshot = standing().wait(60)
    assert snapshot.communicators[0].hang is None
    assert hung(snapshot) == []


def test_a_rank_that_died_is_missing_and_gone() -> None:
    snapshot = standing(alive={0, 1, 2}).wait(15, inside=(0, 1, 2))
    hang = snapshot.communicators[0].hang
    assert hang is not None
    assert (hang.missing, hang.gone) == ((3,), (3,))
    assert hung(snapshot) == [3]


def test_all_gone_or_destroyed_is_no_hang() -> None:
    # One more call on two ranks, then all end.
    job = standing(evidence=0)
    job.wait(2, enqueued=(0, 1))
    job.alive = set()
    assert hung(job.wait(12)) == []
    job = standing(evidence=0)
    job.wait(2, enqueued=(0, 1))
    assert hung(job.wait(12, destroyed=True)) == []


def test_it_goes_on_and_the_verdict_is_gone() -> None:
    job = standing()
    assert hung(job.wait(12, inside=(0, 1, 3))) == [2]
    assert job.last is not None
    batch = pb.Batch()
    batch.CopyFrom(job.last)
    batch.ClearField("pending")
    batch.start_ns, batch.end_ns = batch.end_ns, batch.end_ns + SECOND
    batch.instances.CopyFrom(_instances([0, 1, 2, 3], 600, batch.start_ns))
    snapshot = job._apply(batch, job.alive)
    assert snapshot.communicators[0].hang is None
    assert hung(snapshot) == []


def test_a_node_that_is_silent_says_nothing() -> None:
    job = standing()
    job.wait(3, inside=(0, 1, 3))
    now = job.engine.now_ns
    assert hung(job.engine.snapshot(0.0, now_ns=now + 60 * SECOND)) == []


def test_metrics_of_a_hang() -> None:
    snapshot = standing().wait(12, inside=(0, 1, 3))
    points = {
        (point.name, *point.labels.values()): point.value
        for family in families(snapshot, Runtime("0", 0, 0, {}, 0.0))
        for point in family.points
    }
    name = snapshot.communicators[0].name
    seconds = points["lanterne_communicator_hung_seconds", "train", name]
    assert seconds == pytest.approx(12, abs=1.5)
    missing = {key[3] for key in points if key[0] == "lanterne_rank_missing"}
    assert missing == {"2"}
    told = [key for key in points if key[0] == "lanterne_rank_straggler" and key[-1] == "hang"]
    assert [key[3] for key in told] == ["2"]


def test_pending_after_the_window_is_refused() -> None:
    batch = simulate(noisy(np.random.default_rng(2), 20, 2)).batches()[0]
    batch.pending.CopyFrom(
        pb.Pending(
            rows=1,
            communicator=bytes(4),
            seq=bytes(4),
            lane=bytes(1),
            op=bytes(1),
            evidence=bytes(1),
            entered_ns=np.array([batch.end_ns + 1], "<u8").tobytes(),
        )
    )
    with pytest.raises(BatchRefused, match="entered_ns"):
        decode(batch.SerializeToString())
    batch.pending.rows = 2
    with pytest.raises(BatchRefused, match=r"pending\.lane"):
        decode(batch.SerializeToString())
