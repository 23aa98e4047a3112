"""Snapshot -> metric families of advice. Pure and bounded: a few kinds a workload."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lanterne.collector.metrics import CATALOG, Family, Point
from lanterne.collector.snapshot import Snapshot

GAIN, INFO = "lanterne_advice_gain_ratio", "lanterne_advice_info"


def families(snapshot: Snapshot) -> Iterator[Family]:
    gains: list[Point] = []
    infos: list[Point] = []
    for piece in snapshot.advice:
        labels = {"workload": piece.workload, "advice": piece.kind}
        infos.append(Point(INFO, labels, 1.0))
        if not math.isnan(piece.gain):
            gains.append(Point(GAIN, labels, piece.gain))
    yield Family(CATALOG[GAIN], gains)
    yield Family(CATALOG[INFO], infos)
