"""Whether a figure really changed between two recordings: ratios with bootstrap intervals.

A figure is a ratio of sums over windows (seconds per operation, bytes per operation). Neighbouring
windows are alike, so blocks of windows are drawn, not windows (circular block bootstrap). The
interval is of the change B / A - 1, symmetric in logarithms, with Student's factor for the few
blocks that there are. Random numbers start from a fixed seed: the same input gives the same output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

DRAWS = 2000
MIN_WINDOWS = 8  # with values, on each side; below, there is no interval
CONFIDENCE = 0.95
# That anything is called real where nothing changed. Below 0.05, since from few windows that are
# alike the spread is estimated too small: this keeps the true rate below that.
FALSE = 0.02
SEED = 0x1A47E24E


@dataclass(frozen=True)
class Change:
    """`a`, `b`: the figure of each. `change` is b / a - 1; NaN where either is 0 or unknown."""

    a: float
    b: float
    change: float
    low: float  # of the interval of `change`; NaN where there are too few windows
    high: float
    p: float  # that chance alone makes a change as large; NaN likewise


def change(a: tuple[F64, F64], b: tuple[F64, F64]) -> Change:
    """`a`, `b`: (numerators, denominators) by window; windows without denominator do not count."""
    first, second = _used(a), _used(b)
    before, after = _ratio(*first), _ratio(*second)
    nan = math.nan
    if not (before > 0 and after > 0):
        return Change(before, after, nan, nan, nan, nan)
    relative = after / before - 1.0
    if min(len(first[0]), len(second[0])) < MIN_WINDOWS:
        return Change(before, after, relative, nan, nan, nan)
    rng = np.random.default_rng(SEED)
    variances, freedoms = zip(*(_spread(*part, rng) for part in (first, second)), strict=True)
    spread = math.sqrt(sum(variances))
    if spread < 1e-12:  # every window the same
        same = abs(relative) < 1e-12
        return Change(before, after, relative, relative, relative, 1.0 if same else 0.0)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = sum(variances) ** 2 / sum(
        v * v / f for v, f in zip(variances, freedoms, strict=True) if v > 0
    )
    log = math.log(after / before)
    reach = spread * student(0.5 + CONFIDENCE / 2, freedom)
    return Change(
        before,
        after,
        relative,
        math.exp(log - reach) - 1.0,
        math.exp(log + reach) - 1.0,
        _tail(abs(log) / spread, freedom),
    )


def _used(part: tuple[F64, F64]) -> tuple[F64, F64]:
    numerator, denominator = part
    known = np.isfinite(numerator) & np.isfinite(denominator) & (denominator > 0)
    return numerator[known], denominator[known]


def _ratio(numerator: F64, denominator: F64) -> float:
    total = float(denominator.sum())
    return float(numerator.sum()) / total if total > 0 else math.nan


def _spread(numerator: F64, denominator: F64, rng: np.random.Generator) -> tuple[float, float]:
    """(variance of the logarithm of the ratio, degrees of freedom)."""
    n = len(numerator)
    block = max(1, round(1.5 * n ** (1 / 3)))
    blocks = -(-n // block)
    around = np.arange(n)[:, None] + np.arange(block)[None, :]
    sums = [part[around % n].sum(axis=1) for part in (numerator, denominator)]
    drawn = rng.integers(0, n, size=(DRAWS, blocks))
    top, bottom = (s[drawn].sum(axis=1) for s in sums)
    ratio = top / np.maximum(bottom, 1e-300)
    logs = np.log(np.maximum(ratio, 1e-300))
    # Drawing with replacement shows (blocks - 1) / blocks of the variance.
    return float(logs.var() * blocks / max(blocks - 1, 1)), float(max(blocks - 1, 1))


def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t from 0.5 up, by bisection of `_tail`."""
    target = 2.0 * (1.0 - probability)
    low, high = 0.0, max(10.0, 4 * NormalDist().inv_cdf(probability))
    while _tail(high, freedom) > target:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, freedom) > target else (low, middle)
    return (low + high) / 2


def _tail(t: float, freedom: float) -> float:
    """P(|T| > t), integrated over the angle: T = sqrt(freedom) tan(angle)."""
    edge = math.atan(t / math.sqrt(freedom))
    angles = np.linspace(edge, math.pi / 2, 513)
    # cos^(freedom - 1): below 1e-300 it is 0 anyway.
    density = np.cos(angles) ** max(freedom - 1.0, 0.0)
    whole = np.cos(np.linspace(0.0, math.pi / 2, 513)) ** max(freedom - 1.0, 0.0)
    top = _simpson(density, (math.pi / 2 - edge) / 512)
    return min(1.0, top / _simpson(whole, math.pi / 2 / 512))


def _simpson(values: F64, step: float) -> float:
    return float(step / 3 * (values[0] + values[-1] + 4 * values[1:-1:2].sum()
                             + 2 * values[2:-1:2].sum()))  # fmt: skip


def holm(chances: list[float], level: float = FALSE) -> list[bool]:
    """Which of several changes are real when all are looked at (Holm's step-down)."""
    order = sorted((p, i) for i, p in enumerate(chances) if math.isfinite(p))
    real = [False] * len(chances)
    for rank, (p, i) in enumerate(order):
        if p > level / (len(order) - rank):
            break
        real[i] = True
    return real
