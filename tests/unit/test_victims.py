"""Jobs of several communicators: blame passes victims by, and sums to at most the job's time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse import costs, victims
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from lanterne.collector.snapshot import Snapshot
from lanterne.proto import telemetry_pb2 as pb

F64 = npt.NDArray[np.float64]
MS = 10**6
T0 = 10**15
BOOT = "11111111-2222-3333-4444-555555555555"
SMALL = EngineConfig(
    cells=1 << 20, rows=1 << 16, communicators=64, members=4096, processes=1024, own_cells=1 << 20
)
ALL_REDUCE, SEND, RECV = 4, 6, 7
BLOCKING, ENQUEUE = 2, 3


@dataclass
class Cluster:
    """Processes that compute and call collectives; times are exact."""

    processes: int
    evidence: int = BLOCKING
    transfer: int = MS // 2
    now: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)
    members: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = [T0] * self.processes

    def compute(self, process: int, ns: float) -> None:
        self.now[process] += int(ns)

    def all_reduce(self, comm: int, members: list[int]) -> None:
        self._run(comm, members, dict.fromkeys(members, ALL_REDUCE), lane=0)

    def send(self, comm: int, source: int, target: int) -> None:
        """The sender goes on at once; the receiver when it is there."""
        self.members[comm] = [source, target]
        arrival = {p: self.now[p] for p in (source, target)}
        end = {source: arrival[source] + self.transfer // 10}
        end[target] = max(arrival.values()) + self.transfer
        for process, op in ((source, SEND), (target, RECV)):
            self._row(comm, process, op, 1, arrival[process], end[process])

    def _run(self, comm: int, members: list[int], op: dict[int, int], lane: int) -> None:
        self.members[comm] = members
        end = max(self.now[p] for p in members) + self.transfer
        for process in members:
            self._row(comm, process, op[process], lane, self.now[process], end)

    def _row(self, comm: int, process: int, op: int, lane: int, start: int, end: int) -> None:
        seq = self.counts[comm, process] = self.counts.get((comm, process), -1) + 1
        self.rows.append((start, comm, process, seq, lane, op, end - start))
        self.now[process] = end

    def run(self) -> Snapshot:
        engine = Engine(SMALL, boot_id=BOOT)
        rows = np.array(sorted(self.rows), dtype=np.int64)
        places = [(c, r, p) for c, ps in self.members.items() for r, p in enumerate(ps)]
        index = {(c, p): i for i, (c, _, p) in enumerate(places)}
        window = 1000 * MS
        snapshot = engine.snapshot(0.0)
        for number in range(int((rows[-1, 0] - T0) // window) + 1):
            start = T0 + number * window
            mine = rows[(rows[:, 0] >= start) & (rows[:, 0] < start + window)]
            batch = self._batch(number, start, window, mine, places, index)
            engine.apply(decode(batch.SerializeToString(), received_ns=start + window))
            snapshot = engine.snapshot(0.0)
        return snapshot

    def _batch(
        self,
        number: int,
        start: int,
        window: int,
        rows: npt.NDArray[np.int64],
        places: list[tuple[int, int, int]],
        index: dict[tuple[int, int], int],
    ) -> pb.Batch:
        n = len(rows)
        at = np.array([index[int(c), int(p)] for c, p in rows[:, 1:3]], dtype="<u4")
        timed = self.evidence == BLOCKING
        return pb.Batch(
            schema=1,
            node="node-0",
            epoch=1,
            sequence=number + 1,
            boot_id=BOOT,
            start_ns=start,
            end_ns=start + window,
            stride=1,
            communicators=[
                pb.Communicator(
                    comm_hash=1000 + c,
                    library=1,
                    n_ranks=len(self.members[c]),
                    rank=r,
                    pid=100 + p,
                    pid_start_ticks=7,
                    workload="train",
                    gpu_index=p,
                    complete=True,
                )
                for c, r, p in places
            ],
            instances=pb.Instances(
                rows=n,
                communicator=at.tobytes(),
                seq=rows[:, 3].astype("<u4").tobytes(),
                lane=rows[:, 4].astype("u1").tobytes(),
                op=rows[:, 5].astype("u1").tobytes(),
                role=bytes(n),
                evidence=np.full(n, self.evidence, "u1").tobytes(),
                flags=np.where(rows[:, 3] == 0, 4, 0).astype("u1").tobytes(),
                arrival_ns=rows[:, 0].astype("<u8").tobytes(),
                duration_ns=(rows[:, 6] * timed).astype("<u8").tobytes(),
                payload_bytes=np.full(n, 1024, "<u8").tobytes(),
                sync_blocked_ns=bytes(8 * n),
            ),
        )


def three_levels(
    slow: dict[int, float], *, evidence: int = BLOCKING, steps: int = 400, second: float = 4.0
) -> Cluster:
    """Tensor pairs in two pipeline stages in two replicas: process = 4 replica + 2 stage + tensor.

    A step: the first stage computes and reduces, sends to the second, which does the same; then
    every process reduces with its twin in the other replica. second: ms of the second stage.
    """
    rng = np.random.default_rng(1)
    c = Cluster(8, evidence=evidence)

    def work(process: int) -> None:
        usual = second if process % 4 >= 2 else 4.0
        c.compute(process, (usual + rng.normal(0, 0.05) + slow.get(process, 0.0)) * MS)

    for _ in range(steps):
        for stage in range(2):
            for replica in range(2):
                pair = [4 * replica + 2 * stage + t for t in range(2)]
                if stage:
                    for p in pair:
                        c.send(200 + p, p - 2, p)
                for p in pair:
                    work(p)
                c.all_reduce(10 * replica + stage, pair)
        for p in range(4):
            c.all_reduce(100 + p, [p, p + 4])
    return c


def blame_of(snapshot: Snapshot) -> dict[int, float]:
    """Share of the job's time by process."""
    (job,) = snapshot.jobs
    return {b.pid - 100: b.share for b in job.blame}


@pytest.mark.parametrize("slow", range(8))
def test_only_the_culprit_of_a_chain_is_blamed(slow: int) -> None:
    """Its tensor twin, the stage after it and all of their replicas come late because of it."""
    snapshot = three_levels({slow: 3.0}).run()
    blame = blame_of(snapshot)
    assert max(blame, key=blame.__getitem__) == slow
    others = sum(v for p, v in blame.items() if p != slow)
    assert blame[slow] > 0.15
    assert others < 0.1 * blame[slow]
    assert sum(blame.values()) <= 1
    named = snapshot.ranks.pid[snapshot.ranks.straggler != 0] - 100
    assert set(named.tolist()) <= {slow}


def test_arrivals_alone_do_not_blame_victims_either() -> None:
    snapshot = three_levels({0: 3.0}, evidence=ENQUEUE).run()
    blame = blame_of(snapshot)
    assert max(blame, key=blame.__getitem__) == 0
    assert sum(v for p, v in blame.items() if p != 0) < 0.1 * blame[0]


def test_two_culprits_share() -> None:
    """One in each replica: with either fixed the other holds the step up as long."""
    blame = blame_of(three_levels({0: 3.0, 4: 3.0}).run())
    assert set(sorted(blame, key=blame.__getitem__)[-2:]) == {0, 4}
    assert sum(blame.values()) <= 1


def test_cycle_of_two_groups_is_broken_by_own_time() -> None:
    """0 waits for 1 in one group, 1 for 0 in the next, and so on; 2 and 3 only ever wait."""
    c = Cluster(4)
    for _ in range(500):
        c.compute(1, 3 * MS)
        c.compute(0, MS)
        c.all_reduce(1, [0, 1])
        c.compute(0, 3 * MS)
        c.compute(1, MS)
        c.all_reduce(2, [0, 1])
        for p in (2, 3):
            c.compute(p, MS)
        c.all_reduce(3, [0, 2])
        c.all_reduce(4, [1, 3])
    blame = blame_of(c.run())
    assert {p for p, v in blame.items() if v > 0.02} == {0, 1}
    assert sum(blame.values()) <= 1


def test_groups_side_by_side_are_no_more_than_the_job() -> None:
    """A late rank in each of eight groups that never meet."""
    c = Cluster(16)
    for _ in range(600):
        for group in range(8):
            c.compute(2 * group, 8 * MS)
            c.compute(2 * group + 1, MS)
            c.all_reduce(group, [2 * group, 2 * group + 1])
    snapshot = c.run()
    blame = blame_of(snapshot)
    assert sum(snapshot.ranks.blame_share) > 2  # each communicator for itself
    assert 0.5 < sum(blame.values()) <= 1 + 1e-9
    (job,) = snapshot.jobs
    assert 0 <= job.recoverable_share <= 1


def test_what_would_come_back_is_what_does() -> None:
    """The steps' time with the slow rank, against that of the same job without it."""
    with_fault, without = (three_levels(slow, second=3.0) for slow in ({0: 3.0}, {}))
    took = [max(c.now) - T0 for c in (with_fault, without)]
    true = 1 - took[1] / took[0]
    snapshot = with_fault.run()
    (job,) = snapshot.jobs
    assert job.recoverable_share == pytest.approx(true, rel=0.05)


def test_a_named_rank_says_what_comes_back() -> None:
    def job(slow: float) -> Cluster:
        c, rng = Cluster(4), np.random.default_rng(3)
        for _ in range(2000):
            for p in range(4):
                c.compute(p, (6 + rng.normal(0, 0.1) + (slow if p == 2 else 0.0)) * MS)
            c.all_reduce(1, [0, 1, 2, 3])
        return c

    slow = job(2.0)
    true = 1 - (max(job(0.0).now) - T0) / (max(slow.now) - T0)
    ranks = slow.run().ranks
    (row,) = np.flatnonzero(ranks.straggler)
    assert ranks.rank[row] == 2
    assert ranks.recoverable_share[row] == pytest.approx(true, rel=0.05)
    others = np.delete(ranks.recoverable_share, row)
    assert (others == 0).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 2), st.floats(0, 5e9) | st.just(np.nan)),
        max_size=40,
    )
)
def test_shares_of_a_job_never_exceed_it(rows: list[tuple[int, int, float]]) -> None:
    process = np.array([10 * j + p for p, j, _ in rows], dtype=np.int64)
    job = np.array([j for _, j, _ in rows], dtype=np.int64)
    span = np.array([1e9, 2e9, 0.0])
    _, of, share = victims.shares(process, job, np.array([b for *_, b in rows], float), span)
    assert (share >= 0).all()
    assert (np.bincount(of, share, minlength=3) <= 1 + 1e-9).all()


def test_recoverable_leaves_chance_and_common_work_alone() -> None:
    rng = np.random.default_rng(2)
    own = rng.lognormal(0, 0.1, (8, 500)).astype(np.float32)
    own *= rng.uniform(0.5, 2, 500).astype(np.float32)  # another batch size, for all
    assert costs.recoverable(own) < 0.02 * float(own.max(axis=0).mean())
    without = float(own.max(axis=0).mean())
    own[3] *= 2
    expected = float(own.max(axis=0).mean()) - without
    assert costs.recoverable(own) == pytest.approx(expected, rel=0.05)


def test_recoverable_compares_within_roles() -> None:
    own = np.ones((4, 20), np.float32)
    own[2:] = 5  # another pipeline stage, by design
    assert costs.recoverable(own, role=[0, 0, 1, 1]) == 0
    assert costs.recoverable(own) > 0


@pytest.mark.parametrize(
    "own", [np.zeros((0, 0)), np.zeros((1, 5)), np.full((3, 4), np.nan), np.zeros((3, 0))]
)
def test_recoverable_of_nothing(own: F64) -> None:
    assert costs.recoverable(own.astype(np.float32)) == 0
