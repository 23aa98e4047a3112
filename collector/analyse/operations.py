"""Totals of one communicator's operations -> histograms and calls by operation and source."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops, totals
from lanterne.collector.snapshot import EVIDENCE, Histogram, LongWait

I64 = npt.NDArray[np.int64]
NS = 1e9

Durations = dict[tuple[str, str], Histogram]
Calls = dict[tuple[str, str], tuple[int, int, int]]
Halves = tuple[dict[str, Histogram], dict[str, Histogram]]


def operations(
    rows: list[tuple[int, int, int, I64]],
) -> tuple[
    Durations,
    dict[tuple[str, str], tuple[int, int, int]],
    dict[str, Histogram],
    dict[str, Histogram],
]:
    """-> durations and calls by (op, source), dispatch and combine by source."""
    durations: Durations = {}
    calls: Calls = {}
    halves: Halves = ({}, {})
    for op, role, evidence, values in rows:
        source = EVIDENCE[evidence]
        kind = (ops.name(op), source)
        before = calls.get(kind, (0, 0, 0))
        head = values[: totals.DURATION].tolist()
        calls[kind] = (before[0] + head[0], before[1] + head[1], before[2] + head[2])
        if evidence not in (ops.DEVICE, ops.BLOCKING):
            continue
        new = Histogram(values[4:].copy(), int(values[totals.DURATION]) / NS)
        durations[kind] = _add(durations.get(kind), new)
        if role:
            half = halves[role - 1]
            half[source] = _add(half.get(source), new)
    return durations, calls, halves[0], halves[1]


def _add(a: Histogram | None, b: Histogram) -> Histogram:
    if a is None:
        return b
    return Histogram(a.bins + b.bins, a.sum_seconds + b.sum_seconds)


def waits(
    rows: list[tuple[int, int, int, I64]], longest: Mapping[tuple[int, int, int], LongWait]
) -> Durations:
    """`longest`: by (op, role, evidence)."""
    return {
        (ops.name(op), EVIDENCE[evidence]): Histogram(
            values[1:].copy(), int(values[0]) / NS, longest.get((op, role, evidence))
        )
        for op, role, evidence, values in rows
    }
