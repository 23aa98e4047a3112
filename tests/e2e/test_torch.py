"""Real PyTorch processes on Gloo: the slow rank is named, and the waits are what the ranks saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.stack import Stack, wait_for
from tests.torch_job import PYTHON, TorchJob

pytestmark = [pytest.mark.torch, pytest.mark.kernel, pytest.mark.timeout(300)]

LIBRARY = "*/libtorch_cpu.so"
RANKS = 4


@pytest.fixture
def stack(tmp_path: Path):  # type: ignore[no-untyped-def]
    if not PYTHON.exists():
        pytest.fail(f"no PyTorch at {PYTHON}: run make setup-torch")
    # A span longer than the run: the snapshot at its end has the totals of all of it.
    keep = {"analysis": {"idle_seconds": 600, "ended_seconds": 600}}
    with Stack(tmp_path, [LIBRARY], collector=keep) as stack:
        yield stack.start()


def waits_by_rank(stack: Stack, workload: str) -> np.ndarray:
    found = np.full(RANKS, np.nan)
    for labels, value in stack.collector_metrics().get(
        "lanterne_rank_wait_seconds_total", workload=workload, source="blocking"
    ):
        found[int(labels["rank"])] = value
    return found


def test_slow_rank_is_named_and_waits_agree(stack: Stack, tmp_path: Path) -> None:
    slow = 2
    folder = tmp_path / "job"
    folder.mkdir()
    with TorchJob(RANKS, folder, steps=400, slow_rank=slow, slow_ms=5.0, workload="w") as job:
        job.wait_ready()
        # The probes see a library as soon as a process has it open; the job starts after that.
        wait_for(
            lambda: stack.agent_metrics().get("lanterne_agent_libraries", state="attached"),
            30,
            "libtorch_cpu.so attached",
        )
        job.go()
        rows = wait_for(
            lambda: [r for r in stack.named() if r["workload"] == "w"], 60, "a named rank"
        )
        assert {row["rank"] for row in rows} == {slow}
        assert {row["evidence"] for row in rows} == {"blocking"}
        # Without a GPU the rank computes itself, and this one sleeps: it is not on the CPU.
        assert {row["klass"] for row in rows} == {"slow_host"}
        job.wait()
        truth = job.own_waits()
    calls = sum(len(row["calls"]) for row in job.truth())

    def settled() -> bool:
        counted = stack.collector_metrics().total(
            "lanterne_collective_duration_seconds_count", workload="w"
        )
        return counted >= calls

    wait_for(settled, 20, f"{calls} operations at the collector")
    # The newest operations are scored with the next snapshot.
    wait_for(lambda: np.isfinite(waits_by_rank(stack, "w")).all(), 10, "waits of every rank")
    reported = waits_by_rank(stack, "w")
    print("reported", reported, "measured by the ranks", truth)
    largest = truth.max()
    for rank in range(RANKS):
        assert reported[rank] == pytest.approx(truth[rank], rel=0.10, abs=0.05 * largest), rank
    assert np.argmin(reported) == slow
    steps = len(job.truth()[0]["calls"]) // 4
    for half in ("dispatch", "combine"):
        # Every one of them and nothing else: the exchange of counts before it has equal parts.
        assert (
            stack.collector_metrics().total(
                f"lanterne_moe_{half}_duration_seconds_count", workload="w", source="blocking"
            )
            == steps * RANKS
        ), half
