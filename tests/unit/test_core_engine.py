"""Simulated jobs through encoded batches and the engine: who is named, what is absent, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.collector.analyse import window as panes
from lanterne.collector.analyse.account import Accounts
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.clock import ClockObservation
from lanterne.collector.decode import decode
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.snapshot import CLASSES, DOMAINS, EVIDENCE, Snapshot
from lanterne.proto import telemetry_pb2 as pb

I64 = npt.NDArray[np.int64]
MS = 10**6
T0 = 10**15
BOOT = "11111111-2222-3333-4444-555555555555"
SMALL = EngineConfig(
    cells=1 << 20,
    rows=1 << 16,
    communicators=64,
    members=4096,
    processes=1024,
    own_cells=1 << 20,
    flush_batches=16,
)
ALL_REDUCE, ALL_TO_ALL = 4, 8


@dataclass
class Job:
    """A job of one communicator (or several): every operation of every rank, as arrays [k, rank].

    `op_of(k)` -> (op, role). Events may be deleted by `lost` before they are sent.
    """

    ranks: int
    arrival: I64
    duration: I64
    evidence: int = 2
    ops: list[tuple[int, int]] = field(default_factory=list)
    sync: I64 | None = None
    size: I64 | None = None
    nodes: int = 1
    offsets: tuple[int, ...] = (0,)
    comm_hash: int = 77
    lost: npt.NDArray[np.bool_] | None = None
    stride: int = 1
    boot: str = BOOT
    absent_ranks: tuple[int, ...] = ()
    complete: bool = True
    name: str = ""
    n_ranks: int = 0
    rank_ids: tuple[int, ...] = ()

    def batches(self, *, window_ns: int = 1000 * MS, first_sequence: int = 1) -> list[pb.Batch]:
        """All batches in the order in which a collector would get them."""
        found = []
        start = int(self.arrival.min())
        windows = int((self.arrival.max() - start) // window_ns) + 1
        for w in range(windows):
            for node in range(self.nodes):
                found.append(
                    self._batch(node, w + first_sequence, start + w * window_ns, window_ns)
                )
        return found

    def _batch(self, node: int, sequence: int, start: int, window_ns: int) -> pb.Batch:
        per_node = -(-self.ranks // self.nodes)
        mine = [
            r
            for r in range(node * per_node, min((node + 1) * per_node, self.ranks))
            if r not in self.absent_ranks
        ]
        k, index = np.nonzero(
            (self.arrival[:, mine] >= start) & (self.arrival[:, mine] < start + window_ns)
        )
        rank = np.array(mine, dtype=np.int64)[index]
        keep = k % self.stride == 0
        if self.lost is not None:
            keep &= ~self.lost[k, rank]
        k, index, rank = k[keep], index[keep], rank[keep]
        ops = np.array(self.ops or [(ALL_REDUCE, 0)])
        op, role = ops[k % len(ops)].T
        rows = len(k)
        zero = np.zeros(rows, "<u8")
        offset = self.offsets[node % len(self.offsets)]
        duration = self.duration[k, rank] if self.evidence in (1, 2) else zero
        sync = zero if self.sync is None else self.sync[k, rank]
        size = zero + np.uint64(1024) if self.size is None else self.size[k, rank]
        ids = self.rank_ids or tuple(range(self.ranks))
        return pb.Batch(
            schema=1,
            node=f"node-{node}",
            epoch=1_700_000_000_000_000_000,
            sequence=sequence,
            boot_id=self.boot if node == 0 else f"{self.boot}-{node}",
            start_ns=start + offset,
            end_ns=start + offset + window_ns,
            stride=self.stride,
            communicators=[
                pb.Communicator(
                    comm_hash=self.comm_hash,
                    library=1,
                    n_ranks=self.n_ranks or self.ranks,
                    rank=ids[r],
                    pid=100 + r,
                    pid_start_ticks=7,
                    workload="train",
                    name=self.name,
                    gpu_index=r,
                    gpu_bus_id=f"gpu{r}",
                    complete=self.complete,
                )
                for r in mine
            ],
            instances=pb.Instances(
                rows=rows,
                communicator=index.astype("<u4").tobytes(),
                seq=k.astype("<u4").tobytes(),
                lane=bytes(rows),
                op=op.astype("u1").tobytes(),
                role=role.astype("u1").tobytes(),
                evidence=np.full(rows, self.evidence, "u1").tobytes(),
                flags=np.where(k == 0, 4, 0).astype("u1").tobytes(),
                arrival_ns=(self.arrival[k, rank] + offset).astype("<u8").tobytes(),
                duration_ns=duration.astype("<u8").tobytes(),
                payload_bytes=size.astype("<u8").tobytes(),
                sync_blocked_ns=sync.astype("<u8").tobytes(),
            ),
        )


def simulate(own: I64, transfer: int = MS, **rest: object) -> Job:
    """Barrier-synchronised ranks from own times [k, rank] ns: all leave when the last has come."""
    arrival = np.zeros_like(own)
    now = T0
    for k in range(len(own)):
        arrival[k] = now + own[k]
        now = int(arrival[k].max()) + transfer
    end = arrival.max(axis=1) + transfer
    return Job(own.shape[1], arrival, end[:, None] - arrival, **rest)  # type: ignore[arg-type]


def noisy(rng: np.random.Generator, steps: int, ranks: int, mean_ms: float = 10.0) -> I64:
    return (rng.normal(mean_ms, 0.04 * mean_ms, (steps, ranks)).clip(0.1) * MS).astype(np.int64)


def drive(jobs: list[Job], engine: Engine | None = None) -> Snapshot:
    """Send every batch, a snapshot after each window; time is that of the windows."""
    engine = engine or Engine(SMALL, boot_id=BOOT)
    queue: list[tuple[int, pb.Batch]] = []
    for job in jobs:
        for batch in job.batches():
            node = int(batch.node.rsplit("-", 1)[1])
            queue.append((batch.end_ns - job.offsets[node % len(job.offsets)], batch))
    queue.sort(key=lambda pair: pair[0])
    last = 0
    for n, (when, batch) in enumerate(queue):
        batch.sequence = n + 1  # several jobs share a node's agent
        engine.apply(decode(batch.SerializeToString(), received_ns=when + 50 * MS))
        if when != last:
            engine.snapshot(when / 1e9)
            last = when
    return engine.snapshot(last / 1e9 + 1)


def late(engine: Engine, seconds: float) -> Snapshot:
    """The snapshot that much later than the newest batch, nothing more having come."""
    now = max(n.head.received_ns for n in engine.registry.nodes)
    return engine.snapshot(0.0, now_ns=now + int(seconds * 1e9))


def named(snapshot: Snapshot) -> list[tuple[int, str]]:
    r = snapshot.ranks
    picked = np.flatnonzero(r.straggler)
    return [(int(r.rank[i]), CLASSES[int(r.klass[i])]) for i in picked]


def test_waits_and_blame_are_exact() -> None:
    own = np.full((200, 4), 10 * MS)
    own[:, 2] += 5 * MS
    own[:, 1] += 2 * MS
    snapshot = drive([simulate(own)])
    comm, ranks = snapshot.communicators[0], snapshot.ranks
    assert comm.instances == 200
    assert comm.complete_share == 1
    assert EVIDENCE[comm.evidence] == "blocking"
    # The first instance connects and is not scored: 199 are.
    np.testing.assert_allclose(ranks.wait_seconds, 199 * np.array([5, 3, 0, 5]) / 1e3, rtol=1e-6)
    np.testing.assert_allclose(ranks.blame_seconds, 199 * np.array([0, 0, 3, 0]) / 1e3, rtol=1e-6)
    np.testing.assert_allclose(ranks.comm_seconds, 199 * 1e-3, rtol=1e-6)
    np.testing.assert_allclose(
        ranks.compute_seconds, 199 * np.array([10, 12, 15, 10]) / 1e3, rtol=1e-5
    )
    period = 16.0
    np.testing.assert_allclose(comm.wait_share, np.mean([5, 3, 0, 5]) / period, rtol=0.02)
    np.testing.assert_allclose(ranks.blame_share, np.array([0, 0, 3, 0]) / period, rtol=0.02)
    assert comm.waits_for == 2
    wait = comm.waits[("all_reduce", "blocking")]
    assert wait.bins.sum() == 4 * 199
    assert wait.bins[22] == 2 * 199  # 5 ms lies in [2^22, 2^23) ns
    assert wait.sum_seconds == pytest.approx(199 * 13e-3, rel=1e-6)


@pytest.mark.parametrize("ranks", [3, 4, 8, 64])
@pytest.mark.parametrize("evidence", [2, 3])
def test_slow_rank_is_named(ranks: int, evidence: int) -> None:
    rng = np.random.default_rng(ranks)
    own = noisy(rng, 1200, ranks)
    slow = ranks // 2
    own[:, slow] += 2 * MS
    job = simulate(own, evidence=evidence)
    if evidence == 3:
        job.sync = _blocked_on_gpu(job)
    snapshot = drive([job])
    assert named(snapshot) == [(slow, "slow_compute")]
    ratio = snapshot.ranks.straggler_ratio[slow]
    # Enqueue own times hold the transfer too: (12 + 1) / (10 + 1).
    assert ratio == pytest.approx(1.2 if evidence == 2 else 13 / 11, abs=0.03)
    assert snapshot.communicators[0].waits_for == slow


def _blocked_on_gpu(job: Job) -> I64:
    """The host was blocked in synchronise for the whole time since the last operation."""
    blocked = np.zeros_like(job.arrival)
    blocked[1:] = np.diff(job.arrival, axis=0)
    return blocked


def test_slow_host_was_not_blocked() -> None:
    rng = np.random.default_rng(5)
    own = noisy(rng, 1200, 8)
    job = simulate(own, evidence=3)
    blocked = _blocked_on_gpu(job)
    slow = own.copy()
    slow[:, 3] += 3 * MS  # the host sleeps, its GPU's work is long done
    job = simulate(slow, evidence=3)
    wait = job.arrival.max(axis=1, keepdims=True) - job.arrival
    blocked[1:] = own[1:] + wait[:-1]
    job.sync = blocked
    assert named(drive([job])) == [(3, "slow_host")]


def test_two_slow_ranks_are_both_named() -> None:
    own = noisy(np.random.default_rng(1), 1200, 8)
    own[:, [1, 6]] += 3 * MS
    assert [r for r, _ in named(drive([simulate(own)]))] == [1, 6]


def test_intermittent_rank_is_named() -> None:
    rng = np.random.default_rng(2)
    own = noisy(rng, 1500, 8)
    own[rng.random(1500) < 0.2, 4] += 10 * MS
    assert [r for r, _ in named(drive([simulate(own)]))] == [4]


def test_slow_in_one_of_four_phases_is_named() -> None:
    own = noisy(np.random.default_rng(3), 1600, 4)
    own[2::4, 1] += 5 * MS
    ops = [(ALL_TO_ALL, 1), (ALL_TO_ALL, 2), (ALL_REDUCE, 0), (3, 0)]
    assert [r for r, _ in named(drive([simulate(own, ops=ops)]))] == [1]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_slow_nobody_named(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 3, 4, 8, 16]))
    own = noisy(rng, 800, ranks)
    own[rng.random(own.shape) < 0.005] += 50 * MS  # rare pauses, anywhere
    assert named(drive([simulate(own)])) == []


def test_verdict_is_cleared_when_the_rank_recovers() -> None:
    own = noisy(np.random.default_rng(4), 3000, 4)
    own[:1500, 0] += 4 * MS
    engine = Engine(SMALL, boot_id=BOOT)
    first = simulate(own[:1500])
    assert named(drive([first], engine)) == [(0, "slow_compute")]
    engine = Engine(SMALL, boot_id=BOOT)
    assert named(drive([simulate(own)], engine)) == []


def test_two_ranks_compare_with_own_history() -> None:
    own = noisy(np.random.default_rng(6), 4000, 2)
    own[2500:, 1] += 4 * MS
    snapshot = drive([simulate(own)])
    assert [r for r, _ in named(snapshot)] == [1]


def test_hot_expert_against_slow_gpu() -> None:
    ops = [(ALL_TO_ALL, 1), (ALL_TO_ALL, 2)]
    for more_tokens, expected in ((1.5, "hot_expert"), (1.0, "slow_compute")):
        own = noisy(np.random.default_rng(7), 1200, 8)
        own[1::2, 5] = (own[1::2, 5] * 1.5).astype(np.int64)
        size = np.full(own.shape, 1 << 20)
        size[1::2, 5] = int((1 << 20) * more_tokens)
        assert named(drive([simulate(own, ops=ops, size=size)])) == [(5, expected)]


def test_host_that_runs_ahead_shows_nothing_and_says_why() -> None:
    own = noisy(np.random.default_rng(8), 1000, 4)
    own[:, 1] += 5 * MS
    snapshot = drive([simulate(own, evidence=0)])
    comm = snapshot.communicators[0]
    assert named(snapshot) == []
    assert EVIDENCE[comm.evidence] == "none"
    assert "host runs ahead" in comm.absent_reason
    for column in ("wait_seconds", "blame_seconds", "wait_share", "straggler_ratio"):
        assert np.isnan(getattr(snapshot.ranks, column)).all()
    assert np.isnan(comm.wait_share)
    assert comm.waits == {}
    assert comm.waits_for == -1


def test_one_operation_a_step_with_evidence_is_not_enough() -> None:
    rng = np.random.default_rng(9)
    job = simulate(noisy(rng, 1000, 4), evidence=3)
    batches = job.batches()
    engine = Engine(SMALL, boot_id=BOOT)
    for batch in batches:
        seq = np.frombuffer(batch.instances.seq, "<u4")
        batch.instances.evidence = np.where(seq % 5 == 0, 3, 0).astype("u1").tobytes()
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
    snapshot = engine.snapshot(0.0)
    assert EVIDENCE[snapshot.communicators[0].evidence] == "none"
    assert "host runs ahead" in snapshot.communicators[0].absent_reason


def test_mixed_evidence_is_not_scored() -> None:
    engine = Engine(SMALL, boot_id=BOOT)
    for batch in simulate(noisy(np.random.default_rng(9), 300, 4), evidence=3).batches():
        index = np.frombuffer(batch.instances.communicator, "<u4")
        batch.instances.evidence = np.where(index == 2, 0, 3).astype("u1").tobytes()
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
    snapshot = engine.snapshot(0.0)
    assert "evidence differs" in snapshot.communicators[0].absent_reason


@pytest.mark.parametrize(("absent", "known"), [((1,), True), ((1, 2, 3), False)])
def test_missing_ranks(absent: tuple[int, ...], known: bool) -> None:
    own = np.full((300, 8), 10 * MS)
    own[:, 5] += 4 * MS
    engine = Engine(SMALL, boot_id=BOOT)
    drive([simulate(own, absent_ranks=absent)], engine)
    snapshot = late(engine, 11)
    comm = snapshot.communicators[0]
    assert comm.ranks_seen == 8 - len(absent)
    assert comm.complete_share == 0
    if known:  # 7 of 8: a lower bound is shown
        waits = snapshot.ranks.wait_seconds
        np.testing.assert_allclose(waits[snapshot.ranks.rank == 0], 299 * 4e-3, rtol=1e-6)
        assert comm.absent_reason == ""
    else:
        assert comm.absent_reason == "ranks missing: 5 of 8 seen"
        assert np.isnan(snapshot.ranks.wait_seconds).all()


def test_lost_events_cost_only_their_instances() -> None:
    rng = np.random.default_rng(11)
    own = noisy(rng, 1500, 8)
    own[:, 3] += 2 * MS
    lost = rng.random(own.shape) < 0.005
    engine = Engine(SMALL, boot_id=BOOT)
    snapshot = drive([simulate(own, lost=lost)], engine)
    assert [r for r, _ in named(snapshot)] == [3]
    snapshot = late(engine, 11)
    comm = snapshot.communicators[0]
    whole = int((~lost.any(axis=1)).sum())
    assert comm.instances == len(own)  # no instance lost all of its eight events here
    assert comm.complete_share == pytest.approx(whole / comm.instances)


@pytest.mark.parametrize("stride", [2, 4])
def test_sampled_instances_still_join(stride: int) -> None:
    own = noisy(np.random.default_rng(12), 6000, 4)
    own[:, 2] += 3 * MS
    for evidence in (2, 3):
        snapshot = drive([simulate(own[:3000], stride=stride, evidence=evidence)])
        assert snapshot.communicators[0].instances == 3000 // stride
        assert [r for r, _ in named(snapshot)] == [2]


def _exchange(engine: Engine, node: int, offset: int, rtt: int, at: int) -> None:
    """An agent whose clock shows `offset` more than the collector's; symmetrical paths."""
    engine.apply(
        ClockObservation(
            node=f"node-{node}",
            agent_sent_ns=at + offset,
            collector_received_ns=at + rtt // 2,
            collector_sent_ns=at + rtt // 2,
            agent_received_ns=at + rtt + offset,
        )
    )


def test_two_nodes_with_different_clocks() -> None:
    own = noisy(np.random.default_rng(13), 1200, 8)
    own[:, 6] += 3 * MS
    offsets = (0, 123_456_789_012)
    job = simulate(own, evidence=3, nodes=2, offsets=offsets)
    engine = Engine(SMALL, boot_id=BOOT)
    _exchange(engine, 1, offsets[1], 100_000, T0)
    snapshot = drive([job], engine)
    assert [r for r, _ in named(snapshot)] == [6]
    true = (job.arrival.max(axis=1, keepdims=True) - job.arrival)[1:].sum(axis=0) / 1e9
    # The last exchange is 18 s old: 50 ppm of drift may have made 0.9 ms, twice that is not shown.
    shown = snapshot.ranks.wait_seconds
    assert (shown <= true + 0.05 * true.max()).all()
    np.testing.assert_allclose(shown[:4], true[:4], rtol=0.1)
    assert snapshot.nodes[1].clock_offset_seconds == pytest.approx(-offsets[1] / 1e9)


def test_clock_error_larger_than_the_waits_hides_them() -> None:
    own = noisy(np.random.default_rng(14), 600, 4)
    engine = Engine(SMALL, boot_id=BOOT)
    _exchange(engine, 1, 5000, 60 * MS, T0)
    snapshot = drive([simulate(own, evidence=3, nodes=2, offsets=(0, 5000))], engine)
    comm = snapshot.communicators[0]
    assert "clock error 30" in comm.absent_reason
    assert named(snapshot) == []
    assert np.isnan(snapshot.ranks.wait_seconds).all()


def test_unknown_clock_is_said_and_durations_need_none() -> None:
    own = noisy(np.random.default_rng(15), 600, 4)
    own[:, 3] += 3 * MS
    offsets = (0, -(10**12))
    unknown = drive([simulate(own, evidence=3, nodes=2, offsets=offsets)])
    assert "clocks of the nodes not known" in unknown.communicators[0].absent_reason
    known = drive([simulate(np.tile(own, (2, 1)), evidence=2, nodes=2, offsets=offsets)])
    assert [r for r, _ in named(known)] == [3]


def test_victim_of_another_group_is_not_blamed() -> None:
    """Ranks 0..3; groups {0,1} {2,3} then {0,2} {1,3}. Rank 0 is slow, 1 waits for it, so 1 comes
    last in {1,3}: it is a victim there.
    """
    steps, rng = 1500, np.random.default_rng(16)
    own = noisy(rng, steps, 4)
    own[:, 0] += 4 * MS
    now = np.full(4, T0)
    first, second = np.zeros((2, steps, 4), np.int64)
    first_end, second_end = np.zeros((2, steps, 4), np.int64)
    for k in range(steps):
        first[k] = now + own[k]
        for a, b in ((0, 1), (2, 3)):
            first_end[k, [a, b]] = max(first[k, a], first[k, b]) + MS
        second[k] = first_end[k] + MS
        for a, b in ((0, 2), (1, 3)):
            second_end[k, [a, b]] = max(second[k, a], second[k, b]) + MS
        now = second_end[k].copy()
    engine = Engine(SMALL, boot_id=BOOT)
    queue = []
    for k in range(steps // 50):
        part = slice(k * 50, (k + 1) * 50)
        queue.append(
            _grouped_batch(k, first[part], first_end[part], second[part], second_end[part])
        )
    for batch in queue:
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
        snapshot = engine.snapshot(0.0)
    names = {
        (snapshot.communicators[c].comm_hash, int(r)): float(b)
        for c, r, b in zip(
            snapshot.ranks.comm, snapshot.ranks.rank, snapshot.ranks.blame_seconds, strict=True
        )
    }
    assert names[(10, 0)] > 4  # rank 0 in {0, 1}: about 4 ms a step
    assert names[(21, 0)] < 0.1 * names[(10, 0)]  # rank 1, first of {1, 3}: a victim


def _grouped_batch(k: int, *times: I64) -> pb.Batch:
    first, first_end, second, second_end = times
    groups = [(10, 0, 0), (10, 1, 1), (11, 0, 2), (11, 1, 3), (20, 0, 0), (21, 0, 1), (20, 1, 2)]
    groups.append((21, 1, 3))
    comms, rows = [], []
    for comm_hash, rank, process in groups:
        comms.append(
            pb.Communicator(
                comm_hash=comm_hash,
                library=2,
                n_ranks=2,
                rank=rank,
                pid=100 + process,
                pid_start_ticks=7,
                gpu_index=-1,
                complete=True,
            )
        )
        a, e = (first, first_end) if comm_hash < 20 else (second, second_end)
        for i in range(len(a)):
            rows.append((len(comms) - 1, k * 50 + i, a[i, process], e[i, process] - a[i, process]))
    table = np.array(rows)
    n = len(table)
    return pb.Batch(
        schema=1,
        node="node-0",
        epoch=1,
        sequence=k + 1,
        boot_id=BOOT,
        start_ns=int(table[:, 2].min()),
        end_ns=int(table[:, 2].max()),
        stride=1,
        communicators=comms,
        instances=pb.Instances(
            rows=n,
            communicator=table[:, 0].astype("<u4").tobytes(),
            seq=table[:, 1].astype("<u4").tobytes(),
            lane=bytes(n),
            op=bytes([ALL_REDUCE]) * n,
            role=bytes(n),
            evidence=bytes([2]) * n,
            flags=bytes(n),
            arrival_ns=table[:, 2].astype("<u8").tobytes(),
            duration_ns=table[:, 3].astype("<u8").tobytes(),
            payload_bytes=bytes(8 * n),
            sync_blocked_ns=bytes(8 * n),
        ),
    )


def test_different_operations_at_one_sequence_number_are_not_scored() -> None:
    engine = Engine(SMALL, boot_id=BOOT)
    for batch in simulate(noisy(np.random.default_rng(17), 300, 4)).batches():
        index = np.frombuffer(batch.instances.communicator, "<u4")
        batch.instances.op = np.where(index == 1, 3, ALL_REDUCE).astype("u1").tobytes()
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
    comm = engine.snapshot(0.0).communicators[0]
    assert "do not match" in comm.absent_reason
    assert comm.instances == 300


def test_backlog_after_an_outage_is_scored_whole() -> None:
    """20 s of two nodes' batches, first all of one, then all of the other."""
    own = noisy(np.random.default_rng(18), 2000, 8)
    job = simulate(own, nodes=2)
    batches = job.batches()
    engine = Engine(SMALL, boot_id=BOOT)
    for node in ("node-0", "node-1"):
        for batch in batches:
            if batch.node == node:
                engine.apply(decode(batch.SerializeToString(), received_ns=T0))
    snapshot = engine.snapshot(0.0)
    assert snapshot.communicators[0].instances == 2000
    assert snapshot.communicators[0].complete_share == 1
    assert snapshot.ingest["rows_late"] == 0
    assert snapshot.ingest["rows_overrun"] == 0


def test_same_input_same_output_in_any_grouping_of_batches() -> None:
    own = noisy(np.random.default_rng(19), 1000, 4)
    own[:, 1] += 3 * MS
    results = []
    for every in (1, 7):
        engine = Engine(SMALL, boot_id=BOOT)
        for n, batch in enumerate(simulate(own).batches()):
            engine.apply(decode(batch.SerializeToString(), received_ns=T0))
            if n % every == 0:
                engine.flush()
        results.append(engine.snapshot(0.0))
    np.testing.assert_allclose(results[0].ranks.wait_seconds, results[1].ranks.wait_seconds)
    assert results[0].communicators[0].instances == results[1].communicators[0].instances


def test_restarted_job_under_the_same_hash_starts_anew() -> None:
    own = noisy(np.random.default_rng(20), 300, 4)
    engine = Engine(SMALL, boot_id=BOOT)
    drive([simulate(own)], engine)
    again = simulate(own)
    again.arrival += 60_000 * MS
    for n, batch in enumerate(again.batches()):
        batch.sequence = 100 + n
        for c in batch.communicators:
            c.pid_start_ticks = 99
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
    snapshot = engine.snapshot(0.0)
    assert len(snapshot.communicators) == 1
    assert snapshot.communicators[0].instances == 300


@pytest.mark.parametrize("evidence", [2, 3])
def test_communicator_met_running_is_brought_into_step(evidence: int) -> None:
    """The agent attached in the middle: each rank counts from another operation."""
    own = noisy(np.random.default_rng(30), 2000, 4)
    own[:, 1] += 2 * MS
    began = np.array([0, 3, 1, 2])
    engine = Engine(SMALL, boot_id=BOOT)
    for batch in simulate(own, evidence=evidence, complete=False).batches():
        seq = np.frombuffer(batch.instances.seq, "<u4").astype(np.int64)
        index = np.frombuffer(batch.instances.communicator, "<u4")
        batch.instances.seq = (seq - began[index]).clip(0).astype("<u4").tobytes()
        batch.instances.flags = bytes(len(seq))
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
        snapshot = engine.snapshot(0.0)
    comm, ranks = snapshot.communicators[0], snapshot.ranks
    assert comm.absent_reason == ""
    assert [r for r, _ in named(snapshot)] == [1]
    assert comm.waits_for == 1
    assert comm.complete_share > 0.98
    true = own.max(axis=1, keepdims=True) - own
    scored = comm.waits[("all_reduce", EVIDENCE[evidence])].bins.sum() / 4
    np.testing.assert_allclose(
        ranks.wait_seconds / scored, true.mean(axis=0) / 1e9, rtol=0.05, atol=1e-5
    )


def test_restarted_agent_counts_anew() -> None:
    own = noisy(np.random.default_rng(31), 3000, 4)
    own[:, 2] += 2 * MS
    engine = Engine(SMALL, boot_id=BOOT)
    for batch in simulate(own).batches():
        seq = np.frombuffer(batch.instances.seq, "<u4").astype(np.int64)
        if seq.min() >= 1500:
            index = np.frombuffer(batch.instances.communicator, "<u4")
            first = np.array([1500, 1499, 1498, 1500])
            batch.instances.seq = (seq - first[index]).astype("<u4").tobytes()
            batch.epoch += 1
            for c in batch.communicators:
                c.complete = False
        elif seq.max() >= 1500:
            continue  # lost with the agent
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
        snapshot = engine.snapshot(0.0)
    comm = snapshot.communicators[0]
    assert [r for r, _ in named(snapshot)] == [2]
    assert comm.instances > 2500
    assert comm.complete_share > 0.98


def test_shift_that_is_not_clear_is_not_guessed() -> None:
    """Arrivals of evidence, but scattered over several periods: no shift stands out."""
    rng = np.random.default_rng(32)
    job = simulate(noisy(rng, 1000, 4), evidence=3, complete=False)
    job.arrival += rng.integers(0, 60 * MS, job.arrival.shape)
    engine = Engine(SMALL, boot_id=BOOT)
    for batch in job.batches():
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
        snapshot = engine.snapshot(0.0)
    assert named(snapshot) == []
    assert "not aligned" in snapshot.communicators[0].absent_reason
    assert np.isnan(snapshot.ranks.wait_seconds).all()


def test_ended_and_idle_communicators_vanish() -> None:
    engine = Engine(SMALL, boot_id=BOOT)
    drive([simulate(noisy(np.random.default_rng(21), 200, 4))], engine)
    assert len(late(engine, 200).communicators) == 1  # silent: nobody said that it has ended
    assert len(late(engine, 301).communicators) == 0
    assert engine.tables.cells.used == 0
    assert engine.tables.rows.used == 0


def test_labels_are_stable_and_unique() -> None:
    own = noisy(np.random.default_rng(22), 50, 2)
    jobs = [simulate(own, comm_hash=h, name=name) for h, name in ((1, ""), (2, ""), (3, "ep"))]
    jobs.append(simulate(own, comm_hash=4, name="ep"))
    labels = [c.name for c in drive(jobs).communicators]
    assert labels == ["nccl-2ranks-0", "nccl-2ranks-1", "ep", "ep-2"]


def _traffic_batch(node: int, sequence: int, rng: np.random.Generator) -> tuple[pb.Batch, int]:
    ranks = range(node * 2, node * 2 + 2)
    comms = [
        pb.Communicator(
            comm_hash=5,
            library=1,
            n_ranks=4,
            rank=r,
            pid=100 + r,
            gpu_index=r,
            gpu_bus_id="shared" if node == 1 else f"gpu{r}",
            complete=True,
        )
        for r in ranks
    ]
    index = np.repeat([0, 1], 4)
    peer = np.tile(np.arange(4), 2)
    sent = rng.integers(0, 1 << 40, 8)
    batch = pb.Batch(
        schema=1,
        node=f"node-{node}",
        epoch=1,
        sequence=sequence,
        end_ns=sequence,
        stride=1,
        communicators=comms,
        traffic=pb.Traffic(
            rows=8,
            communicator=index.astype("<u4").tobytes(),
            peer=peer.astype("<u4").tobytes(),
            sent_bytes=sent.astype("<u8").tobytes(),
            received_bytes=bytes(64),
        ),
    )
    return batch, int(sent.sum())


def test_bytes_are_conserved_and_told_apart_by_domain() -> None:
    rng, total = np.random.default_rng(23), 0
    engine = Engine(SMALL, boot_id=BOOT)
    for sequence in (1, 2, 3):
        for node in (0, 1):
            batch, sent = _traffic_batch(node, sequence, rng)
            total += sent
            engine.apply(decode(batch.SerializeToString(), received_ns=sequence))
            engine.flush()  # node 1 is not known yet when node 0's first traffic is folded
    snapshot = engine.snapshot(0.0)
    comm = snapshot.communicators[0]
    domains, matrix = comm.bytes_by_domain, comm.traffic
    assert domains is not None
    assert matrix is not None
    assert domains.sum() == matrix.sum() == total
    assert domains[:, 3].sum() == 0
    np.testing.assert_array_equal(domains[:2, 0], np.diag(matrix)[:2])  # own GPU: itself only
    np.testing.assert_array_equal(domains[2:, 0], matrix[2:, 2:].sum(axis=1))  # ranks share one
    np.testing.assert_array_equal(domains[2:, 1], 0)
    np.testing.assert_array_equal(domains[:2, 2], matrix[:2, 2:].sum(axis=1))
    assert comm.load["skew"] == pytest.approx(matrix.sum(axis=0).max() / matrix.sum(axis=0).mean())
    (shown,) = json.loads(snapshot_json(snapshot))["communicators"]
    assert shown["traffic"] == matrix.tolist()
    assert shown["bytes_by_domain"] == {
        name: domains[:, d].tolist() for d, name in enumerate(DOMAINS)
    }


def test_table_bounds_drop_and_count() -> None:
    tiny = EngineConfig(cells=4096, rows=128, communicators=8, members=64, processes=64)
    own = noisy(np.random.default_rng(24), 2000, 8)
    engine = Engine(tiny, boot_id=BOOT)
    for batch in simulate(own).batches(window_ns=20_000 * MS):
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
    engine.flush()
    snapshot = late(engine, 6)
    assert snapshot.ingest["rows"] == 16_000
    dropped = snapshot.ingest["rows_overrun"] + snapshot.ingest["rows_late"]
    assert 8 * snapshot.communicators[0].instances + dropped == 16_000
    assert engine.stride > 1


def test_rank_claimed_by_two_processes_is_a_conflict() -> None:
    engine = Engine(SMALL, boot_id=BOOT)
    job = simulate(noisy(np.random.default_rng(25), 50, 2))
    batch = job.batches()[0]
    engine.apply(decode(batch.SerializeToString(), received_ns=T0))
    for c in batch.communicators:
        c.pid += 1000
    batch.sequence = 2
    engine.apply(decode(batch.SerializeToString(), received_ns=T0 + MS))
    assert engine.snapshot(0.0).ingest["dropped_rank_conflict"] == 2


@pytest.mark.parametrize("slow", [(), (1,), (2,)])
def test_ranks_that_come_back_are_judged_in_the_window_in_which_they_do(
    slow: tuple[int, ...],
) -> None:
    """Half of the ranks are silent for 40 s; then all that they did meanwhile comes at once."""
    own = noisy(np.random.default_rng(5), 1600, 4, mean_ms=45)
    own[:, slow] = own[:, slow] * 6 // 5
    expected = [57 / 48 if rank in slow else 1 for rank in range(4)]
    job = simulate(own, evidence=3, nodes=2, transfer=3 * MS)
    start = int(job.arrival.min())
    engine = Engine(SMALL, boot_id=BOOT)
    ratios: dict[int, npt.NDArray[np.float64]] = {}
    who: dict[int, list[int]] = {}
    held: list[pb.Batch] = []
    sequence = 0
    for batch in job.batches():
        second = (batch.end_ns - start) // (1000 * MS)
        held.append(batch)
        if batch.node == "node-0" and 17 < second <= 52:
            continue
        ready = [b for b in held if b is batch or second > 52]
        held = [b for b in held if b not in ready]
        for each in ready:
            sequence += 1
            each.sequence, each.boot_id = sequence, BOOT
            data = each.SerializeToString()
            engine.apply(decode(data, received_ns=batch.end_ns + 50 * MS))
        if batch.node == "node-1":
            snapshot = engine.snapshot(batch.end_ns / 1e9)
            ratios[second] = snapshot.ranks.straggler_ratio
            who[second] = [rank for rank, _ in named(snapshot)]
    assert np.isnan(ratios[50]).all()
    assert who[50] == []
    back = min(s for s in ratios if s > 52 and not np.isnan(ratios[s]).any())
    assert back < 62
    for second in range(back, 75):
        assert ratios[second] == pytest.approx(expected, abs=0.03)
        assert who[second] == list(slow)


def test_own_times_are_right_in_the_window_in_which_the_tables_grow() -> None:
    """A node is silent for longer than the tables hold. When its ranks come, the others' previous
    operations, whose waits are taken off, are in another place."""
    own = noisy(np.random.default_rng(6), 1400, 4, mean_ms=5)
    own[:, 1] = own[:, 1] * 6 // 5
    job = simulate(own, evidence=3, nodes=2, transfer=MS)
    start = int(job.arrival.min())
    engine = Engine(SMALL, boot_id=BOOT)
    held: list[pb.Batch] = []
    known = []
    for sequence, batch in enumerate(job.batches(), 1):
        batch.sequence, batch.boot_id = sequence, BOOT
        if batch.node == "node-0":
            held.append(batch)
            if batch.end_ns - start < 4500 * MS:
                continue
        ready, held = ([batch], held) if batch.node != "node-0" else (held, [])
        for each in ready:
            data = each.SerializeToString()
            engine.apply(decode(data, received_ns=batch.end_ns + 50 * MS))
        ratio = engine.snapshot(batch.end_ns / 1e9).ranks.straggler_ratio
        if not np.isnan(ratio).any():
            known.append(ratio)
    assert engine.tables.counts.grown >= 1
    # Without durations the transfer is a part of it.
    assert known[0] == pytest.approx([1, 7 / 6, 1, 1], abs=0.02)


@pytest.mark.parametrize(
    ("outcome", "seconds", "kept"),
    [(panes.MISSING, 5, True), (panes.SCORED, 5, False), (panes.SCORED, 60, True)],
)
def test_a_backlog_thins_out_nothing_after_it(outcome: int, seconds: int, kept: bool) -> None:
    """Neither of rows that lacked ranks nor of a minute: the own times of all that follow stay."""
    window = panes.Window(slots=1, members=2, own_cells=1024, window_ns=5 * 10**9)
    window.closed.rows[0] = window.closed.outcome[0, outcome] = 4000
    window.closed.span_ns[0] = seconds * 10**9
    rows = np.arange(90)
    judged = SimpleNamespace(ranks=2, slot=np.zeros(90, np.int64), rows=rows)
    accounts = Accounts.__new__(Accounts)
    accounts._window, accounts._tables = window, SimpleNamespace(tag=rows)  # type: ignore[assignment]
    assert accounts._sampled(judged, rows).all() == kept  # type: ignore[arg-type]
