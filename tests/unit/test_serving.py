"""Steps of a communicator from batches: through decode, alignment and scoring to the surfaces."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.serving import COMMUNICATORS, ROWS
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.moe_text import sentences
from lanterne.collector.snapshot import StepView
from lanterne.proto import telemetry_pb2 as pb
from tests.fixtures.snapshots import communicator, serving, snapshot

RANKS, LAYERS, STEPS = 4, 3, 40
MS = 10**6
ALL_GATHER, ALL_TO_ALL = 2, 8


def rows(steps: int, *, slow: int = 1) -> list[tuple[int, int, int, int, int, int]]:
    """(rank, seq, op, role, arrival, duration) ns: per layer 1 ms own, dispatch 2 ms, experts 3 ms
    (5 ms on rank `slow`), combine 1 ms; then 1 ms own, a gather of 1 ms, and 4 ms pause."""
    found = []
    at, seq = 10**12, 0

    def all_ranks(op: int, role: int, late: dict[int, int], own: int, transfer: int) -> None:
        nonlocal at, seq
        arrive = [at + own + late.get(rank, 0) for rank in range(RANKS)]
        end = max(arrive) + transfer
        found.extend(
            (rank, seq, op, role, arrive[rank], end - arrive[rank]) for rank in range(RANKS)
        )
        at, seq = end, seq + 1

    for _ in range(steps):
        for layer in range(LAYERS):
            all_ranks(ALL_TO_ALL, 1, {}, 4 * MS if layer == 0 else 1 * MS, 2 * MS)
            all_ranks(ALL_TO_ALL, 2, {slow: 2 * MS}, 3 * MS, 1 * MS)
        all_ranks(ALL_GATHER, 0, {}, 1 * MS, 1 * MS)
    return found


def batch(steps: int = STEPS, *, keep: Any = lambda row: True, roles: bool = True) -> bytes:
    table = np.array([row for row in rows(steps) if keep(row)])
    n = len(table)
    zeros = np.zeros(n)
    small = {name: zeros.astype("u1").tobytes() for name in ("lane", "flags")}
    role = table[:, 3] if roles else zeros
    return pb.Batch(
        schema=1, node="n", epoch=1, sequence=1, boot_id="b", stride=1,
        end_ns=int(table[:, 4].max()),
        communicators=[
            pb.Communicator(comm_hash=7, library=2, n_ranks=RANKS, rank=rank, pid=10 + rank,
                            workload="chat", name="ep", complete=True)
            for rank in range(RANKS)
        ],
        instances=pb.Instances(
            rows=n,
            communicator=table[:, 0].astype("<u4").tobytes(),
            seq=table[:, 1].astype("<u4").tobytes(),
            op=table[:, 2].astype("u1").tobytes(),
            role=role.astype("u1").tobytes(),
            evidence=np.full(n, 2, "u1").tobytes(),
            arrival_ns=table[:, 4].astype("<u8").tobytes(),
            duration_ns=table[:, 5].astype("<u8").tobytes(),
            payload_bytes=np.full(n, 1000, "<u8").tobytes(),
            sync_blocked_ns=zeros.astype("<u8").tobytes(),
            **small,
        ),
    ).SerializeToString()  # fmt: skip


def steps_of(data: bytes) -> StepView | None:
    engine = Engine(
        EngineConfig(cells=1 << 18, rows=1 << 14, communicators=8, members=64, processes=64,
                     nodes=4, own_cells=1 << 14),
        boot_id="b",
    )  # fmt: skip
    engine.apply(decode(data, received_ns=10**9))
    engine.snapshot(1.0, now_ns=10**9)
    (comm,) = engine.snapshot(20.0, now_ns=20 * 10**9).communicators
    return comm.serving


def test_the_steps_of_a_known_program() -> None:
    view = steps_of(batch())
    assert view is not None
    assert (view.period, view.evidence) == (2 * LAYERS + 1, "blocking")
    assert view.usual.all()
    assert len(view.usual) == STEPS - 2
    medians = {name: seconds * 1e3 for name, seconds in view.medians.items()}
    # Three of four ranks wait 2 ms in each combine for the slow one.
    assert medians["wait"] == pytest.approx(LAYERS * 2 * 3 / 4, abs=1e-3)
    assert medians["dispatch"] == pytest.approx(LAYERS * 2, abs=1e-3)
    assert medians["combine"] == pytest.approx(LAYERS * 1, abs=1e-3)
    assert medians["other_transfer"] == pytest.approx(1, abs=1e-3)
    assert medians["expert"] == pytest.approx(LAYERS * (3 + 2 / 4), abs=1e-3)
    assert medians["expert_most"] == pytest.approx(LAYERS * 5, abs=1e-3)
    assert medians["other_compute"] == pytest.approx(4 + (LAYERS - 1) + 1, abs=1e-3)
    assert medians["idle"] == pytest.approx(0, abs=1e-3)
    assert medians["span"] == pytest.approx(4 + 2 + 6 * LAYERS - 1 + LAYERS * 2 + 2, abs=1.1)
    assert set(view.steps["slowest"].tolist()) == {1}


def test_a_lost_operation_costs_its_step_only() -> None:
    view = steps_of(batch(keep=lambda row: not (row[0] == 2 and row[1] == 66)))
    assert view is not None
    assert view.period == 2 * LAYERS + 1
    assert STEPS - 5 <= len(view.usual) < STEPS - 2


def test_sampled_operations_and_those_without_roles_have_no_steps() -> None:
    assert steps_of(batch(keep=lambda row: row[1] % 2 == 0)) is None
    assert steps_of(batch(roles=False)) is None


def test_memory_is_bounded() -> None:
    view = steps_of(batch(ROWS // (2 * LAYERS + 1) * 2))
    assert view is not None
    assert len(view.usual) == 64
    assert COMMUNICATORS * ROWS * 10 * 8 < 32 << 20


def test_surfaces() -> None:
    comm = communicator("ep-8", workload="chat", serving=serving(idle=0.002))
    told = json.loads(snapshot_json(snapshot(communicators=(comm,))))
    shown = told["communicators"][0]["serving"]
    assert (shown["period"], shown["evidence"], shown["usual"]) == (4, "blocking", [False, True])
    assert shown["medians"]["dispatch"] == 0.002
    (line,) = sentences(snapshot(communicators=(comm,)))
    assert line == (
        "step of ep-8 of chat: 10 ms (dispatch 20%, expert 30%, combine 20%, wait 10%, idle 20%)"
    )
