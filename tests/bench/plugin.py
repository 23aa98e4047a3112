"""What the agent and the profiler plugin cost a job: its step time with both over without either.

The same job of the rig runs in turn with them and without, so that a drifting machine hits both
alike. Without: another copy of the libraries, which no probe is on, no plugin, and the agent held
(SIGSTOP). The collector runs on the same machine all the time, which counts against us.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.plugin.build import build as build_plugin
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

ROUNDS = 20
RANKS = 4
# Steps of some 25 ms, as of a decoding server: two layers of attention, dispatch, experts and
# combine, then an all-reduce. Training steps are longer, and the cost is less of them.
CONFIG = JobConfig(
    ranks=RANKS, layers=2, attn_us=10_000, expert_us=2_000, expert_ns_per_token=0, steps=150,
    mode="eager",
)  # fmt: skip


def step_ns(job: Job) -> float:
    """From the truth of rank 0: the median of the steps that its newest arrivals cover. What else
    runs on the machine disturbs some steps; what the probes cost is in all of them."""
    ends: dict[int, int] = {}
    for step, layer, phase, _, _, end in job.truth(0)["arrivals"]:
        if phase == "dispatch" and layer == 0:
            ends[int(step)] = int(end)
    steps = [ends[one] - ends[one - 1] for one in ends if one - 1 in ends]
    if len(steps) < CONFIG.steps // 2:
        raise RuntimeError(f"only {len(steps)} steps are in the truth")
    return statistics.median(steps)


def run_job(paths: RigPaths, env: dict[str, str]) -> float:
    with Job(CONFIG, paths=paths, env=env) as job:
        codes = job.wait(120)
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: {job.log(0)}")
        return step_ns(job)


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """``ratio``: median over rounds of with / without; ``noise``: standard error of that median,
    by the spread of the rounds."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, seen = build(dest=folder / "plain"), build(dest=folder / "seen")
        plugin = Path(shutil.copy(build_plugin().library, seen.root / "libnccl-profiler.so"))
        files = [str(seen.nccl), str(plugin)]  # stay attached between the jobs
        hold = f"import ctypes, sys; [ctypes.CDLL(one) for one in {files}]; sys.stdin.read()"
        with (
            subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE) as holder,
            Stack(folder, [f"{seen.root}/*"]) as stack,
        ):
            try:
                stack.start()
                wait_for(lambda: _attached(stack) >= 2, 30, f"attached\n{stack.logs()}")
                for number in range(rounds):
                    for variant in ("without", "with") if number % 2 else ("with", "without"):
                        times[variant].append(_round(stack, plain, seen, plugin, variant))
                device = stack.agent_metrics().total("lanterne_agent_device_operations_total")
            finally:
                assert holder.stdin is not None
                holder.stdin.close()
    if not device:
        raise RuntimeError("the plugin told nothing: its cost was not measured")
    ratios = [w / wo for w, wo in zip(times["with"], times["without"], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "noise": round(_error_of_median(ratios), 4),
        "step_without_ms": round(statistics.median(times["without"]) / 1e6, 3),
        "step_with_ms": round(statistics.median(times["with"]) / 1e6, 3),
        "ratios": [round(one, 4) for one in ratios],
        "device_operations": int(device),
        "cpus": os.cpu_count(),
    }


def _round(stack: Stack, plain: RigPaths, seen: RigPaths, plugin: Path, variant: str) -> float:
    if variant == "with":
        return run_job(seen, {"NCCL_PROFILER_PLUGIN": str(plugin)})
    assert stack.agent is not None
    stack.agent.send_signal(signal.SIGSTOP)
    try:
        return run_job(plain, {})
    finally:
        stack.agent.send_signal(signal.SIGCONT)


def _attached(stack: Stack) -> float:
    metrics = stack.agent_metrics()
    return sum(
        metrics.total("lanterne_agent_libraries", kind=kind, state="attached")
        for kind in ("nccl", "profiler")
    )


def _error_of_median(values: list[float]) -> float:
    """By the interquartile range, which one disturbed round does not move."""
    low, _, high = statistics.quantiles(values, n=4)
    return float(1.2533 * (high - low) / 1.349 / len(values) ** 0.5)
