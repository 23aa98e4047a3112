"""What a series keeps of steps and stages, and how two of them are compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lanterne.collector.compare import Comparison, compare
from lanterne.collector.errors import RecordingError
from lanterne.collector.replay_series import Series
from lanterne.collector.snapshot import StepView
from tests.fixtures.snapshots import communicator, engine, snapshot, stage


def series(
    seed: int,
    *,
    expert: float = 0.003,
    kernel: float = 0.0125,
    ttft: float = 0.2,
    workload: str = "demo",
    seconds: int = 40,
) -> Series:
    """A job of 100 steps a second: each snapshot shows the last 150, so most of them twice."""
    rng = np.random.default_rng(seed)
    gathered = Series()
    n = 100 * (seconds + 1)
    start = np.arange(n) * 0.01
    parts = {
        "start": start,
        "dispatch": 0.002 * rng.lognormal(0, 0.1, n),
        "expert": expert * rng.lognormal(0, 0.1, n),
        "combine": 0.002 * rng.lognormal(0, 0.1, n),
        "idle": np.where(rng.random(n) < 0.5, np.nan, 0.001),
    }
    parts["span"] = parts["dispatch"] + parts["expert"] + parts["combine"]
    for at in range(1, seconds + 1):
        end = 100 * at
        shown = slice(max(0, end - 150), end)
        steps = StepView(
            4, "blocking", {k: v[shown] for k, v in parts.items()}, np.ones(1, bool), {}
        )
        kernels = 200 * at
        found = snapshot(
            communicators=(communicator(workload=workload, serving=steps),),
            stages=(
                stage(
                    workload=workload,
                    count={"expert_gemm": kernels},
                    sum_seconds={"expert_gemm": kernel * kernels * (1 + 0.01 * rng.random())},
                    busy_seconds={"expert_gemm": 0.5 * at},
                    span_seconds=float(at),
                ),
            ),
            engines=(replace(engine(ttft_p95=ttft * rng.lognormal(0, 0.05)), workload=workload),),
        )
        gathered.observe(found, float(at))
    return gathered


def figures(found: Comparison) -> dict[str, tuple[float, float, bool]]:
    return {row.key: (row.change.a, row.change.change, row.real) for row in found.rows}


def test_every_step_counts_once() -> None:
    gathered = series(1)
    total = np.nansum(gathered.steps["demo", "span"].matrix(), axis=1)
    assert total[1] == 4000
    # Unknown parts of a step are left out, not taken as zero.
    idle = np.nansum(gathered.steps["demo", "idle"].matrix(), axis=1)
    assert 1500 < idle[1] < 2500
    assert idle[0] / idle[1] == pytest.approx(0.001)


def test_one_variable_changed_is_one_stage_changed() -> None:
    (found,) = compare(series(1), series(2, expert=0.0036))
    told = figures(found)
    assert told["step_expert_seconds"][2]
    assert told["step_expert_seconds"][1] == pytest.approx(0.2, abs=0.03)
    assert told["step_span_seconds"][2]
    for key in ("step_dispatch_seconds", "step_combine_seconds", "step_idle_seconds",
                "stage_expert_gemm_share", "engine_ttft_p95", "steps_per_second"):  # fmt: skip
        assert not told[key][2], key
    assert told["steps_per_second"][0] == pytest.approx(100, rel=0.02)
    assert told["engine_ttft_p95"][0] == pytest.approx(0.2, rel=0.05)


def test_a_kernel_that_changed_is_seen_on_the_gpu() -> None:
    (found,) = compare(series(1), series(2, kernel=0.010))
    told = figures(found)
    assert told["stage_expert_gemm_kernel_seconds"][0] == pytest.approx(0.0125, rel=0.05)
    assert told["stage_expert_gemm_kernel_seconds"][1] == pytest.approx(-0.2, abs=0.03)
    assert told["stage_expert_gemm_kernel_seconds"][2]
    assert not told["step_expert_seconds"][2]


def test_jobs_are_paired_by_name_or_as_the_only_ones() -> None:
    one, other = series(1, workload="before", seconds=12), series(2, workload="after", seconds=12)
    (found,) = compare(one, other)
    assert (found.workload_a, found.workload_b) == ("before", "after")
    assert "step_span_seconds" in figures(found)
    both = series(3, workload="before", seconds=12)
    both.windows["after"] = other.windows["after"]
    assert [c.workload_a for c in compare(both, one)] == ["before"]
    both.windows["third"] = both.windows.pop("before")
    with pytest.raises(RecordingError, match=r"no job in common: A has 'after', 'third'"):
        compare(both, one)
