"""The agent's GPU readings against nvidia-smi's, idle and under load."""

from __future__ import annotations

import time
from typing import Any

from tests.gpu.context import Context
from tests.gpu.host import ask_smi
from tests.gpu.result import Result, judged, skipped

SAMPLES, RIG_SAMPLES = 3, 1
# the agent's field, nvidia-smi's, factor to the agent's unit, allowed absolute, allowed relative
FIELDS = (
    ("utilization_ratio", "utilization.gpu", 0.01, 0.15, 0.0),
    ("memory_used_bytes", "memory.used", 1048576.0, 64 * 1048576.0, 0.0),
    ("temperature_celsius", "temperature.gpu", 1.0, 3.0, 0.0),
    ("power_watts", "power.draw", 1.0, 0.0, 0.20),
    ("sm_clock_hertz", "clocks.sm", 1e6, 0.0, 0.10),
)


def nvml(context: Context) -> Result:
    if not context.host.smi:
        return skipped("no nvidia-smi")
    samples = RIG_SAMPLES if context.rig else SAMPLES
    context.watch.start_agent()
    rows = _samples(context, "idle", samples)
    with context.driver("busy", nccl=False) as driver:
        driver.ask("busy", seconds=2.0)  # utilisation is an average: load first, then look
        for _ in range(samples):
            driver.ask("busy", seconds=0.7)
            rows += _sample(context, "busy")
    problems = sorted({row["problem"] for row in rows if row["problem"]})
    compared = sum(row["smi"] is not None for row in rows)
    if not compared:
        problems.append("nothing could be compared")
    worst: dict[str, float] = {}
    for row in rows:
        if row["difference"] is not None:
            worst[row["field"]] = max(worst.get(row["field"], 0.0), row["difference"])
    return judged(problems, f"{compared} values agree", worst_difference=worst, samples=rows)


def _samples(context: Context, state: str, samples: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _ in range(samples):
        rows += _sample(context, state)
    return rows


def _sample(context: Context, state: str) -> list[dict[str, Any]]:
    """Both within two windows of each other. A value that smi does not give is not compared."""
    smi = ask_smi(context.host.smi)
    window = context.watch.settled(time.monotonic_ns())
    rows = []
    for gpu in smi:
        told = [one for one in window["gpus"] if one["uuid"] == gpu["uuid"]]
        if not told:
            rows.append(_row(state, gpu["index"], "uuid", None, None, "the agent has no such GPU"))
            continue
        for field, name, factor, absolute, relative in FIELDS:
            ours = told[0].get(field)
            try:
                theirs: float | None = float(gpu[name]) * factor
            except ValueError:
                theirs = None  # "[N/A]"
            problem = ""
            if theirs is not None and ours is None:
                problem = f"{field}: nvidia-smi has {theirs:g}, the agent nothing"
            elif theirs is not None and abs(ours - theirs) > max(absolute, relative * theirs):
                problem = f"{field} ({state}): agent {ours:g}, nvidia-smi {theirs:g}"
            rows.append(_row(state, gpu["index"], field, ours, theirs, problem))
    return rows


def _row(state: str, gpu: str, field: str, ours: float | None, theirs: float | None,
         problem: str) -> dict[str, Any]:  # fmt: skip
    both = ours is not None and theirs is not None
    return {
        "state": state, "gpu": gpu, "field": field, "agent": ours, "smi": theirs,
        "difference": abs((ours or 0.0) - (theirs or 0.0)) if both else None, "problem": problem,
    }  # fmt: skip
