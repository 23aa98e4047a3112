"""Each fault that the rig injects gets its class, on each evidence that can tell it.

docs/attribution.md has the table of what is identifiable on which evidence; CASES is that table.
RUNS=10 repeats every case and prints how long each took to be named; windows are of 2 s here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.plugin.build import build as build_plugin
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

RUNS = int(os.environ.get("RUNS", "1"))
pytestmark = [pytest.mark.kernel, pytest.mark.timeout(120)]

RANKS = 6
BASE = {
    "ranks": RANKS, "ranks_per_node": RANKS, "tokens": 64, "hidden": 128, "zipf": 0.05, "layers": 2,
    "attn_us": 4000, "expert_us": 1000, "seconds": 60,
}  # fmt: skip
EXPERTS = {"expert_ns_per_token": 30_000, "expert_us": 500, "attn_us": 2000}


@dataclass(frozen=True)
class Case:
    fault: str
    mode: str
    plugin: bool
    rank: int
    klass: str
    options: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.fault.split(':')[0]}-{self.mode}-{'device' if self.plugin else 'enqueue'}"


CASES = [
    Case("slow-rank:2:2", "eager", False, 2, "slow_compute"),
    Case("intermittent:2:3:2", "eager", False, 2, "slow_compute"),
    Case("slow-host:4:8", "eager", False, 4, "slow_host"),
    *(
        Case(fault, mode, True, rank, klass, options)
        for mode in ("run-ahead", "graph")
        for fault, rank, klass, options in (
            ("slow-rank:2:2", 2, "slow_compute", {}),
            ("intermittent:2:3:2", 2, "slow_compute", {}),
            ("slow-host:4:8", 4, "slow_host", {}),
            ("hot-expert:5:8", 2, "hot_expert", EXPERTS),
            ("slow-sender:1:8", 1, "slow_sender", {}),
            ("slow-receiver:3:8", 3, "slow_receiver", {}),
            ("slow-path:0:3:8", 3, "slow_path", {}),
        )
    ),
]

# What make test does with; RUNS=1 in the environment, or more, runs them all.
ONCE = [
    case for case in CASES if case.mode == "eager" or (case.mode == "graph" and case.options)
] + [c for c in CASES if c.mode == "graph" and c.fault.startswith(("slow-sender", "slow-path"))]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RigPaths:
    return build(dest=tmp_path_factory.mktemp("classes") / "lib")


@pytest.fixture(scope="module")
def plugin(paths: RigPaths) -> Path:
    return Path(shutil.copy(build_plugin().library, paths.root / "libnccl-profiler.so"))


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stand-in NVML reads its state from."""
    state = tmp_path_factory.mktemp("nvml") / "state"
    state.touch()
    return state


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, paths: RigPaths, plugin: Path, nvml: Path
) -> Iterator[Stack]:
    """One for all jobs; it knows the plugin's file from an earlier process."""
    hold = f"import ctypes, sys; ctypes.CDLL({str(plugin)!r}); sys.stdin.read()"
    earlier = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
    try:
        with Stack(
            tmp_path_factory.mktemp("stack"),
            [f"{paths.root}/*"],
            env={"LD_LIBRARY_PATH": str(paths.root), "RIG_NVML_STATE": str(nvml)},
            collector={"analysis": {"window_seconds": 2}},
        ) as one:
            one.start()
            wait_for(lambda: attached(one, "profiler"), 30, f"plugin attached\n{one.logs()}")
            yield one
    finally:
        earlier.communicate()


def attached(stack: Stack, kind: str) -> bool:
    found = stack.agent_metrics().total("lanterne_agent_libraries", kind=kind, state="attached")
    return found >= 1


def classes(stack: Stack, workload: str) -> dict[int, str]:
    return {r["rank"]: r["klass"] for r in stack.named() if r["workload"] == workload}


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("case", CASES if "RUNS" in os.environ else ONCE, ids=str)
def test_fault_gets_its_class(
    stack: Stack, paths: RigPaths, plugin: Path, case: Case, run: int
) -> None:
    workload = f"{case}-{run}"
    config = JobConfig(**(BASE | case.options), mode=case.mode, faults=(case.fault,))  # type: ignore[arg-type]
    env = {"LANTERNE_WORKLOAD": workload}
    env["NCCL_PROFILER_PLUGIN"] = str(plugin) if case.plugin else "none"
    with Job(config, paths=paths, env=env, hold="start") as job:
        wait_for(lambda: attached(stack, "nccl"), 30, f"libnccl attached\n{stack.logs()}")
        job.release()
        job.wait_ready()
        began = time.monotonic()

        def named() -> dict[int, str]:
            found = classes(stack, workload)
            return found if found == {case.rank: case.klass} else {}

        try:
            wait_for(named, 40, f"rank {case.rank} named {case.klass}, and nobody else")
        except TimeoutError as error:
            raise AssertionError(f"{error}; named: {classes(stack, workload)}") from None
        if RUNS > 1:
            print(f"{workload}: {time.monotonic() - began:.1f} s")
        (row,) = [r for r in stack.named() if r["workload"] == workload]
        assert row["evidence"] == ("device" if case.plugin else "enqueue")
        assert row["recoverable_seconds_per_hour"] > 0


def test_a_throttled_gpu_is_the_reason(
    stack: Stack, paths: RigPaths, plugin: Path, nvml: Path
) -> None:
    nvml.write_text("gpu2.sm_clock_mhz=900\ngpu2.throttle=0x20\n")  # heat
    config = JobConfig(**BASE, mode="run-ahead", faults=("slow-rank:2:2",))  # type: ignore[arg-type]
    env = {"LANTERNE_WORKLOAD": "hot-gpu", "NCCL_PROFILER_PLUGIN": str(plugin)}
    try:
        with Job(config, paths=paths, env=env, hold="start") as job:
            wait_for(lambda: attached(stack, "nccl"), 30, f"libnccl attached\n{stack.logs()}")
            job.release()
            job.wait_ready()

            def named() -> bool:
                return classes(stack, "hot-gpu") == {2: "throttled"}

            wait_for(named, 40, f"rank 2 throttled: {classes(stack, 'hot-gpu')}\n{stack.logs()}")
            (row,) = [r for r in stack.named() if r["workload"] == "hot-gpu"]
            assert "900 MHz" in row["why"]
            assert "sw_thermal" in row["why"]
    finally:
        nvml.write_text("")


def test_without_times_of_receives_a_slow_sender_is_not_guessed(
    stack: Stack, paths: RigPaths
) -> None:
    """Host times only: nobody gets a class that nothing tells, and the view says why."""
    config = JobConfig(**BASE, mode="eager", faults=("slow-sender:1:8",))  # type: ignore[arg-type]
    env = {"LANTERNE_WORKLOAD": "untold", "NCCL_PROFILER_PLUGIN": "none"}
    with Job(config, paths=paths, env=env, hold="start") as job:
        wait_for(lambda: attached(stack, "nccl"), 30, f"libnccl attached\n{stack.logs()}")
        job.release()
        job.wait_ready()

        def judged() -> list[dict[str, object]]:
            found = [c for c in stack.snapshot()["communicators"] if c["workload"] == "untold"]
            return [c for c in found if c["evidence"] == "enqueue" and c["instances"] > 300]

        (comm,) = wait_for(judged, 40, f"waits of the job\n{stack.logs()}")
        assert comm["wait_matrix"] is None
        assert "slow senders, receivers and paths are unknown" in str(comm["matrix_absent"])
        assert not {"slow_sender", "slow_receiver", "slow_path"} & set(
            classes(stack, "untold").values()
        )
