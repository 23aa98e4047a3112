"""Snapshot -> metric families of what GPUs did, by stage of a layer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lanterne.collector.metrics import CATALOG, Family, Point
from lanterne.collector.snapshot import Snapshot


def families(snapshot: Snapshot) -> Iterator[Family]:
    nodes = [node.name for node in snapshot.nodes]
    seconds: dict[tuple[str, ...], float] = {}
    bubble: dict[tuple[str, ...], float] = {}
    ratio: dict[tuple[str, ...], float] = {}
    for view in snapshot.stages:
        for stage, value in view.busy_seconds.items():
            key = (view.workload, str(view.rank), nodes[view.node], view.gpu, stage)
            seconds[key] = seconds.get(key, 0.0) + value
        rank = (view.workload, str(view.rank))
        for into, value in ((bubble, view.bubble), (ratio, view.comm_compute)):
            if not math.isnan(value):  # of several devices the worst
                into[rank] = max(into.get(rank, value), value)
    for name, values in (
        ("lanterne_rank_stage_seconds_total", seconds),
        ("lanterne_bubble_ratio", bubble),
        ("lanterne_moe_comm_compute_ratio", ratio),
    ):
        metric = CATALOG[name]
        yield Family(
            metric,
            [Point(name, dict(zip(metric.labels, k, strict=True)), v) for k, v in values.items()],
        )
