"""Ranks that get slower over minutes and hours, against the best that they were.

What is usual (`past`) follows a change that is slow enough. Here the excess over the peers is
kept for hours, one figure a block of windows; the reference is the fifth of the blocks in which the
rank was fastest.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler
from lanterne.collector.analyse.past import Past
from lanterne.collector.analyse.peers import Groups
from lanterne.collector.analyse.suspects import DRIFT, Suspects

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BLOCK = 24  # windows: two minutes
BLOCKS = 96  # three hours
LEAST_BLOCKS = 8
BEST = 0.2  # quantile
LAST = 12  # windows that make a block's figure
SETTLED = 4.0  # standard deviations of the blocks, in two blocks in a row


class Drift:
    """[member, block] newest first, NaN unused: of the excess, and of the own time itself."""

    def __init__(self, members: int) -> None:
        # Set by `forget`, as in `past`.
        self._apart = np.zeros((members, BLOCKS), np.float32)
        self._own = np.zeros((members, BLOCKS), np.float32)
        self._windows = 0
        self._over = np.zeros(members, np.int32)  # blocks in a row beyond the threshold

    def forget(self, members: I64 | slice) -> None:
        self._apart[members] = self._own[members] = np.nan
        self._over[members] = 0

    def add(self, found: Suspects, members: I64, groups: Groups, past: Past, peers: I64) -> None:
        """Count a window; at the end of a block, suspect those that have drifted."""
        self._windows += 1
        if self._windows % BLOCK == 0:
            self._close(members, groups, past)
        drifted = (self._over[members] >= 2) & (peers >= 1)
        if drifted.any():
            best, now = _best(self._apart[members]), self._apart[members, 0].astype(np.float64)
            rise = now - best
            found.add(drifted[None], DRIFT, LAST, rise[None], np.ones((1, len(members))))

    def _close(self, members: I64, groups: Groups, past: Past) -> None:
        apart, own = past.last(members, LAST)
        for ring, value in ((self._apart, apart[0]), (self._own, own[0])):
            blocks = ring[members]
            blocks[:, 1:] = blocks[:, :-1].copy()
            blocks[:, 0] = value
            ring[members] = blocks
        blocks = self._apart[members]
        moved = straggler.middle(np.abs(blocks[:, 3:] - blocks[:, :-3]))
        noise = groups.median(moved[None])[0] * 1.4826 / np.sqrt(2)
        best, own_blocks = _best(blocks), self._own[members]
        with np.errstate(invalid="ignore"):
            rise = blocks[:, 0] - best
            over = rise >= np.maximum(math.log(straggler.RATIO), SETTLED * noise)
            over &= own_blocks[:, 0] - _best(own_blocks) >= rise / 2
        over &= (~np.isnan(blocks)).sum(axis=1) >= LEAST_BLOCKS
        self._over[members] = np.where(over, self._over[members] + 1, 0)


def _best(blocks: npt.NDArray[np.float32]) -> F64:
    """[row] the low quantile of a row's older blocks."""
    ordered = np.sort(blocks[:, 2:], axis=1)
    count = (~np.isnan(ordered)).sum(axis=1)
    at = np.clip((count * BEST).astype(np.int64), 0, ordered.shape[1] - 1)
    best: F64 = np.take_along_axis(ordered, at[:, None], axis=1)[:, 0].astype(np.float64)
    return best
