"""What-if replay of training steps: made-up pipelines, and published traces with their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector import straggler_trace
from lanterne.collector.analyse import culprit, schedule, whatif
from lanterne.collector.analyse.schedule import Operation
from lanterne.collector.errors import RecordingError

F64 = npt.NDArray[np.float64]
DATA = Path(os.environ.get("LANTERNE_DATA", Path(__file__).parents[3] / "shared" / "data"))
TRACES = DATA / "stragglers"


def pipeline(
    stages: int, microbatches: int, work: F64, transfer: float = 0.001
) -> tuple[list[Operation], F64, F64]:
    """1F1B of `work` [kind, stage, microbatch, step, replica]: operations, starts, durations.

    Starts are those of the schedule's own replay, so that the trace is one that could have been.
    """
    ops, times, order = [], [], []

    def add(kind: str, stage: int, number: int, own: F64, at: float) -> None:
        ops.append(Operation(kind, stage, number))
        times.append(own)
        order.append(at)

    shape = work.shape[3:]
    for stage in range(stages):
        add(schedule.GATHER, stage, 0, np.full(shape, transfer), -1)
        ahead = min(stages - 1 - stage, microbatches)
        turn = ["F"] * ahead
        turn += ["F", "B"] * (microbatches - ahead) + ["B"] * ahead
        done = {"F": 0, "B": 0}
        for at, which in enumerate(turn):
            number = done[which]
            done[which] += 1
            name, kind = ("forward", 0) if which == "F" else ("backward", 1)
            add(f"{name}-compute", stage, number, work[kind, stage, number], at)
            to = stage + 1 if which == "F" else stage - 1
            if 0 <= to < stages:
                add(f"{name}-send", stage, number, np.full(shape, transfer), at + 0.5)
            source = stage - 1 if which == "F" else stage + 1
            if 0 <= source < stages:
                add(f"{name}-recv", stage, number, np.full(shape, transfer), at - 0.5)
        for tail in ("grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"):
            add(tail, stage, 0, np.full(shape, transfer), 1e6)
    own = np.array(times)
    graph = schedule.build(ops, np.array(order))
    start, end = np.zeros_like(own), np.zeros_like(own)
    for members, across in zip(graph.groups, graph.across, strict=True):
        ready = np.zeros(shape)
        for i in members:
            start[i] = max([end[a] for a in graph.after[i]], key=np.sum, default=np.zeros(shape))
            for a in graph.after[i]:
                start[i] = np.maximum(start[i], end[a])
            ready = np.maximum(ready, start[i])
        if across:
            ready = np.broadcast_to(ready.max(axis=-1, keepdims=True), shape)
        for i in members:
            end[i] = ready + own[i]
    return ops, start, end - start


def found(ops: list[Operation], start: F64, duration: F64) -> tuple[whatif.WhatIf, culprit.Finding]:
    w = whatif.analyse(schedule.build(ops, np.median(start, axis=(1, 2))), start, duration)
    return w, culprit.find(w)


def even(
    stages: int = 4, microbatches: int = 8, steps: int = 6, replicas: int = 4, seed: int = 1
) -> F64:
    noise = np.random.default_rng(seed).lognormal(
        0, 0.005, (2, stages, microbatches, steps, replicas)
    )
    work: F64 = noise * np.array([1.0, 2.0])[:, None, None, None, None]
    return work


def test_the_time_of_a_small_pipeline_by_hand() -> None:
    """Two stages, two microbatches, no transfer time: F F B B against F B F B."""
    work = np.ones((2, 2, 2, 1, 1))
    work[1] = 2.0
    ops, start, duration = pipeline(2, 2, work, transfer=0.0)
    w, _ = found(ops, start, duration)
    # Stage 1 starts after the first forward: 1 + (1 + 2 + 1 + 2), then stage 0's last backward: 2.
    assert w.now == pytest.approx(9.0)
    assert w.ideal == pytest.approx(9.0)
    assert w.slowdown == pytest.approx(1.0)


def test_waiting_is_taken_off_transfers() -> None:
    ops, start, duration = pipeline(2, 4, even(2, 4, 2, 2), transfer=0.25)
    graph = schedule.build(ops, np.median(start, axis=(1, 2)))
    own = whatif.own_times(graph, start, duration)
    transfers = [i for i, op in enumerate(ops) if op.kind in schedule.PIPELINE]
    assert duration[transfers].max() > 1.0  # receives are posted long before the send
    np.testing.assert_allclose(own[transfers], 0.25, atol=1e-9)


@pytest.mark.parametrize(("stage", "replica"), [(0, 0), (2, 3), (3, 1)])
def test_a_slow_worker_is_named_alone(stage: int, replica: int) -> None:
    work = even()
    work[:, stage, :, :, replica] *= 1.6
    w, f = found(*pipeline(4, 8, work))
    assert f.cause == "slow_worker"
    assert [(x.stage, x.replica) for x in f.workers] == [(stage, replica)]
    assert f.workers[0].ratio == pytest.approx(1.6, rel=0.02)
    assert f.workers[0].blame_share == pytest.approx(f.recoverable_share, rel=0.1)
    assert f.variance["worker"] > 0.9
    assert w.slowdown > 1.2


def test_two_slow_workers_share_the_blame() -> None:
    work = even()
    work[:, 1, :, :, 0] *= 1.5
    work[:, 2, :, :, 3] *= 1.5
    _, f = found(*pipeline(4, 8, work))
    assert {(x.stage, x.replica) for x in f.workers} == {(1, 0), (2, 3)}
    shares = [x.blame_share for x in f.workers]
    assert sum(shares) == pytest.approx(f.gains["slow_worker"])
    assert sum(shares) < 1
    assert shares[0] == pytest.approx(shares[1], rel=0.3)


def test_unequal_microbatches_are_work_and_no_workers() -> None:
    rng = np.random.default_rng(5)
    work = even() * rng.lognormal(0, 0.4, (1, 1, 8, 6, 4))
    _, f = found(*pipeline(4, 8, work))
    assert f.cause == "microbatch_imbalance"
    assert f.workers == ()
    assert f.variance["microbatch"] > 0.9
    assert f.variance["worker"] < 0.1


def test_unequal_microbatches_do_not_hide_a_slow_worker() -> None:
    rng = np.random.default_rng(6)
    work = even(steps=20) * rng.lognormal(0, 0.15, (1, 1, 8, 20, 4))
    work[:, 1, :, :, 2] *= 2.0
    _, f = found(*pipeline(4, 8, work))
    assert [(x.stage, x.replica) for x in f.workers] == [(1, 2)]
    assert f.cause == "slow_worker"


def test_a_long_last_stage_is_the_stage_and_no_worker() -> None:
    work = even()
    work[:, 3] *= 1.5
    _, f = found(*pipeline(4, 8, work))
    assert f.cause == "stage_imbalance"
    assert f.workers == ()


def test_an_even_job_has_no_cause() -> None:
    w, f = found(*pipeline(4, 8, even()))
    assert f.cause == "none"
    assert f.workers == ()
    assert w.slowdown < 1.02


def test_one_replica_names_nobody() -> None:
    """Stages differ by design: without a replica there is nobody to compare with."""
    work = even(replicas=1)
    work[:, 1] *= 1.5
    _, f = found(*pipeline(4, 8, work))
    assert f.workers == ()


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(4)), st.floats(1e-3, 1e3))
def test_order_of_replicas_and_unit_of_time_do_not_matter(order: list[int], scale: float) -> None:
    work = even(2, 3, 4, 4)
    work[:, 1, :, :, 0] *= 1.4
    ops, start, duration = pipeline(2, 3, work)
    _, plain = found(ops, start, duration)
    _, other = found(ops, start[:, :, order] * scale, duration[:, :, order] * scale)
    assert other.cause == plain.cause == "slow_worker"
    assert [order[x.replica] for x in other.workers] == [x.replica for x in plain.workers]
    assert other.recoverable_share == pytest.approx(plain.recoverable_share)
    assert other.workers[0].blame_share == pytest.approx(plain.workers[0].blame_share)


def test_what_does_not_fit_is_named() -> None:
    compute = [Operation("forward-compute", 0, 0), Operation("backward-compute", 0, 0)]
    with pytest.raises(ValueError, match="forward-send 0 of stage 0 has no receive"):
        schedule.build([*compute, Operation("forward-send", 0, 0)], np.arange(3.0))
    with pytest.raises(ValueError, match="stage 1 has no forward-compute"):
        schedule.build([*compute, Operation("optimizer", 1, 0)], np.arange(3.0))
    twice = [Operation("forward-send", 0, 0), Operation("forward-send", 0, 1)]
    with pytest.raises(ValueError, match="2 forward-send for 1 forward-compute"):
        schedule.build([*compute, *twice], np.arange(4.0))


# ---- the published traces


def published(name: str) -> tuple[straggler_trace.Analysis, dict[str, object]]:
    path = TRACES / f"trace-{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent: set LANTERNE_DATA to the folder of the published data")
    pytest.importorskip("pyarrow", reason="the extra `replay` is not installed")
    analysis = straggler_trace.analyse(path)
    return analysis, straggler_trace.as_json(analysis, path)


def beside(name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((TRACES / name).read_text())
    return found


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_the_slowdown_is_the_published_one(name: str) -> None:
    analysis, _ = published(name)
    result = beside(f"result-{name}.json")
    assert analysis.whatif.slowdown == pytest.approx(result["blocking_slowdown"], rel=1e-4)
    worker = beside(f"mw-{name}.json")
    assert analysis.whatif.now == pytest.approx(worker["tori"], rel=1e-4)
    assert analysis.whatif.ideal == pytest.approx(worker["tideal"], rel=1e-4)


def test_the_stages_cost_what_was_published() -> None:
    analysis, _ = published("SE")
    w, last = analysis.whatif, beside("ms-SE.json")
    stage = np.array([op.stage for op in w.graph.operations])
    mask = np.broadcast_to((stage == stage.max())[:, None, None], w.times.shape)
    assert w.without(mask) == pytest.approx(last["trem"], rel=1e-4)
    assert w.only(mask) == pytest.approx(last["tadd"], rel=1e-4)


def test_ar_names_rank_0_alone_with_the_published_share() -> None:
    _, out = published("AR")
    worker = beside("mw-AR.json")
    share = (worker["tori"] - worker["trem"]) / worker["tori"]
    assert out["cause"] == "slow_worker"
    verdicts = out["verdicts"]
    assert isinstance(verdicts, list)
    assert [(v["rank"], v["class"]) for v in verdicts] == [(0, "slow_compute")]
    assert verdicts[0]["blame_share"] == pytest.approx(share, rel=0.05)
    slowdown = beside("result-AR.json")["blocking_slowdown"]
    assert out["recoverable_share"] == pytest.approx(1 - 1 / slowdown, rel=0.05)


def test_se_names_nobody_and_says_microbatches() -> None:
    _, out = published("SE")
    assert out["verdicts"] == []
    assert out["cause"] == "microbatch_imbalance"
    assert "work, not worker" in str(out["cause_text"])
    slowdown = beside("result-SE.json")["blocking_slowdown"]
    assert out["recoverable_share"] == pytest.approx(1 - 1 / slowdown, rel=0.05)


# ---- the reader


def parquet(path: Path, **changes: object) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="the extra `replay` is not installed")
    import pyarrow.parquet as pq

    ops, start, duration = pipeline(2, 3, even(2, 3, 3, 2))
    rows: dict[str, list[object]] = {name: [] for name in straggler_trace.COLUMNS}
    for (i, step, replica), at in np.ndenumerate(start):
        op = ops[i]
        compute = op.kind in schedule.COMPUTE
        values = (replica, op.stage, 2 * op.stage + replica, 10 + step, op.number,
                  0 if compute else -1, op.kind, at, duration[i, step, replica])  # fmt: skip
        for name, value in zip(rows, values, strict=True):
            rows[name].append(value.item() if isinstance(value, np.generic) else value)
    for name, change in changes.items():
        if change is None:
            del rows[name]
        else:
            row, value = change  # type: ignore[misc]
            rows[name][row] = value
    pq.write_table(arrow.table(rows), path)
    return path


def test_a_trace_is_read_and_incomplete_steps_are_left_out(tmp_path: Path) -> None:
    trace = straggler_trace.read(parquet(tmp_path / "t.parquet"))
    assert trace.steps.tolist() == [10, 11, 12]
    assert trace.rank.tolist() == [[0, 1], [2, 3]]
    # One operation's step is another's twice: both steps lack or double one.
    torn = straggler_trace.read(parquet(tmp_path / "u.parquet", step=(0, 12)))
    assert torn.steps.tolist() == [11]
    assert torn.steps_left_out == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mc": None}, "has no column mc"),
        ({"optype": (0, "coffee-break")}, "unknown optype coffee-break; known are forward-compute"),
        ({"duration": (0, -1.0)}, "no duration negative"),
        ({"start_ts": (0, float("nan"))}, "must be finite"),
        ({"mc": (0, 1)}, "several model chunks"),
    ],
)
def test_a_trace_that_cannot_be_used_says_why(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = parquet(tmp_path / "t.parquet", **changes)
    with pytest.raises(RecordingError, match=message) as caught:
        straggler_trace.analyse(path)
    assert str(path) in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `replay` is not installed")
    path = tmp_path / "x"
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(RecordingError, match="cannot be read as a Parquet file"):
        straggler_trace.analyse(path)
    with pytest.raises(RecordingError, match="cannot be read as a Parquet file"):
        straggler_trace.analyse(tmp_path / "absent")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('none here')\n")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lanterne-collector"), "replay", "--format",
         "straggler-analysis", "x.parquet"],
        env=dict(os.environ) | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'lanterne[replay]'" in done.stderr
    assert "Traceback" not in done.stderr
