"""GPU time by stage: totals per rank, bubble and comm/comp, and when they cannot be known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lanterne.collector.analyse import stages
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.analyse.stages import measures
from lanterne.collector.decode import decode
from lanterne.collector.json_view import snapshot_json
from lanterne.collector.series_stages import families
from lanterne.collector.snapshot import Snapshot, StageView
from lanterne.proto import telemetry_pb2 as pb

MS = 10**6
STEP, WORK, TRANSFER = 100 * MS, 40 * MS, 10 * MS
SLOW_WORK = 60 * MS
RANKS = 4
SMALL = EngineConfig(
    cells=1 << 16, rows=1 << 12, communicators=16, members=1 << 10, processes=64,
    own_cells=1 << 16, window_seconds=1.0, deadline_seconds=1.0,
)  # fmt: skip
DEVICE, ALL_TO_ALL = 1, 8


def columns(into: object, **values: tuple[str, list[int]]) -> None:
    into.rows = len(next(iter(values.values()))[1])  # type: ignore[attr-defined]
    for name, (dtype, column) in values.items():
        setattr(into, name, np.array(column, dtype).tobytes())


def window(number: int, *, whole: bool = True, devices: int = 1, told: bool = True) -> pb.Batch:
    """A second of ten steps: own work (rank 3 has more), then an exchange that ends together."""
    start = number * 1000 * MS
    batch = pb.Batch(
        schema=1, node="n", epoch=1, sequence=number, stride=1, start_ns=start,
        end_ns=start + 1000 * MS,
    )  # fmt: skip
    instances: list[tuple[int, ...]] = []
    table: list[tuple[int, ...]] = []
    for rank in range(RANKS):
        batch.communicators.add(
            comm_hash=5, library=1, n_ranks=RANKS, rank=rank, pid=50 + rank, pid_start_ticks=9,
            workload="job", name="ep", complete=True, gpu_index=rank,
        )  # fmt: skip
        work = SLOW_WORK if rank == 3 else WORK
        wait = SLOW_WORK - work
        for step in range(10):
            at = start + step * STEP + work
            instances.append((rank, number * 10 + step, at, wait + TRANSFER))
        for device in range(devices):
            rows = ((4, 10, 10 * work), (6, 10, 10 * (wait + TRANSFER)), (8, 10, 10 * work))
            for stage, count, length in rows:
                table.append((50 + rank, device, stage, whole, count, length, length, 0))
            busy = 10 * (work + wait + TRANSFER)
            table.append((50 + rank, device, 9, whole, 20, busy, busy, 1000 * MS))
    comm, seq, arrival, duration = (list(c) for c in zip(*instances, strict=True))
    n = len(comm)
    columns(
        batch.instances, communicator=("<u4", comm), seq=("<u4", seq), lane=("u1", [0] * n),
        op=("u1", [ALL_TO_ALL] * n), role=("u1", [2] * n), evidence=("u1", [DEVICE] * n),
        flags=("u1", [0] * n), arrival_ns=("<u8", arrival), duration_ns=("<u8", duration),
        payload_bytes=("<u8", [1] * n), sync_blocked_ns=("<u8", [0] * n),
    )  # fmt: skip
    if told:
        pid, device, stage, flags, count, total, union, span = (
            list(c) for c in zip(*table, strict=True)
        )
        columns(
            batch.stages, pid=("<u4", pid), start_ticks=("<u8", [9] * len(pid)),
            device=("<u4", device), stage=("u1", stage), whole=("u1", flags), count=("<u8", count),
            sum_ns=("<u8", total), union_ns=("<u8", union), span_ns=("<u8", span),
        )  # fmt: skip
    return batch


def drive(windows: int = 6, **options: bool | int) -> Snapshot:
    engine = Engine(SMALL)
    for number in range(1, windows + 1):
        now = (number + 1) * 1000 * MS
        batch = window(number, **options)  # type: ignore[arg-type]
        engine.apply(decode(batch.SerializeToString(), received_ns=now))
        found = engine.snapshot(0.0, now_ns=now)
    return found


def by_rank(snapshot: Snapshot) -> dict[int, StageView]:
    return {view.rank: view for view in snapshot.stages}


def test_totals_of_each_rank() -> None:
    views = by_rank(drive())
    assert set(views) == set(range(RANKS))
    for rank, view in views.items():
        work = SLOW_WORK if rank == 3 else WORK
        assert view.count == {"expert_gemm": 60, "combine": 60}
        assert view.busy_seconds["expert_gemm"] == pytest.approx(60 * work / 1e9)
        assert (view.workload, view.node, view.pid, view.gpu) == ("job", 0, 50 + rank, str(rank))
        assert view.span_seconds == pytest.approx(6.0)
        assert view.whole


def test_bubble_and_comm_over_compute_leave_waits_out() -> None:
    """Per step of 100 ms: rank 0 computes 40, transfers 10, waits 20; rank 3 computes 60."""
    views = by_rank(drive())
    assert views[0].bubble == pytest.approx(0.5, abs=0.01)
    assert views[3].bubble == pytest.approx(0.3, abs=0.01)
    assert views[0].comm_compute == pytest.approx(10 / 40, rel=0.02)
    assert views[3].comm_compute == pytest.approx(10 / 60, rel=0.02)


def test_a_sample_has_no_bubble() -> None:
    view = by_rank(drive(whole=False))[0]
    assert not view.whole
    assert math.isnan(view.bubble)
    assert math.isnan(view.comm_compute)
    assert view.count["expert_gemm"] == 60


def test_which_of_two_gpus_is_not_known() -> None:
    views = [view for view in drive(devices=2).stages if view.rank == 1]
    assert [(view.device, view.gpu) for view in views] == [(0, ""), (1, "")]


def test_processes_that_hold_no_communicator_are_counted() -> None:
    engine = Engine(SMALL)
    batch = window(1)
    batch.stages.pid = np.full(batch.stages.rows, 999, "<u4").tobytes()
    engine.apply(decode(batch.SerializeToString(), received_ns=10**9))
    snapshot = engine.snapshot(0.0, now_ns=10**9)
    assert snapshot.stages == ()
    assert snapshot.ingest["dropped_stages"] == 16


def test_more_devices_than_a_process_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MAX_DEVICES", 1)
    engine = Engine(SMALL)
    engine.apply(decode(window(1, devices=2).SerializeToString(), received_ns=10**9))
    snapshot = engine.snapshot(0.0, now_ns=10**9)
    assert len(snapshot.stages) == RANKS
    assert snapshot.ingest["dropped_stages"] == 16


def test_a_process_number_that_is_used_again_starts_at_zero() -> None:
    engine = Engine(SMALL)
    engine.apply(decode(window(1).SerializeToString(), received_ns=10**9))
    engine.snapshot(0.0, now_ns=10**9)
    batch = window(2, told=False)
    batch.epoch = 2
    for comm in batch.communicators:
        comm.pid_start_ticks = 10
    for at in (40 * 10**9, 400 * 10**9, 800 * 10**9):
        batch.sequence += 1
        engine.apply(decode(batch.SerializeToString(), received_ns=at))
        snapshot = engine.snapshot(0.0, now_ns=at)
    assert snapshot.stages == ()


def test_metrics_and_json() -> None:
    snapshot = drive()
    found = {f.metric.name: f.points for f in families(snapshot)}
    seconds = found["lanterne_rank_stage_seconds_total"]
    assert {(p.labels["rank"], p.labels["kernel_stage"]) for p in seconds} == {
        (str(r), s) for r in range(RANKS) for s in ("expert_gemm", "combine")
    }
    (bubble,) = [p.value for p in found["lanterne_bubble_ratio"] if p.labels["rank"] == "3"]
    assert bubble == pytest.approx(0.3, abs=0.01)
    ratios = found["lanterne_moe_comm_compute_ratio"]
    assert len(ratios) == RANKS
    rows = json.loads(snapshot_json(snapshot))["stages"]
    assert rows[0]["busy_seconds"]["expert_gemm"] == pytest.approx(2.4)
    rows = json.loads(snapshot_json(drive(whole=False)))["stages"]
    assert rows[0]["bubble"] is None


def sums(**rows: tuple[int, int, int]) -> np.ndarray:
    """stage=(sum, union, span)."""
    found = np.zeros((stages.CODES, 4), np.int64)
    for name, values in rows.items():
        found[getattr(stages, name)] = (1, *values)
    return found


def test_measures_that_cannot_be_known() -> None:
    compute = {"COMPUTE": (40, 40, 0), "EXPERT_GEMM": (40, 40, 0)}
    # Nothing but compute: no waits to be taken off.
    assert measures(sums(**compute, ALL=(40, 40, 100)), 0, 0)[0] == pytest.approx(0.6)
    exchange = {"DISPATCH": (30, 30, 0), "ALL": (70, 70, 100)}
    bubble, ratio = measures(sums(**compute, **exchange), 20, 10)
    assert (bubble, ratio) == (pytest.approx(0.5), pytest.approx(0.25))
    # Collectives that were not aligned, or others than these kernels.
    for wait, transfer in ((0, 0), (2, 1), (200, 100)):
        assert all(map(math.isnan, measures(sums(**compute, **exchange), wait, transfer)))
    # Beside compute: which part of the wait was hidden is not known.
    beside = sums(**compute, DISPATCH=(30, 30, 0), ALL=(70, 55, 100))
    bubble, ratio = measures(beside, 20, 10)
    assert math.isnan(bubble)
    assert ratio == pytest.approx(0.25)
    assert all(map(math.isnan, measures(sums(), 0, 0)))
