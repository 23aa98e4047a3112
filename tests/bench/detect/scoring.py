"""Named ranks against the truth: events, and figures with 95 % intervals.

An event is a rank that is named for a time without a gap. One that begins while the rank is slow,
or at most two whole windows after the one in which that ended, is right; every other is a false
alarm. However often an episode is named, it is found once. How long a name outlives its fault is a
figure of its own; above five windows, twice what hysteresis needs, it has become a false alarm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.bench.detect.feed import WINDOW_SECONDS, window_ends
from tests.bench.detect.job import HANG_SECONDS, Job

Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

Z95 = 1.959964
GRACE_WINDOWS = 2
DELIVERY_SECONDS = 2  # until a window's last events are in and its verdict is out
STAY_WINDOWS = 5.0
RESAMPLES = 400


@dataclass(frozen=True)
class Span:
    """One rank's fault, in seconds of the run; `full`: from when on it is as slow as told."""

    rank: int
    start: float
    full: float
    end: float
    klass: str
    needed: bool = True  # False: may be named, need not


@dataclass
class Score:
    """Of one or several runs."""

    found: int = 0
    missed: int = 0
    false: int = 0
    stayed: int = 0  # of the false alarms: found rightly, and then named for too long
    delays: list[float] = field(default_factory=list)  # windows, of those found
    stays: list[float] = field(default_factory=list)  # windows named after the end, of those found
    class_right: int = 0
    class_known: int = 0  # found, of a class that the evidence can tell
    classes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, other: Score) -> None:
        self.found += other.found
        self.missed += other.missed
        self.false += other.false
        self.stayed += other.stayed
        self.delays += other.delays
        self.stays += other.stays
        self.class_right += other.class_right
        self.class_known += other.class_known
        self.seconds += other.seconds
        for name, count in other.classes.items():
            self.classes[name] = self.classes.get(name, 0) + count


def spans(job: Job) -> list[Span]:
    """The run's truth in seconds, one entry a rank and episode."""
    ends = job.step_end / 1e9
    found = []
    for e in job.faults.episodes:
        if e.klass == "hang":
            start = float(ends[e.first - 1])
            found += [Span(r, start, start, start + HANG_SECONDS, e.klass) for r in e.ranks]
            continue
        start, full, end = (float(ends[k - 1]) for k in (e.first, e.full, e.last))
        found += [Span(r, start, full, end, e.klass) for r in e.ranks]
        found += [Span(r, start, full, end, e.klass, needed=False) for r in e.also]
    return found


def score(
    named: Bool, truth: list[Span], klass: I64 | None = None, names: tuple[str, ...] = ()
) -> Score:
    """named: [second, rank], after that second. klass: index into `names` where named."""
    seconds = len(named)
    result = Score(seconds=float(seconds))
    begins = np.diff(named.astype(np.int8), axis=0, prepend=0) == 1
    right = np.zeros_like(named)
    for span in truth:
        first, last = math.floor(span.start), _last(span, seconds)
        right[first:last, span.rank] = True
        if not span.needed:
            continue
        starts = np.flatnonzero(begins[first:last, span.rank])
        if not len(starts):
            result.missed += 1
            continue
        result.found += 1
        at = first + int(starts[0])
        result.delays.append(max(0.0, (at + 1 - span.full) / WINDOW_SECONDS))
        result.stays.append(_stay(named[:, span.rank], span))
        if klass is not None:
            told = klass[at:last, span.rank][named[at:last, span.rank]]
            most = names[int(np.bincount(told).argmax())]
            result.classes[most] = result.classes.get(most, 0) + 1
    result.stayed = sum(s > STAY_WINDOWS for s in result.stays)
    result.false = int((begins & ~right).sum()) + result.stayed
    return result


def _last(span: Span, seconds: int) -> int:
    """The second until which an event may begin."""
    ends = window_ends(seconds)
    after = ends[np.searchsorted(ends, span.end) :][:1]
    last = int(after[0]) if len(after) else seconds
    return last + int(GRACE_WINDOWS * WINDOW_SECONDS) + DELIVERY_SECONDS


def _stay(named: Bool, span: Span) -> float:
    """Windows from the end of the fault until it is named no more, or the run ends."""
    end = math.ceil(span.end)
    calm = np.flatnonzero(~named[end:])
    until = end + int(calm[0]) if len(calm) else len(named)
    return max(0.0, (until - span.end) / WINDOW_SECONDS)


def wilson(hits: int, n: int) -> tuple[float, float, float] | None:
    """-> proportion and its 95 % interval after Wilson; None of nothing."""
    if n == 0:
        return None
    p, z2 = hits / n, Z95 * Z95
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return p, max(0.0, middle - half), min(1.0, middle + half)


def median(values: list[float]) -> tuple[float, float, float] | None:
    """-> median and its 95 % interval by bootstrap (its own fixed seed); None of nothing."""
    if not values:
        return None
    x = np.array(values)
    rng = np.random.default_rng(len(values))
    drawn = np.median(x[rng.integers(0, len(x), (RESAMPLES, len(x)))], axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.median(x)), float(low), float(high)


def per_hour(events: int, seconds: float) -> tuple[float, float, float] | None:
    """-> rate and its 95 % interval (Poisson, by Wilson and Hilferty's approximation)."""
    if seconds <= 0:
        return None
    hours = seconds / 3600

    def bound(k: float, z: float) -> float:
        return k * (1 - 1 / (9 * k) + z / (3 * math.sqrt(k))) ** 3 if k > 0 else 0.0

    return events / hours, bound(events, -Z95) / hours, bound(events + 1, Z95) / hours
