"""Blame: the time that would come back if one rank alone were fixed.

For each instance, last arrival minus second-last arrival, charged to the rank that came last. The
sum over ranks is at most the observed time, because each instance charges one rank an interval in
which everyone else was waiting. A rank that came last because another group had held it up is a
victim: there the charge is limited to what its own time exceeds the second-last rank's by.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def charge(margin: F64, last: I64, own: F64, foreign: Bool) -> F64:
    """-> blame of each instance (ns), charged to `last`; NaN where the margin is NaN.

    margin, last: [instance], from `waits.last_two`. own: [rank, instance] ns, NaN unknown.
    foreign: [instance], whether the last rank's previous operation was in another group.
    """
    blame = margin.copy()
    columns = np.flatnonzero(foreign & np.isfinite(margin))
    if len(columns):
        part = own[:, columns]
        mine = part[last[columns], np.arange(len(columns))]
        part = part.copy()
        part[last[columns], np.arange(len(columns))] = np.nan
        with np.errstate(invalid="ignore"):
            others = np.fmax.reduce(part, axis=0)
        excess = np.clip(mine - others, 0.0, margin[columns])
        # Own time unknown: whose delay it was cannot be known, so nobody is charged.
        blame[columns] = np.nan_to_num(excess, nan=0.0)
    return blame
