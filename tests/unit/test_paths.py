"""Matrices of waits through encoded batches and the engine: who is named, with which class."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.paths import MAX_CELLS, Matrix, Paths, Span, findings
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.analyse.wait_matrix import WaitDiagnosis
from lanterne.collector.clock import ClockObservation
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.collector.handover import Packer, Unpacker
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.snapshot import CLASSES, Snapshot
from lanterne.proto import telemetry_pb2 as pb

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
MS = 10**6
T0 = 10**15
BOOT = "11111111-2222-3333-4444-555555555555"
SMALL = EngineConfig(
    cells=1 << 20, rows=1 << 16, communicators=64, members=4096, processes=1024, own_cells=1 << 20
)
ALL_TO_ALL, DEVICE = 32, 1
RANKS = 6


class Exchanges:
    """All-to-alls of ranks that compute in between; `extra` [receiver, sender] ms a transfer.

    A receive is over when both are there and the transfer has been made; a rank leaves when it has
    everything. `leaves` [sender] ms: what it sends leaves so much later.
    """

    def __init__(
        self,
        extra: F64,
        own: F64 | None = None,
        steps: int = 1600,
        seed: int = 1,
        leaves: F64 | None = None,
    ):
        n = len(extra)
        rng = np.random.default_rng(seed)
        self.arrival, self.end = np.zeros((2, steps, n), np.int64)
        self.receive = np.zeros((steps, n, n), np.int64)
        now = np.full(n, float(T0))
        for k in range(steps):
            work = (6 + rng.normal(0, 0.05, n) + (0 if own is None else own)) * MS
            at = now + work
            transfer = (0.3 + rng.exponential(0.02, (n, n)) + extra) * MS
            left = at if leaves is None else at + leaves * MS
            done = np.maximum(at[:, None], left[None, :]) + transfer
            np.fill_diagonal(done, 0)
            self.arrival[k], self.end[k] = at, done.max(axis=1)
            self.receive[k] = done - at[:, None]
            now = done.max(axis=1)

    def batches(
        self, *, told: bool = True, nodes: int = 1, offset: int = 0, evidence: int = DEVICE
    ) -> list[pb.Batch]:
        found = []
        n = self.arrival.shape[1]
        for w in range(int((self.arrival.max() - T0) // (1000 * MS)) + 1):
            start = T0 + w * 1000 * MS
            for node in range(nodes):
                mine = [r for r in range(n) if r * nodes // n == node]
                found.append(self._batch(w, start, mine, node, told, offset * node, evidence))
        return found

    def _batch(
        self, w: int, start: int, mine: list[int], node: int, told: bool, offset: int, evidence: int
    ) -> pb.Batch:
        n = self.arrival.shape[1]
        at = self.arrival[:, mine]
        k, index = np.nonzero((at >= start) & (at < start + 1000 * MS))
        rank = np.array(mine)[index]
        rows = len(k)
        batch = pb.Batch(
            schema=1,
            node=f"node-{node}",
            epoch=1,
            sequence=w + 1,
            boot_id=BOOT if not node else f"{BOOT}-{node}",
            start_ns=start + offset,
            end_ns=start + offset + 1000 * MS,
            stride=1,
            communicators=[
                pb.Communicator(
                    comm_hash=5,
                    library=1,
                    n_ranks=n,
                    rank=r,
                    pid=100 + r,
                    pid_start_ticks=7,
                    workload="train",
                    gpu_index=r,
                    complete=True,
                )
                for r in mine
            ],
            instances=pb.Instances(
                rows=rows,
                communicator=index.astype("<u4").tobytes(),
                seq=k.astype("<u4").tobytes(),
                lane=bytes([1]) * rows,
                op=bytes([ALL_TO_ALL]) * rows,
                role=bytes(rows),
                evidence=np.full(rows, evidence, "u1").tobytes(),
                flags=np.where(k == 0, 4, 0).astype("u1").tobytes(),
                arrival_ns=(self.arrival[k, rank] + offset).astype("<u8").tobytes(),
                duration_ns=(self.end - self.arrival)[k, rank].astype("<u8").tobytes(),
                payload_bytes=np.full(rows, 4096, "<u8").tobytes(),
                sync_blocked_ns=bytes(8 * rows),
            ),
        )
        if told:
            times = np.array([(rank == r).sum() for r in mine])
            sums = np.array([self.receive[k[rank == r], r].sum(axis=0) for r in mine])
            pairs = [(i, j) for i in range(len(mine)) for j in range(n) if j != mine[i]]
            i, j = np.array(pairs).T
            batch.traffic.rows = len(pairs)
            batch.traffic.communicator = i.astype("<u4").tobytes()
            batch.traffic.peer = j.astype("<u4").tobytes()
            batch.traffic.sent_bytes = bytes(8 * len(pairs))
            batch.traffic.received_bytes = bytes(8 * len(pairs))
            batch.traffic.receives = times[i].astype("<u8").tobytes()
            batch.traffic.wait_ns = sums[i, j].astype("<u8").tobytes()
        return batch


def drive(batches: list[pb.Batch], engine: Engine | None = None, *, offset: int = 0) -> Snapshot:
    engine = engine or Engine(SMALL, boot_id=BOOT)
    snapshot = engine.snapshot(0.0)
    for batch in batches:
        node = int(batch.node[-1])
        now = batch.end_ns - offset * node
        (item,) = Unpacker().unpack(
            Packer().pack([decode(batch.SerializeToString(), received_ns=now)])
        )
        engine.apply(item)
        snapshot = engine.snapshot(0.0)
    return snapshot


def named(snapshot: Snapshot) -> dict[int, str]:
    r = snapshot.ranks
    return {int(r.rank[i]): CLASSES[int(r.klass[i])] for i in np.flatnonzero(r.straggler)}


def column(sender: int, ms: float = 3.0) -> F64:
    extra = np.zeros((RANKS, RANKS))
    extra[:, sender] = ms
    return extra


def cell(receiver: int, sender: int, ms: float = 3.0) -> F64:
    extra = np.zeros((RANKS, RANKS))
    extra[receiver, sender] = ms
    return extra


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (np.zeros((RANKS, RANKS)), {}),
        (column(2), {2: "slow_sender"}),
        (column(4).T, {4: "slow_receiver"}),
        (cell(3, 1), {3: "slow_path"}),
        (column(0) + column(5), {0: "slow_sender", 5: "slow_sender"}),
        (column(1) + column(4).T, {1: "slow_sender", 4: "slow_receiver"}),
    ],
)
def test_classes_from_times_of_receives(extra: F64, expected: dict[int, str]) -> None:
    snapshot = drive(Exchanges(extra).batches())
    assert named(snapshot) == expected
    matrix = snapshot.communicators[0].wait_matrix
    assert matrix is not None
    off = ~np.eye(RANKS, dtype=bool)
    np.testing.assert_allclose(matrix[off], (0.32 + extra[off]) / 1e3, atol=5e-4)
    shown = json.loads(snapshot_json(snapshot))["communicators"][0]
    assert shown["wait_matrix"][0][0] is None
    assert shown["matrix_absent"] == ""


@pytest.mark.parametrize(("sends", "expected"), [(0.5, "slow_path"), (9.0, "slow_sender")])
def test_of_several_findings_of_one_rank_the_costliest_is_told(sends: float, expected: str) -> None:
    """Noise in a window may put a small one beside a large one."""
    matrix = Matrix(RANKS)
    matrix.receives[:] = 100
    span = Span(slot=0, base=10, ranks=RANKS, rows=100, span_ns=1000.0 * MS, timed=True)
    told = WaitDiagnosis((3,), (), ((3, 0),), (sends * MS,), (), (8.0 * MS,))
    found = findings(told, matrix, span, 0.02)
    assert {m: CLASSES[f.klass] for m, f in found.items()} == {13: expected}
    assert found[13].share == pytest.approx(max(sends, 8.0) / 10)


def test_a_late_rank_is_no_slow_sender() -> None:
    """All wait for it, so its column would be high if lateness were not taken off."""
    own = np.zeros(RANKS)
    own[3] = 4
    engine = Engine(SMALL, boot_id=BOOT)
    snapshot = drive(Exchanges(np.zeros((RANKS, RANKS)), own).batches(), engine)
    found = named(snapshot)
    assert set(found) == {3}
    assert found[3] == "unknown"  # host or GPU: no synchronise calls here; not its sending
    assert snapshot.communicators[0].traffic is None  # no bytes are known: none is not zero


def test_what_comes_back_with_a_slow_path_fixed() -> None:
    slow, without = Exchanges(cell(3, 1)), Exchanges(cell(3, 1, 0.0))
    took = [float(x.end[-1].max() - T0) for x in (slow, without)]
    snapshot = drive(slow.batches())
    row = int(np.flatnonzero(snapshot.ranks.straggler)[0])
    assert snapshot.ranks.recoverable_share[row] == pytest.approx(1 - took[1] / took[0], rel=0.1)
    assert "receiving from rank 1" in snapshot.ranks.why[row]


@pytest.mark.parametrize("extra", [column(2), column(4).T, cell(3, 1)])
def test_without_times_of_receives_the_class_is_unknown(extra: F64) -> None:
    snapshot = drive(Exchanges(extra).batches(told=False))
    assert set(named(snapshot).values()) <= {"unknown"}
    comm = snapshot.communicators[0]
    assert comm.wait_matrix is None
    assert "slow senders, receivers and paths are unknown" in comm.matrix_absent
    for row in np.flatnonzero(snapshot.ranks.straggler):
        assert "unknown" in snapshot.ranks.why[row]


def test_lateness_without_own_time_is_named_though_not_why() -> None:
    """Messages that leave late: every other time the others wait for a rank that came first."""
    none, leaves = np.zeros((RANKS, RANKS)), np.zeros(RANKS)
    leaves[2] = 5
    job = Exchanges(none, leaves=leaves)
    assert named(drive(job.batches(told=False))) == {2: "unknown"}
    assert named(drive(job.batches())) == {2: "slow_sender"}


def test_the_verdict_goes_when_the_fault_does() -> None:
    engine = Engine(SMALL, boot_id=BOOT)
    slow = Exchanges(column(2))
    assert named(drive(slow.batches(), engine)) == {2: "slow_sender"}
    healthy = Exchanges(np.zeros((RANKS, RANKS)))
    batches = healthy.batches()
    shift = int(slow.end.max() - T0) + 1000 * MS
    for batch in batches:
        batch.start_ns += shift
        batch.end_ns += shift
        i = batch.instances
        i.seq = (np.frombuffer(i.seq, "<u4") + 1600).astype("<u4").tobytes()
        i.arrival_ns = (np.frombuffer(i.arrival_ns, "<u8") + np.uint64(shift)).tobytes()
        batch.sequence += 1000
    assert named(drive(batches, engine)) == {}


@pytest.mark.parametrize("known", [True, False])
def test_two_nodes_need_their_clocks(known: bool) -> None:
    offset = 77_000 * MS
    engine = Engine(SMALL, boot_id=BOOT)
    if known:
        engine.apply(
            ClockObservation("node-1", T0 + offset, T0 + 10_000, T0 + 10_000, T0 + offset + 20_000)
        )
    batches = Exchanges(column(2)).batches(nodes=2, offset=offset)
    snapshot = drive(batches, engine, offset=offset)
    matrix = snapshot.communicators[0].wait_matrix
    assert matrix is not None
    across = np.arange(RANKS)[:, None] // 3 != np.arange(RANKS) // 3
    assert np.isnan(matrix[across]).all() == (not known)
    assert named(snapshot) == {2: "slow_sender"}  # on its own node it shows in any case


@pytest.mark.parametrize("column_name", ["receives", "wait_ns"])
def test_half_of_the_columns_is_refused(column_name: str) -> None:
    batch = Exchanges(column(2), steps=50).batches()[0]
    setattr(batch.traffic, column_name, b"")
    with pytest.raises(BatchRefused, match=column_name):
        decode(batch.SerializeToString())


def test_memory_of_matrices_is_bounded() -> None:
    paths = Paths(0.02)
    ranks = 64
    most = MAX_CELLS // (ranks * ranks)
    assert all(paths._matrix(slot, ranks) is not None for slot in range(most))
    assert paths._matrix(most, ranks) is None
    assert paths._matrix(most, 65) is None
