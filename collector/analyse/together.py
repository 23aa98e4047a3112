"""Whose excess is no noise, where many ranks of a group stand out at once.

The limit for one rank is so high that none of thousands passes it by chance. Where k ranks of a
group of n stand out, k times the probability per rank is as safe (the step-up procedure of
Benjamini and Hochberg, 1995): without a slow rank the chance of any name is what it was, and of
those named the expected share of wrong ones is n times the probability of the limit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

LEAST = 0.8  # of the limit, which 160 at once would need; more do not lower it further


def beyond(ratio: F64, group: I64, many: Bool) -> Bool:
    """ratio: [statistic, row] excess over the limit for one, NaN unknown. group: [row] number.
    many: [row] whether there are enough peers to count on -> [statistic, row]
    """
    with np.errstate(invalid="ignore"):
        found = ratio >= 1
        near = (ratio >= LEAST) & many
    for statistic in np.flatnonzero(near.sum(axis=1) > 1).tolist():
        rows = np.flatnonzero(near[statistic])
        value = ratio[statistic, rows]
        order = np.lexsort((-value, group[rows]))
        rows, value = rows[order], value[order]
        _, start, count = np.unique(group[rows], return_index=True, return_counts=True)
        place = np.arange(1, len(rows) + 1) - np.repeat(start, count)
        last = np.maximum.reduceat(np.where(value >= needed(place), place, 0), start)
        found[statistic, rows] = place <= np.repeat(last, count)
    return found


def needed(place: I64) -> F64:
    """Share of the limit that the k-th largest needs: where a normal variable has k times the
    limit's probability (the tail's leading term). A wider distribution would need less.
    """
    share: F64 = np.sqrt(np.maximum(1 - 2 * np.log(place) / straggler.LIMIT**2, 0.0))
    return share
