"""Expert load, and engines beside the waits of their ranks, as sentences for `top`. Pure."""

from __future__ import annotations

import math

import numpy as np

from lanterne.collector.snapshot import EngineView, ExpertView, Snapshot, StepView

MAX_LINES = 8
_LATENCY = (("ttft", "TTFT"), ("tpot", "TPOT"), ("inter_token", "between tokens"),
            ("latency", "request"))  # fmt: skip


def sentences(snapshot: Snapshot) -> tuple[str, ...]:
    """One for each communicator whose steps are known, each workload whose experts are, and each
    engine."""
    lines = [
        _step(comm.name, comm.workload, comm.serving)
        for comm in snapshot.communicators
        if comm.serving is not None and "span" in comm.serving.medians
    ]
    lines += [_experts(view) for view in snapshot.experts if view.primary]
    lines += [line for engine in snapshot.engines if (line := _engine(engine, snapshot))]
    return tuple(lines[:MAX_LINES])


def _step(name: str, workload: str, view: StepView) -> str:
    medians = view.medians
    parts = ", ".join(
        f"{part} {medians[part] / medians['span']:.0%}"
        for part in ("dispatch", "expert", "combine", "wait", "idle")
        if part in medians and medians["span"] > 0
    )
    of = f"{name} of {workload}" if workload else name
    return f"step of {of}: {_duration(medians['span'])} ({parts})"


def _experts(view: ExpertView) -> str:
    name = " ".join(part for part in (view.workload, view.model) if part) or view.source
    parts = [f"experts of {name}: {len(view.layer)} layers"]
    skew = view.measures.get("skew")
    if skew is not None and not np.isnan(skew).all():
        row = int(np.nanargmax(skew))
        hottest = int(view.load[row].argmax())
        parts.append(
            f"expert {hottest} of layer {view.layer[row]} has {skew[row]:.1f}x the mean load"
        )
    balanced = view.summary.get("balancedness_min")
    if balanced is not None:
        parts.append(f"ranks balanced {balanced:.0%} in the worst layer")
    low = view.measures.get("low_confidence")
    if low is not None and bool(np.all(low)):
        parts.append("few tokens, mostly chance")
    return ", ".join(parts)


def _engine(engine: EngineView, snapshot: Snapshot) -> str:
    values = engine.values
    told = [
        f"{name} p95 {_duration(values[f'{what}_p95'])}"
        for what, name in _LATENCY
        if f"{what}_p95" in values
    ]
    if "balancedness" in values:
        told.append(f"balancedness {values['balancedness']:.0%}")
    if not told:
        return ""
    waits = [
        comm.wait_share
        for comm in snapshot.communicators
        if comm.workload == engine.workload and not math.isnan(comm.wait_share)
    ]
    if waits:
        told.append(f"its ranks wait {max(waits):.0%} of their time")
    name = " ".join(part for part in (engine.workload, engine.engine) if part)
    return f"{name} at {engine.address}: {', '.join(told)}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
