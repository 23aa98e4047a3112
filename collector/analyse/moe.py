"""Balance of expert load, on arrays of counts or bytes. NaN where a figure is undefined.

Formulas and edge cases: max / mean for the headline, max / min only where min > 0, the Gini
coefficient and what of it uniform routing would not give anyway, mean / max over ranks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

LOW_CONFIDENCE_TOKENS = 30  # per expert; below, chance alone gives large skews


def skew(load: Numbers) -> float:
    """max / mean; 1 is even."""
    mean = float(np.mean(load)) if len(load) else 0.0
    return float(np.max(load)) / mean if mean > 0 else math.nan


def skew_range(load: Numbers) -> tuple[float, float]:
    """-> (max / min over experts with load, share of experts with none)."""
    if not len(load) or not np.any(load > 0):
        return math.nan, math.nan
    some = load[load > 0]
    return float(some.max() / some.min()), float(np.mean(load <= 0))


def gini(load: Numbers) -> float:
    """2 sum(i x_(i)) / (n sum x) - (n + 1) / n, with i from 1 over ascending x."""
    n, total = len(load), float(np.sum(load))
    if n == 0 or total <= 0:
        return math.nan
    order = np.arange(1, n + 1)
    value = 2 * float((order * np.sort(load)).sum()) / (n * total) - (n + 1) / n
    return max(value, 0.0)


def excess_gini(load: Numbers) -> float:
    """Gini - 1 / sqrt(pi mu), at least 0: what uniform routing gives anyway taken off.

    `load` counts tokens; mu is their mean per expert.
    """
    value = gini(load)
    if math.isnan(value):
        return value
    return max(value - 1 / math.sqrt(math.pi * float(np.mean(load))), 0.0)


def balancedness(load: Numbers) -> float:
    """mean / max over ranks; 1 is even."""
    top = float(np.max(load)) if len(load) else 0.0
    return float(np.mean(load)) / top if top > 0 else math.nan


def overflow(load: Numbers, *, tokens: int, top_k: int, capacity_factor: float = 1.25) -> float:
    """Share of assignments above capacity ceil(CF T k / E). Overflow is not a drop."""
    if tokens <= 0 or top_k <= 0 or not len(load):
        return math.nan
    capacity = math.ceil(capacity_factor * tokens * top_k / len(load))
    return float(np.maximum(load - capacity, 0).sum()) / (tokens * top_k)


def local_hit(assignments: Numbers, rank_of_source: int) -> tuple[float, float]:
    """-> (share of assignments that stay on the own rank, the baseline 1 / EP).

    `assignments` [EP]: assignments from one source rank to each rank.
    """
    total = float(np.sum(assignments))
    if total <= 0:
        return math.nan, 1 / max(len(assignments), 1)
    return float(assignments[rank_of_source]) / total, 1 / len(assignments)


def rank_load(matrix: npt.NDArray[np.int64]) -> F64:
    """Bytes that each rank receives, from a [sender, receiver] traffic matrix."""
    received: F64 = matrix.sum(axis=0).astype(np.float64)
    return received
