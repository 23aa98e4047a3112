"""With parcagpu loaded: kernels by name tell what the host cannot see, inside graphs too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.parcagpu.build import NAME
from tests.parcagpu.build import build as build_injection
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

RANKS, SLOW = 4, 2
BASE = {
    "ranks": RANKS, "ranks_per_node": RANKS, "tokens": 64, "hidden": 128, "zipf": 0.4, "layers": 2,
    "attn_us": 4000, "expert_us": 1000, "faults": (f"slow-rank:{SLOW}:2",),
}  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def injection(paths: RigPaths) -> Path:
    return Path(shutil.copy(build_injection(), paths.root / NAME))


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths, injection: Path) -> Iterator[Stack]:
    """An agent that knows the files of parcagpu and libcuda from an earlier process."""
    files = [str(injection), str(paths.cuda)]
    hold = f"import ctypes, sys; [ctypes.CDLL(f) for f in {files!r}]; sys.stdin.read()"
    earlier = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
    try:
        with Stack(tmp_path, [f"{paths.root}/*"], env={"LD_LIBRARY_PATH": str(paths.root)}) as one:
            one.start()
            for kind in ("parcagpu", "cuda"):
                wait_for(lambda kind=kind: attached(one, kind), 30, f"{kind}\n{one.logs()}")
            yield one
    finally:
        earlier.communicate()


def attached(stack: Stack, kind: str) -> bool:
    found = stack.agent_metrics().total("lanterne_agent_libraries", kind=kind, state="attached")
    return found >= 1


def start(stack: Stack, paths: RigPaths, injection: Path, every: int = 1, **options: object) -> Job:
    config = JobConfig(**(BASE | options))  # type: ignore[arg-type]
    env = {"CUDA_INJECTION64_PATH": str(injection), "LANTERNE_WORKLOAD": "job"}
    env["TEST_INJECTION_EVERY"] = str(every)
    job = Job(config, paths=paths, env=env, hold="start")
    job.__enter__()
    wait_for(lambda: attached(stack, "nccl"), 30, f"libnccl attached\n{stack.logs()}")
    job.release()
    job.wait_ready()
    return job


@pytest.mark.parametrize("mode", ["graph", pytest.param("run-ahead", marks=pytest.mark.faults)])
def test_slow_rank_is_named_by_kernels(
    stack: Stack, paths: RigPaths, injection: Path, mode: str
) -> None:
    job = start(stack, paths, injection, mode=mode, seconds=60)
    try:
        rows = wait_for(lambda: list(stack.named()), 45, f"a named rank\n{stack.logs()}")
        assert {(row["rank"], row["evidence"]) for row in rows} == {(SLOW, "device")}
        agent = stack.agent_metrics()
        assert agent.total("lanterne_agent_events_lost_total") == 0
        assert agent.total("lanterne_agent_kernel_operations_total") > 0
        for reason in ("sampled", "lost", "order", "clock", "malformed", "unchecked"):
            left = agent.total("lanterne_agent_kernels_left_out_total", reason=reason)
            assert left == 0, reason
        stages = wait_for(lambda: stage_seconds(stack), 20, "stage times")
        assert set(stages) == {
            (rank, stage)
            for rank in range(RANKS)
            for stage in ("attention", "routing", "expert_gemm", "collective", "other")
        }
        others = np.mean([stages[rank, "attention"] for rank in range(RANKS) if rank != SLOW])
        assert stages[SLOW, "attention"] > 1.5 * others
    finally:
        job.close()


def stage_seconds(stack: Stack) -> dict[tuple[int, str], float]:
    rows = stack.collector_metrics().get("lanterne_rank_stage_seconds_total", workload="job")
    return {(int(labels["rank"]), labels["kernel_stage"]): value for labels, value in rows}


def true_waits(job: Job) -> np.ndarray:
    """Seconds that each rank waited in all operations, by the device's own times: d - min d."""
    durations = []
    for truth in job.truths():
        spans = np.array([row[4:6] for row in truth["arrivals"]], np.int64)
        durations.append(np.diff(spans, axis=1)[:, 0])
    every = np.stack(durations)
    waits: np.ndarray = (every - every.min(axis=0)).sum(axis=1) / 1e9
    return waits


@pytest.mark.faults  # a minute: make test-faults
def test_waits_in_graphs_are_spread_as_the_devices_are(
    stack: Stack, paths: RigPaths, injection: Path
) -> None:
    """Of a job that has ended, all but what came last: whether that was all is not known."""
    job = start(stack, paths, injection, mode="graph", steps=400)
    try:
        job.wait(120)
        expected = true_waits(job)
        rows = stack.collector_metrics().get(
            "lanterne_rank_wait_seconds_total", workload="job", source="device"
        )
        found = {int(labels["rank"]): value for labels, value in rows}
        waits = np.array([found[rank] for rank in range(RANKS)])
        assert 0.3 * expected.sum() < waits.sum() < 1.01 * expected.sum()
        assert np.allclose(waits / waits.sum(), expected / expected.sum(), atol=0.03)
    finally:
        job.close()


def test_a_sample_is_told_as_one(stack: Stack, paths: RigPaths, injection: Path) -> None:
    """parcagpu limits what it tells of: no rank is judged by the rest, and no ratio made of it."""
    job = start(stack, paths, injection, every=3, mode="graph", seconds=40)
    try:

        def sampled() -> float:
            agent = stack.agent_metrics()
            return agent.total("lanterne_agent_kernels_left_out_total", reason="sampled")

        wait_for(lambda: sampled() > 1000, 30, f"a sample\n{stack.logs()}")
        operations = stack.agent_metrics().total("lanterne_agent_kernel_operations_total")
        wait_for(lambda: sampled() > 3000, 30, "more of it")
        now = stack.agent_metrics().total("lanterne_agent_kernel_operations_total")
        assert now == operations
        assert wait_for(lambda: stage_seconds(stack), 20, "stage times")
        assert not stack.collector_metrics().get("lanterne_bubble_ratio", workload="job")
        assert not list(stack.named())
    finally:
        job.close()
