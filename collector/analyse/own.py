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

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

PARTS = 8  # of a window, to see how much its ranks' medians change in it
LEAST_A_PART = 8
CORRELATED = 1.5  # standard errors are larger where neighbouring parts go up and down together
WINSOR = 0.95  # quantile to which rarer, longer own times are cut before averaging


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


def medians(own: F32) -> tuple[F64, F64, I64]:
    """-> (median, winsorised mean, count) over the last axis, NaN ignored.

    The mean sees what the median cannot, a rank that is slow every tenth time; the cut keeps one
    long pause from deciding it.
    """
    ordered = np.sort(own, axis=-1)
    count = own.shape[-1] - np.isnan(ordered).sum(axis=-1)
    some = np.maximum(count, 1)

    def at(index: I64) -> F64:
        return np.take_along_axis(ordered, index[..., None], axis=-1)[..., 0].astype(np.float64)

    median = (at((some - 1) // 2) + at(some // 2)) / 2
    cut = at(np.minimum((some * WINSOR).astype(np.int64), some - 1))
    # The cut is at most the last number, so np.fmin also turns NaN into it: taken off again.
    filled = np.fmin(ordered, cut[..., None].astype(np.float32)).sum(axis=-1, dtype=np.float64)
    mean = (filled - cut * (own.shape[-1] - count)) / some
    median[count == 0] = np.nan
    mean[count == 0] = np.nan
    return median, mean, count


def noise(own: F32) -> F64:
    """[rank, group, instance in order of time] -> [group] standard error of a rank's median.

    From how the medians of the window's parts change for each rank against the others: what all
    have in common (another batch size) is no noise. 0 where the window has too few instances.
    """
    ranks, groups, width = own.shape
    if width < PARTS * LEAST_A_PART or ranks < 3:
        return np.zeros(groups)
    parts = _middle(own.reshape(ranks, groups, PARTS, width // PARTS))
    apart = parts - _middle(np.moveaxis(parts, 0, -1))
    spread = _middle(np.abs(apart - _middle(apart)[..., None]))  # [rank, group]
    filled = np.maximum(np.isfinite(parts).sum(axis=-1).max(axis=0), 1)
    error = CORRELATED * 1.4826 * _middle(spread.T) / np.sqrt(filled)
    known: F64 = np.nan_to_num(error, nan=0.0)
    return known


def _middle(x: F32 | F64) -> F64:
    """Median over the last axis, NaN ignored; NaN where all are."""
    ordered = np.sort(x, axis=-1)
    count = np.maximum(x.shape[-1] - np.isnan(ordered).sum(axis=-1), 1)[..., None]
    low = np.take_along_axis(ordered, (count - 1) // 2, axis=-1).astype(np.float64)
    high = np.take_along_axis(ordered, count // 2, axis=-1).astype(np.float64)
    middle: F64 = ((low + high) / 2)[..., 0]
    return middle
