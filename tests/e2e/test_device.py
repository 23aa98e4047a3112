"""With the profiler plugin: what host times cannot tell is told by the GPU's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.plugin.build import build as build_plugin
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
def plugin(paths: RigPaths) -> Path:
    return Path(shutil.copy(build_plugin().library, paths.root / "libnccl-profiler.so"))


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths, plugin: Path) -> Iterator[Stack]:
    """An agent that knows the plugin's file from an earlier process."""
    hold = f"import ctypes, sys; ctypes.CDLL({str(plugin)!r}); sys.stdin.read()"
    earlier = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
    try:
        with Stack(tmp_path, [f"{paths.root}/*"], env={"LD_LIBRARY_PATH": str(paths.root)}) as one:
            one.start()
            wait_for(lambda: attached(one, "profiler"), 30, f"plugin attached\n{one.logs()}")
            yield one
    finally:
        earlier.communicate()


def attached(stack: Stack, kind: str) -> bool:
    found = stack.agent_metrics().total("lanterne_agent_libraries", kind=kind, state="attached")
    return found >= 1


def start(stack: Stack, paths: RigPaths, plugin: Path, **options: object) -> Job:
    config = JobConfig(**(BASE | options))  # type: ignore[arg-type]
    env = {"NCCL_PROFILER_PLUGIN": str(plugin), "LANTERNE_WORKLOAD": "job"}
    job = Job(config, paths=paths, env=env, hold="start")
    job.__enter__()
    wait_for(lambda: attached(stack, "nccl"), 30, f"libnccl attached\n{stack.logs()}")
    job.release()
    job.wait_ready()
    return job


@pytest.mark.parametrize("mode", ["run-ahead", "graph"])
def test_slow_rank_is_named_on_device_evidence(
    stack: Stack, paths: RigPaths, plugin: Path, mode: str
) -> None:
    job = start(stack, paths, plugin, mode=mode, seconds=60)
    try:
        rows = wait_for(lambda: list(stack.named()), 45, f"a named rank\n{stack.logs()}")
        assert {(row["rank"], row["evidence"]) for row in rows} == {(SLOW, "device")}
        metrics = stack.collector_metrics()
        for half in ("dispatch", "combine"):
            name = f"lanterne_moe_{half}_duration_seconds_count"
            assert metrics.total(name, source="device") > 0, half
            assert not metrics.get(name, source="enqueue")
        absent = metrics.get("lanterne_communicator_waits_absent")
        assert not [labels for labels, value in absent if value]
        agent = stack.agent_metrics()
        assert agent.total("lanterne_agent_events_lost_total") == 0
        assert agent.total("lanterne_agent_device_operations_total") > 0
        assert agent.total("lanterne_agent_device_unmatched_total") == 0
    finally:
        job.close()


def true_waits(job: Job) -> tuple[int, np.ndarray]:
    """(operations, per rank what it waited in seconds), by the device's own times: d - min d. A
    first call connects, and is left out as it is by the collector."""
    durations = []
    for truth in job.truths():
        spans = np.array([row[4:6] for row in truth["arrivals"]], np.int64)
        durations.append(np.diff(spans, axis=1)[:, 0])
    every = np.stack(durations)[:, 1 if job.config.mode != "graph" else 0 :]
    waits: np.ndarray = (every - every.min(axis=0)).sum(axis=1) / 1e9
    return every.shape[1], waits


@pytest.mark.parametrize("mode", ["run-ahead", "graph"])
def test_waits_are_those_of_the_device(
    stack: Stack, paths: RigPaths, plugin: Path, mode: str
) -> None:
    job = start(stack, paths, plugin, mode=mode, steps=150)
    try:
        job.wait(90)
        count, expected = true_waits(job)

        def told() -> dict[int, float]:
            rows = stack.collector_metrics().get(
                "lanterne_rank_wait_seconds_total", workload="job", source="device"
            )
            return {int(labels["rank"]): value for labels, value in rows}

        def enough() -> bool:
            found = told()
            return len(found) == RANKS and max(found.values()) > 0.99 * expected.max()

        wait_for(enough, 12, f"all waits, {expected} s in {count} operations: {told()}")
        found = told()
        waits = np.array([found[rank] for rank in range(RANKS)])
        assert waits.argmin() == expected.argmin() == SLOW
        others = np.arange(RANKS) != SLOW
        assert np.allclose(waits[others], expected[others], rtol=0.01)
        assert abs(waits[SLOW] - expected[SLOW]) < 0.01 * expected.max()
    finally:
        job.close()


def test_an_agent_that_comes_late_to_a_replaying_job(
    tmp_path: Path, paths: RigPaths, plugin: Path
) -> None:
    """No call is ever made: who is who is known from the plugin alone."""
    config = JobConfig(**(BASE | {"mode": "graph", "seconds": 90}))  # type: ignore[arg-type]
    env = {"NCCL_PROFILER_PLUGIN": str(plugin), "LANTERNE_PROFILER": "always"}
    with Job(config, paths=paths, env=env | {"LANTERNE_WORKLOAD": "job"}) as job:
        job.wait_ready()
        with Stack(tmp_path, [f"{paths.root}/*"]) as stack:
            stack.start()
            rows = wait_for(lambda: list(stack.named()), 60, f"a named rank\n{stack.logs()}")
            assert {(r["rank"], r["evidence"], r["workload"]) for r in rows} == {
                (SLOW, "device", "job")
            }
            assert stack.agent_metrics().total("lanterne_agent_device_unplaced_total") == 0
