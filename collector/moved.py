"""Cells that tables have left as they were widened, and what names cells.

The cell of a process's previous operation, whose wait is taken off the own time before the next
one, is known by its number. Pure: no IO, no clock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class Moved:
    """add() for each table that left its cells, then rename() every column of cell numbers."""

    def __init__(self) -> None:
        self._low: list[int] = []
        self._to: list[I64] = []

    def __bool__(self) -> bool:
        return bool(self._low)

    def add(self, low: int, to: I64) -> None:
        """to: [cell - low] where what was there is now; -1: nowhere. Tables have been apart."""
        self._low.append(low)
        self._to.append(to)

    def rename(self, names: npt.NDArray[np.integer]) -> I64:
        """In place, all tables at once -> indices of the names of what is nowhere, now -1."""
        order = np.argsort(self._low)
        low = np.array(self._low, np.int64)[order]
        to = [self._to[i] for i in order]
        size = np.array([len(part) for part in to], np.int64)
        found = np.flatnonzero((names >= low[0]) & (names < low[-1] + size[-1]))
        of = np.searchsorted(low, names[found], side="right") - 1
        offset = names[found] - low[of]
        inside = offset < size[of]
        found, of, offset = found[inside], of[inside], offset[inside]
        renamed = np.concatenate(to)[(np.cumsum(size) - size)[of] + offset]
        names[found] = renamed
        gone: I64 = found[renamed < 0]
        return gone
