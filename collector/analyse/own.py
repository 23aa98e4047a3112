"""Own time: what a rank spent on its own between two operations, waits taken off.

With durations it is the gap between one operation's end and the next one's arrival, which needs no
wait at all. Without, it is the interval between arrivals minus the wait in the first of them, so it
includes the transfer, the same for all ranks. The previous operation is the *process's*, in
whichever communicator: what a rank waited for in another group is not its own time, or the victim
of a straggler upstream would be blamed downstream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

PARTS = 8  # of a window, to see how much its ranks' medians change in it
LEAST_A_PART = 8
PART_LAGS = (1, 2, 4)
MOST_SHARED = 0.9  # correlation of neighbouring parts
UPPER = 0.9
WINSOR = 0.95  # quantile to which rarer, longer own times are cut before averaging
PAUSES = 2  # of the longest of a window, that say nothing by themselves


def before_wait(
    arrival: I64, previous: I64, previous_duration: F64, stride: I64 | int
) -> npt.NDArray[np.float32]:
    """Gap from the previous operation (ns), its duration (0 if unknown) taken off.

    With a sampling stride s the gap spans s operations of which one is known: (gap / s) minus that
    one's duration, right in the mean if it is typical.
    """
    return np.maximum((arrival - previous) / stride - previous_duration, 0.0).astype(np.float32)


def after_wait(gap: F32, wait: F32, has_previous: npt.NDArray[np.bool_]) -> F32:
    """Take the previous operation's wait off where there is one to take off; at least 0."""
    return np.maximum(gap - np.where(has_previous, wait, np.float32(0)), np.float32(0))


def medians(own: F32) -> tuple[F64, F64, F64, I64]:
    """-> (median, winsorised mean, upper quantile, count) over the last axis, NaN ignored.

    The mean and the quantile see what the median cannot, a rank that is slow every fifth or tenth
    time; the cut keeps long pauses from deciding the mean: two at least, or of twenty own times the
    longest would count in full.
    """
    ordered = np.sort(own, axis=-1)
    count = own.shape[-1] - np.isnan(ordered).sum(axis=-1)
    some = np.maximum(count, 1)

    def at(index: I64) -> F64:
        return np.take_along_axis(ordered, index[..., None], axis=-1)[..., 0].astype(np.float64)

    median = (at((some - 1) // 2) + at(some // 2)) / 2
    last = np.where(some >= straggler.MIN_SAMPLES, some - 1 - PAUSES, some - 1)
    upper = at(np.minimum((some * UPPER).astype(np.int64), last))
    cut = at(np.minimum((some * WINSOR).astype(np.int64), last))
    # The cut is at most the last number, so np.fmin also turns NaN into it: taken off again.
    filled = np.fmin(ordered, cut[..., None].astype(np.float32)).sum(axis=-1, dtype=np.float64)
    mean = (filled - cut * (own.shape[-1] - count)) / some
    for value in (median, mean, upper):
        value[count == 0] = np.nan
    return median, mean, upper, count


def noise(own: F32) -> tuple[F64, F64]:
    """[rank, group, instance in order of time] -> [group] standard error of a rank's median, and
    how many independent values stand behind it. 0, 0 where the window has too few instances.

    From how the medians of the window's parts change for each rank against the others: what all
    have in common (another batch size) is no noise. Neighbouring parts may go up and down together:
    the spread is that of parts further apart, and what they have in common makes the median of the
    window by so much less certain.
    """
    ranks, groups, width = own.shape
    if width < PARTS * LEAST_A_PART or ranks < 2:
        return np.zeros(groups), np.zeros(groups)
    parts = straggler.middle(own.reshape(ranks, groups, PARTS, width // PARTS))
    apart = parts - straggler.middle(np.moveaxis(parts, 0, -1))
    with np.errstate(invalid="ignore", divide="ignore"):
        # Of each rank, then the middle one: the step of a rank that becomes slow is no noise.
        moved = [
            straggler.middle(_mean_square(apart[..., lag:] - apart[..., :-lag]).T)
            for lag in PART_LAGS
        ]
        change = np.nan_to_num(np.sqrt(np.array(moved) / 2), nan=0.0)  # [lag, group]
        most = change.max(axis=0)
        # Few parts of few ranks differ by chance: only what is beyond that is shared.
        chance = 1.0 / np.sqrt(ranks - 1)
        shared = np.nan_to_num(1 - (1 + chance) * (change[0] / most) ** 2, nan=0.0)
    shared = np.clip(shared, 0.0, MOST_SHARED)
    fewer = (1 + shared) / (1 - shared)  # a part counts for so much less than one
    filled = np.maximum(np.isfinite(parts).sum(axis=-1).max(axis=0), 1)
    error = most * np.sqrt(ranks / (ranks - 1) * fewer / filled)
    return error, np.full(groups, 0.7 * (ranks - 1) * (PARTS - 1))


def _mean_square(x: F64) -> F64:
    """Over the last axis, NaN ignored; NaN where all are."""
    known = ~np.isnan(x)
    total: F64 = (np.where(known, x, 0.0) ** 2).sum(axis=-1)
    number = known.sum(axis=-1)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
