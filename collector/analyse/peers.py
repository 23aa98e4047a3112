"""Which ranks are compared with which, and their medians without the rank itself.

A *group* holds the members whose own times should be alike: those of one role in a communicator,
or, where these are too few, those of the same role in the workload's communicators of one kind
(see `roles`). Groups of about the same size are worked off at once, padded with NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

CHUNK = 1 << 21  # cells


class Groups:
    """Rows 0 .. M-1 in groups; values are [S, M], any number S of statistics at once."""

    def __init__(self, group: I64) -> None:
        """group: [M] any number that names the row's group, kept as `of`."""
        self.rows = len(group)
        self.of = group
        order = np.argsort(group, kind="stable")
        _, start, count = np.unique(group[order], return_index=True, return_counts=True)
        self._parts: list[tuple[I64, Bool]] = []  # row numbers [G, width] and which are real
        width = 1 << np.ceil(np.log2(np.maximum(count, 1))).astype(np.int64)
        for padded in np.unique(width).tolist():
            chosen = np.flatnonzero(width == padded)
            step = max(1, CHUNK // (padded * min(padded, straggler.EXACT_RANKS)))
            for at in range(0, len(chosen), step):
                part = chosen[at : at + step]
                offset = np.arange(padded)
                real = offset < count[part, None]
                index = order[np.where(real, start[part, None] + offset, 0)]
                self._parts.append((index, real))

    def _padded(self, values: F64, index: I64, real: Bool) -> F64:
        """[S, M] -> [S * G, width]"""
        table = values[:, index]
        table[:, ~real] = np.nan
        return table.reshape(-1, index.shape[1])

    def spread(self, values: F64) -> tuple[F64, I64]:
        """-> (MAD, number) of each row's peers, [S, M]; NaN below one peer."""
        return self._of_peers(values, straggler.spread)

    def center(self, values: F64) -> tuple[F64, I64]:
        """-> (median, number) of each row's peers, [S, M]."""
        return self._of_peers(values, straggler.center)

    def _of_peers(self, values: F64, measure: Callable[[F64], tuple[F64, I64]]) -> tuple[F64, I64]:
        found = np.full(values.shape, np.nan)
        peers = np.zeros(values.shape, np.int64)
        for index, real in self._parts:
            shape, rows = (len(values), *index.shape), index[real]
            parts = measure(self._padded(values, index, real))
            for out, part in zip((found, peers), parts, strict=True):
                out[:, rows] = part.reshape(shape)[:, real]
        return found, peers

    def median(self, values: F64) -> F64:
        """-> [S, M] median of each row's whole group, NaN ignored."""
        out = np.full(values.shape, np.nan)
        for index, real in self._parts:
            padded = self._padded(values, index, real)
            middle = straggler.middle(padded).reshape(len(values), -1, 1)
            out[:, index[real]] = np.broadcast_to(middle, (len(values), *index.shape))[:, real]
        return out

    def count(self, chosen: Bool) -> I64:
        """[M] -> how many of each row's group are chosen."""
        out = np.zeros(self.rows, np.int64)
        for index, real in self._parts:
            number = (chosen[index] & real).sum(axis=1, keepdims=True)
            out[index[real]] = np.broadcast_to(number, index.shape)[real]
        return out
