"""Barrier waits of aligned instances.

Arrays are [rank, instance]; NaN marks a rank whose event is missing. Formulas: the wait is
w_r = max_q a_q - a_r from arrivals, or w_r = d_r - min_q d_q from durations that include the
waiting (no clock needed: the late rank has the smallest duration). Both hold for symmetric
operations only; which those are is in `ops`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MIN_COVERAGE = 0.8  # of the ranks must be in, or an instance is not scored


def from_durations(durations: F64) -> F64:
    """w_r = d_r - min_q d_q; a lower bound where ranks are missing. All-NaN columns stay NaN."""
    shortest: F64 = np.fmin.reduce(durations, axis=0)
    return durations - shortest


def from_arrivals(arrivals: F64) -> F64:
    """w_r = max_q a_q - a_r; a lower bound where ranks are missing."""
    last: F64 = np.fmax.reduce(arrivals, axis=0)
    return last - arrivals


def last_two(lateness: F64) -> tuple[I64, F64]:
    """Who came last in each instance, and by how much: -> (rank, last - second last).

    `lateness` grows with lateness: arrivals, or negated durations. With fewer than two ranks
    present the margin is NaN.
    """
    x = np.where(np.isnan(lateness), -np.inf, lateness)
    columns = np.arange(x.shape[1])
    last = x.argmax(axis=0)
    first_value = x[last, columns]
    x[last, columns] = -np.inf
    with np.errstate(invalid="ignore"):
        margin = first_value - x.max(axis=0)
    margin[~np.isfinite(margin)] = np.nan
    return last, margin


def suppress_clock_error(waits: F64, last: I64, node: I64, error: F64) -> F64:
    """Zero the waits that the clocks' error could explain.

    `node` and `error` are [rank, 1] or [rank, instance]: whose clock an arrival was read from, and
    how wrong it may be (ns). Two ranks on one node share a clock: nothing is taken off there.
    A wait under twice the pair's error bound says nothing, so it is not counted.
    """
    node = np.broadcast_to(node, waits.shape)
    error = np.broadcast_to(error, waits.shape)
    columns = np.arange(waits.shape[1])
    bound = np.where(node == node[last, columns], 0.0, error + error[last, columns])
    return np.where(waits < 2 * bound, 0.0, waits)


def covered(present: I64, ranks: int) -> Bool:
    """Whether enough ranks of each instance are in to score it."""
    return present >= max(2, MIN_COVERAGE * ranks)
