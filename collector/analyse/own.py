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
