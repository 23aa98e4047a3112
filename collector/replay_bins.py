"""Sums of vectors by time, in bounded memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

MOST_BINS = 480


class Binned:
    """Sums of vectors by time; bins double in width when there are more than `most`."""

    def __init__(self, most: int = MOST_BINS) -> None:
        self._most = most
        self.width = 1  # seconds
        self._bins: dict[int, F64] = {}

    def add(self, seconds: float, values: F64) -> None:
        """`seconds`: since the start of the recording."""
        while seconds / self.width >= self._most:
            self._double()
        number = int(seconds // self.width)
        have = self._bins.get(number)
        self._bins[number] = values.copy() if have is None else add(have, values)

    def spread(self, begin: float, end: float, values: F64) -> None:
        """Evenly over the time from `begin` to `end`."""
        at = begin
        while at < end:
            upto = min(end, (at // self.width + 1) * self.width)
            self.add(at, values * ((upto - at) / (end - begin)))
            at = upto
        if end <= begin:
            self.add(max(end - 1e-6, 0.0), values)

    def _double(self) -> None:
        self.width *= 2
        merged: dict[int, F64] = {}
        for number, values in self._bins.items():
            have = merged.get(number // 2)
            merged[number // 2] = values if have is None else add(have, values)
        self._bins = merged

    def numbers(self) -> list[int]:
        return sorted(self._bins)

    def at(self, number: int) -> F64:
        return self._bins[number]

    def matrix(self) -> F64:
        """[component, bin]; NaN in bins without values."""
        if not self._bins:
            return np.zeros((0, 0))
        longest = max(len(v) for v in self._bins.values())
        matrix = np.full((longest, max(self._bins) + 1), np.nan)
        for number, values in self._bins.items():
            matrix[: len(values), number] = values
        return matrix


def add(a: F64, b: F64) -> F64:
    """The sum of two vectors; the shorter one ends in zeros."""
    if len(a) < len(b):
        a, b = b, a
    total = a.copy()
    total[: len(b)] += b
    return total
