"""Snapshot -> metric families of expert load and of what engines tell. Pure and bounded.

One source a workload is shown: two may tell of the same tokens. The JSON view shows all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lanterne.collector.metrics import CATALOG, Family, Point
from lanterne.collector.snapshot import Snapshot, StepView

MAX_LAYERS = 2048  # of all workloads together: nine series each

# measure of analyse.layers.LayerMeasures -> metric
_LAYER = {
    "skew": "lanterne_expert_load_skew_ratio",
    "gini": "lanterne_expert_load_gini_ratio",
    "excess_gini": "lanterne_expert_load_excess_gini_ratio",
    "balancedness": "lanterne_expert_balancedness_ratio",
    "overflow": "lanterne_expert_overflow_ratio",
    "zero_share": "lanterne_expert_zero_load_ratio",
    "local_hit": "lanterne_expert_local_hit_ratio",
    "assignments": "lanterne_expert_assignments",
    "low_confidence": "lanterne_expert_low_confidence",
}
_PERCENTILES = ("p50", "p95", "p99")
# name in EngineReading.values, before _p50 -> metric
_LATENCY = {
    "ttft": "lanterne_engine_ttft_seconds",
    "tpot": "lanterne_engine_tpot_seconds",
    "inter_token": "lanterne_engine_inter_token_seconds",
    "latency": "lanterne_engine_request_latency_seconds",
}


def families(snapshot: Snapshot) -> Iterator[Family]:
    yield from _steps(snapshot)
    yield from _experts(snapshot)
    yield from _engines(snapshot)


def _steps(snapshot: Snapshot) -> Iterator[Family]:
    """Where communicators share a name, the one whose step takes longest."""
    longest: dict[tuple[str, str], StepView] = {}
    for comm in snapshot.communicators:
        if comm.serving is None or "span" not in comm.serving.medians:
            continue
        key = (comm.workload, comm.name)
        before = longest.get(key)
        if before is None or comm.serving.medians["span"] > before.medians["span"]:
            longest[key] = comm.serving
    seconds, operations = "lanterne_moe_step_seconds", "lanterne_moe_step_operations"
    points, counts = [], []
    for (workload, name), view in longest.items():
        labels = {"workload": workload, "comm": name}
        counts.append(Point(operations, labels, float(view.period)))
        points += [
            Point(seconds, {**labels, "part": part, "source": view.evidence}, value)
            for part, value in view.medians.items()
            if part != "assignments"
        ]
    yield Family(CATALOG[seconds], points)
    yield Family(CATALOG[operations], counts)


def _experts(snapshot: Snapshot) -> Iterator[Family]:
    points: dict[str, list[Point]] = {measure: [] for measure in _LAYER}
    left_out, room = 0, MAX_LAYERS
    for view in snapshot.experts:
        if not view.primary:
            continue
        shown = view.layer[:room]
        room -= len(shown)
        left_out += len(view.layer) - len(shown)
        labels = [{"workload": view.workload, "layer": str(layer)} for layer in shown]
        for measure, name in _LAYER.items():
            values = view.measures.get(measure)
            if values is None:
                continue
            points[measure] += [
                Point(name, labels[i], float(value))
                for i, value in enumerate(values[: len(shown)].tolist())
                if not math.isnan(value)
            ]
    for measure, name in _LAYER.items():
        yield Family(CATALOG[name], points[measure])
    name = "lanterne_expert_layers_left_out"
    yield Family(CATALOG[name], [Point(name, {}, float(left_out))])


def _engines(snapshot: Snapshot) -> Iterator[Family]:
    """The worst of a workload's engines: a mean of percentiles would be of nothing."""
    worst: dict[tuple[str, str, str], float] = {}
    balanced: dict[str, float] = {}
    for engine in snapshot.engines:
        for what in _LATENCY:
            for percentile in _PERCENTILES:
                value = engine.values.get(f"{what}_{percentile}")
                if value is not None:
                    key = (what, engine.workload, percentile)
                    worst[key] = max(value, worst.get(key, 0.0))
        value = engine.values.get("balancedness")
        if value is not None:
            balanced[engine.workload] = min(value, balanced.get(engine.workload, math.inf))
    for what, name in _LATENCY.items():
        points = [
            Point(name, {"workload": workload, "percentile": percentile}, value)
            for (kind, workload, percentile), value in worst.items()
            if kind == what
        ]
        yield Family(CATALOG[name], points)
    name = "lanterne_engine_balancedness_ratio"
    yield Family(CATALOG[name], [Point(name, {"workload": w}, v) for w, v in balanced.items()])
