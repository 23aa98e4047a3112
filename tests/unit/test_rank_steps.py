"""Steps of single ranks over several communicators, from batches to the JSON view."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from lanterne.collector.analyse import ops, rank_steps, serving, steps
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.analyse.steps import PARTS, Operations
from lanterne.collector.decode import decode
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.snapshot import Snapshot
from lanterne.proto import telemetry_pb2 as pb

RANKS, LAYERS, STEPS = 4, 3, 40
MS = 10**6
ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, P2P_GROUP = 2, 4, 8, 34
EP, TP, PP = range(3)  # EP: all four; TP: (0, 1) and (2, 3); PP: (0, 2) and (1, 3)


@dataclass
class Program:
    """What ranks do, as rows (rank, communicator, seq, lane, op, role, arrival, duration)."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    at: int = 10**12
    seq: dict[tuple[int, int], int] = field(default_factory=dict)

    def do(
        self, kind: int, op: int, role: int, own: int, transfer: int, late: int = 0, slow: int = 1
    ) -> None:
        """All ranks, in their communicators of a kind, after `own` (and `late` on rank `slow`)."""
        lane = int(op == P2P_GROUP)
        number = self.seq.get((kind, lane), 0)
        self.seq[kind, lane] = number + 1
        arrive = [self.at + own + (late if rank == slow else 0) for rank in range(RANKS)]
        end = max(arrive) + transfer
        for rank in range(RANKS):
            duration = end - arrive[rank]
            self.rows.append((rank, kind, number, lane, op, role, arrive[rank], duration))
        self.at = end

    def step(self, layers: int = LAYERS, pause: int = 4 * MS) -> None:
        """A layer: 1 ms own, all-reduce 1 ms, 1 ms own, dispatch 2 ms, experts 3 ms (5 ms on rank
        1), combine 1 ms; at the end 1 ms own, and 2 ms to the next stage."""
        for layer in range(layers):
            self.do(TP, ALL_REDUCE, 0, pause if layer == 0 else MS, MS)
            self.do(EP, ALL_TO_ALL, 1, MS, 2 * MS)
            self.do(EP, ALL_TO_ALL, 2, 3 * MS, MS, late=2 * MS)
        self.do(PP, P2P_GROUP, 0, MS, 2 * MS)


def batch(program: Program, *, timed: Callable[[int], bool] = lambda kind: True) -> bytes:
    table = np.array(program.rows)
    communicators, index = [], {}
    for rank in range(RANKS):
        for kind, (hash_, ranks, mine) in enumerate(
            ((7, RANKS, rank), (20 + rank // 2, 2, rank % 2), (30 + rank % 2, 2, rank // 2))
        ):
            index[rank, kind] = len(communicators)
            communicators.append(
                pb.Communicator(comm_hash=hash_, library=2, n_ranks=ranks, rank=mine, pid=10 + rank,
                                workload="chat", name=("ep", "tp", "pp")[kind], complete=True)
            )  # fmt: skip
    n = len(table)
    known = np.array([timed(kind) for kind in table[:, 1].tolist()])
    zeros = np.zeros(n, "<u8").tobytes()
    where = np.array([index[int(r), int(k)] for r, k in table[:, :2]])
    return pb.Batch(
        schema=1, node="n", epoch=1, sequence=1, boot_id="b", stride=1,
        end_ns=int(table[:, 6].max()),
        communicators=communicators,
        instances=pb.Instances(
            rows=n,
            communicator=where.astype("<u4").tobytes(),
            seq=table[:, 2].astype("<u4").tobytes(),
            lane=table[:, 3].astype("u1").tobytes(),
            op=table[:, 4].astype("u1").tobytes(),
            role=table[:, 5].astype("u1").tobytes(),
            evidence=np.where(known, 2, 0).astype("u1").tobytes(),
            flags=bytes(n),
            arrival_ns=table[:, 6].astype("<u8").tobytes(),
            duration_ns=np.where(known, table[:, 7], 0).astype("<u8").tobytes(),
            payload_bytes=np.full(n, 1000, "<u8").tobytes(),
            sync_blocked_ns=zeros,
        ),
    ).SerializeToString()  # fmt: skip


def followed(*batches: bytes) -> Snapshot:
    """Windows of what the batches hold: in the first it is found whom to follow."""
    engine = Engine(
        EngineConfig(cells=1 << 18, rows=1 << 14, communicators=8, members=64, processes=64,
                     nodes=4, own_cells=1 << 14, window_seconds=5.0),
        boot_id="b",
    )  # fmt: skip
    now = 10**9
    for number, data in enumerate(batches):
        one = pb.Batch.FromString(data)
        one.sequence = number + 1
        engine.apply(decode(one.SerializeToString(), received_ns=now))
        engine.snapshot(1.0, now_ns=now)
        now += 10 * 10**9
        engine.snapshot(1.0, now_ns=now)
    return engine.snapshot(1.0, now_ns=now + 10 * 10**9)


def two(first: Program, fill: Callable[[Program], None], **options: object) -> Snapshot:
    """The same program goes on: a batch of it for each of two windows."""
    fill(first)
    one = batch(first, **options)  # type: ignore[arg-type]
    second = Program(at=first.at, seq=first.seq)
    fill(second)
    return followed(one, batch(second, **options))  # type: ignore[arg-type]


def many(program: Program) -> None:
    for _ in range(STEPS):
        program.step()


def test_a_step_spans_the_communicators_of_its_rank() -> None:
    snapshot = two(Program(), many)
    assert sorted(s.rank for s in snapshot.rank_steps) == [0, 1, 2, 3]
    for found in snapshot.rank_steps:
        names = {snapshot.communicators[i].name for i in found.communicators}
        assert {name.split("-")[0] for name in names} >= {"ep"}
        assert len(names) == 3
        assert snapshot.communicators[found.comm].name == "ep"
        assert found.pid == 10 + found.rank
        view = found.steps
        assert (view.period, view.evidence) == (3 * LAYERS + 1, "blocking")
        assert view.usual.sum() >= STEPS - 3
        medians = {name: seconds * 1e3 for name, seconds in view.medians.items()}
        late = 2 if found.rank == 1 else 0
        expected = {
            "dispatch": 2 * LAYERS, "combine": LAYERS, "expert": (3 + late) * LAYERS,
            "wait": (2 - late) * LAYERS, "other_transfer": LAYERS + 2,
            "other_compute": 4 + (LAYERS - 1) + LAYERS + 1, "elsewhere": 0, "idle": 0,
        }  # fmt: skip
        for name, value in expected.items():
            assert medians[name] == pytest.approx(value, abs=1e-3), name
        assert sum(medians[p] for p in PARTS) == pytest.approx(medians["span"], abs=1e-3)


def test_steps_of_different_numbers_of_operations() -> None:
    """A chunk of a prefill has more layers' worth of them now and then."""
    rng = np.random.default_rng(7)

    def fill(program: Program) -> None:
        for _ in range(STEPS):
            program.step(layers=LAYERS + 2 * int(rng.random() < 0.15))

    snapshot = two(Program(), fill)
    for found in snapshot.rank_steps:
        assert found.steps.period == 3 * LAYERS + 1
        operations = np.asarray(found.steps.steps["operations"])
        assert set(operations.tolist()) == {3 * LAYERS + 1, 3 * (LAYERS + 2) + 1}
        assert set(operations[found.steps.usual].tolist()) == {3 * LAYERS + 1}


def test_what_has_no_rule_has_no_steps() -> None:
    rng = np.random.default_rng(8)

    def fill(program: Program) -> None:
        for _ in range(10 * STEPS):
            kind, op, role = ((TP, ALL_REDUCE, 0), (EP, ALL_TO_ALL, 1), (EP, ALL_TO_ALL, 2),
                              (EP, ALL_GATHER, 0), (PP, P2P_GROUP, 0))[rng.integers(5)]  # fmt: skip
            program.do(kind, op, role, MS, MS)

    assert two(Program(), fill).rank_steps == ()


def test_where_one_communicator_has_no_times_no_step_is_guessed() -> None:
    snapshot = two(Program(), many, timed=lambda kind: kind != TP)
    assert snapshot.rank_steps == ()
    (ep,) = [c for c in snapshot.communicators if c.name == "ep"]
    assert ep.serving is not None  # its own steps are known as ever


def test_a_rank_of_a_single_communicator_has_what_it_had() -> None:
    def fill(program: Program) -> None:
        for _ in range(STEPS):
            for _ in range(LAYERS):
                program.do(EP, ALL_TO_ALL, 1, MS, 2 * MS)
                program.do(EP, ALL_TO_ALL, 2, 3 * MS, MS)
            program.do(EP, ALL_GATHER, 0, MS, MS)

    program = Program()
    fill(program)
    data = pb.Batch.FromString(batch(program))
    keep = [i for i, c in enumerate(data.communicators) if c.name == "ep"]
    new = {old: at for at, old in enumerate(keep)}
    column = np.frombuffer(data.instances.communicator, "<u4")
    data.instances.communicator = np.array([new[int(i)] for i in column], "<u4").tobytes()
    kept = [data.communicators[i] for i in keep]
    del data.communicators[:]
    data.communicators.extend(kept)
    snapshot = followed(data.SerializeToString())
    assert snapshot.rank_steps == ()
    assert snapshot.communicators[0].serving is not None
    assert snapshot.communicators[0].serving.period == 2 * LAYERS + 1


def test_experts_whose_layer_has_operations_of_its_own() -> None:
    """Tensor parallel experts: an all-reduce between dispatch and combine."""
    rows = []
    at = 0.0
    for _ in range(12):
        for symbol, role, group, own in ((1, 1, 0, 0.004), (5, 0, 1, 0.003), (2, 2, 0, 0.002)):
            at += own
            rows.append((symbol, role, group, at, 0.001, own))
            at += 0.001
    table = np.array(rows)
    whole = table[:, :3].astype(np.int64)
    _, found = steps.split(
        Operations(
            symbol=whole[:, 0], role=whole[:, 1], arrival=table[:, 3], duration=table[:, 4],
            wait=np.zeros(len(table)), own=table[:, 5], own_most=table[:, 5],
            slowest=np.full(len(table), -1), size=np.ones(len(table)),
            broken=np.zeros(len(table), bool), group=whole[:, 2],
        )
    )  # fmt: skip
    np.testing.assert_allclose(found.expert, 0.005)
    np.testing.assert_allclose(found.other_compute + found.idle, 0.004)
    np.testing.assert_allclose(found.other_transfer, 0.001)


def test_a_step_that_is_not_wholly_told_yet_is_left_out() -> None:
    assert ops.DISPATCH == 1
    first = Program()
    many(first)
    second = Program(at=first.at, seq=first.seq)
    many(second)
    rows = second.rows
    second.rows = [row for row in rows if row[1] != TP or row[6] < rows[len(rows) // 2][6]]
    snapshot = followed(batch(first), batch(second))
    assert len(snapshot.rank_steps) == RANKS
    for found in snapshot.rank_steps:
        assert set(np.asarray(found.steps.steps["operations"]).tolist()) == {3 * LAYERS + 1}
        ended = np.asarray(found.steps.steps["start"])[-1]
        assert ended * 1e9 < rows[len(rows) // 2][6]


def test_surfaces_and_bounds() -> None:
    snapshot = two(Program(), many)
    shown = json.loads(snapshot_json(snapshot))
    (first, *_) = shown["rank_steps"]
    assert first["steps"]["medians"]["span"] > 0
    assert snapshot.ingest["rank_steps_left_out"] == 0
    assert rank_steps.RANKS * serving.ROWS * len(rank_steps.NAMES) * 8 < 8 << 20
