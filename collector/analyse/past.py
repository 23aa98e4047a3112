"""What each member's own time was in earlier windows, and how it moves from one to the next.

Kept of every window that was judged: the logarithm of the own time over the median of the peers
(over the other rank's in a pair), and the logarithm of the own time itself. From the changes of the
former between windows comes its noise, whatever correlation the own times have: the spread of
windows far apart, and how much of it neighbours have in common.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler
from lanterne.collector.analyse.peers import Groups

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

STATISTICS = 3  # median, mean, upper quantile
KEPT = 32  # windows
LAGS = (1, 3, 7)
FEW = 8  # ranks
NEWEST_FOR_NOISE = 24
KEEP, OF_KEPT = 0.8, 0.4377  # share of the squares kept, the smallest; their mean for N(0, 1)
# From so few squares (one and more) the middle rank's variance comes out so many times too large,
# for normal changes; beyond that by this over their number.
TOO_LARGE, AND_BEYOND = np.array([1.0, 1.04, 1.32, 1.28, 1.16, 1.04, 1.08, 1.09, 1.08]), 0.5
WORTH = 0.55  # values that one such square stands for
WITHIN_WINDOWS = 16  # over which the noise within windows is averaged
LEAST_REFERENCE = 3  # windows
ENOUGH_REFERENCE = 12  # fewer do not replace more
MOST_REFERENCE = 20


class Past:
    """Rings of the last windows, newest first: [member, statistic, window], NaN where unused."""

    def __init__(self, members: int) -> None:
        # Members are set by `forget` when they are given: until then their memory is not touched.
        self._apart = np.zeros((members, STATISTICS, KEPT), np.float32)
        self._own = np.zeros((members, STATISTICS, KEPT), np.float32)
        self._usual = np.zeros((members, STATISTICS, 2), np.float32)
        self._square = np.zeros((members, len(LAGS), STATISTICS), np.float32)  # where few
        self._usual_windows = np.zeros(members, np.int32)  # that it was told from
        self._square_windows = np.zeros(members, np.int32)  # that it was told from
        self._within = np.zeros(members)  # mean square
        self._within_windows = np.zeros(members, np.int32)
        self._calm = np.zeros(members, np.int32)  # windows in a row

    def forget(self, members: I64 | slice) -> None:
        self._apart[members] = self._own[members] = self._usual[members] = np.nan
        self._square[members] = np.nan
        self._usual_windows[members] = self._square_windows[members] = 0
        self._within[members] = self._within_windows[members] = self._calm[members] = 0

    def push(self, members: I64, apart: F64, own: F64) -> None:
        """Add a window; apart, own: [statistic, row of `members`] logarithms, NaN unknown."""
        for ring, value in ((self._apart, apart), (self._own, own)):
            past = ring[members]
            past[:, :, 1:] = past[:, :, :-1].copy()
            past[:, :, 0] = value.T
            ring[members] = past

    def windows(self, members: I64) -> I64:
        """[row] windows of which the median is known."""
        known: I64 = KEPT - np.isnan(self._apart[members, 0]).sum(axis=-1)
        return known

    def last(self, members: I64, count: int) -> tuple[F64, F64]:
        """(apart, own) [statistic, row] over the last `count` windows; NaN where one is missing.

        The least of two; the mean of more without the highest and lowest fifth: one long pause
        cannot raise either.
        """
        return (
            _over(self._apart[members, :, :count]).T,
            _over(self._own[members, :, :count]).T,
        )

    def singly(self, members: I64, count: int) -> F32:
        """[row, statistic, window] apart, of the last `count` windows."""
        return self._apart[members, :, :count]

    def within(self, members: I64, error: F64, freedom: F64) -> tuple[F64, F64]:
        """Average the relative errors of medians, told from within each window -> (error, degrees
        of freedom) [row].
        """
        known = np.flatnonzero(error > 0)
        some = members[known]
        self._within_windows[some] = np.minimum(self._within_windows[some] + 1, WITHIN_WINDOWS)
        count, before = self._within_windows[some], self._within[some]
        # In a window in which a rank becomes slow, two ranks look restless.
        square = np.where(count > 2, np.minimum(error[known] ** 2, 4 * before), error[known] ** 2)
        self._within[some] += (square - before) / np.maximum(count, 1)
        return np.sqrt(self._within[members]), freedom * self._within_windows[members]

    def noise(self, members: I64, groups: Groups, steady: Bool) -> tuple[F64, F64, F64]:
        """-> (standard deviation of `apart` in one window, correlation of neighbouring windows)
        [statistic, row], of the row's group; and how many values stand behind it, [row].

        steady: [row] False where it has become slower or faster in these windows. That is no noise:
        left out while half of the group remain.
        """
        square = _squares(self._apart[members, :, :NEWEST_FOR_NOISE])
        size = groups.count(np.ones(groups.rows, bool))
        steadies = groups.count(steady)
        enough = 2 * steadies >= size
        square[:, :, ~steady & enough] = np.nan
        # Of a few ranks, all see the step of one or two: there it counts what was seen in calm.
        pairs = np.maximum(self.windows(members) - 1, 0).clip(0, NEWEST_FOR_NOISE)
        few = np.flatnonzero((size < FEW) & (self._square_windows[members] > 0))
        if len(few):
            pairs[few] = self._square_windows[members[few]] - 1
            learnt = self._square[members[few]].transpose(1, 2, 0).astype(np.float64)
            square[:, :, few] = np.where(np.isnan(learnt[0]), square[:, :, few], learnt)
        square = np.nan_to_num([groups.median(s) for s in square], nan=0.0)
        most = square.max(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            shared = np.nan_to_num(1 - square[0] / most, nan=0.0).clip(0.0, 0.95)
        told = np.where(enough, steadies, size)
        return np.sqrt(most), shared, WORTH * pairs * np.maximum(told - 1, 1)

    def usual(self, members: I64) -> tuple[F64, F64]:
        """(apart, own) [statistic, row] as they usually are; NaN while too little is known."""
        kept = self._usual[members]
        return kept[:, :, 0].T.astype(np.float64), kept[:, :, 1].T.astype(np.float64)

    def usual_windows(self, members: I64) -> I64:
        """[row] how many windows tell what is usual."""
        return self._usual_windows[members].astype(np.int64)

    def learn(self, members: I64, calm: Bool, small: Bool) -> None:
        """Renew what is usual, from windows in a row in which nothing spoke against a member.

        calm: [row] whether nothing does in this one. small: whether its group has less than FEW
        ranks. The newest windows are left out, as many as
        the tests look at: they may be the first ones of a fault.
        """
        since = np.where(calm, self._calm[members] + 1, 0)
        self._calm[members] = since
        for newest, low, high in ((2, 0, 10), (5, 10, 17), (12, 17, 1 << 30)):
            rows = (since >= max(low, newest + LEAST_REFERENCE)) & (since < high)
            some = members[rows]
            if not len(some):
                continue
            old = slice(newest, newest + MOST_REFERENCE)
            before = np.arange(newest, newest + MOST_REFERENCE) >= since[rows, None, None]
            apart, own = self._apart[some, :, old], self._own[some, :, old]
            before = before[..., : apart.shape[-1]]
            apart, own = (np.where(before, np.float32(np.nan), x) for x in (apart, own))
            count = (~np.isnan(apart)).sum(axis=-1)
            known = count[:, 0]
            more = known >= np.minimum(self._usual_windows[some], ENOUGH_REFERENCE)
            # Of the own time a low quantile: what it is while there is little to do.
            for i, value in enumerate((straggler.middle(apart), _quarter(own))):
                value[count < LEAST_REFERENCE] = np.nan
                self._usual[some[more], :, i] = value[more]
            self._usual_windows[some[more]] = known[more]
            enough = np.minimum(self._square_windows[some], ENOUGH_REFERENCE)
            those = np.flatnonzero(small[rows] & (known >= np.maximum(enough, LEAST_REFERENCE)))
            if len(those):
                self._square[some[those]] = _squares(apart[those]).transpose(2, 0, 1)
                self._square_windows[some[those]] = known[those]


def _over(windows: F32) -> F64:
    """[row, statistic, window] -> [row, statistic]"""
    if windows.shape[-1] <= 2:
        least: F64 = np.minimum.reduce(windows, axis=-1).astype(np.float64)
        return least
    ordered = np.sort(windows, axis=-1)
    cut = windows.shape[-1] // 5
    value: F64 = ordered[..., cut : windows.shape[-1] - cut].mean(axis=-1, dtype=np.float64)
    value[np.isnan(windows).any(axis=-1)] = np.nan
    return value


def _quarter(windows: F32) -> F64:
    """Lower quartile over the last axis, NaN ignored."""
    ordered = np.sort(windows, axis=-1)
    count = windows.shape[-1] - np.isnan(ordered).sum(axis=-1, keepdims=True)
    value = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 4, axis=-1)[..., 0]
    return value.astype(np.float64)


def _squares(ring: F32) -> F64:
    """[row, statistic, window] -> [lag, statistic, row] half the mean square of the changes."""
    shape = (len(LAGS), *ring.shape[1::-1])
    found, number = np.full(shape, np.nan), np.zeros(shape, np.int64)
    for at, lag in enumerate(LAGS):
        if lag < ring.shape[-1]:
            moved = ring[:, :, lag:] - ring[:, :, :-lag]
            found[at] = _small_squares(moved).T / 2
            number[at] = (~np.isnan(moved)).sum(axis=-1).T
    # Before windows far apart are known, so is not how alike neighbours are: rather too much then.
    known = ~np.isnan(found[-1])
    found[:, known] /= _too_large(number[:, known])
    return found


def _small_squares(x: F32) -> F64:
    """Variance over the last axis, from the smaller squares: a single step does not count."""
    ordered = np.sort(x.astype(np.float64) ** 2, axis=-1)  # NaN last
    count = x.shape[-1] - np.isnan(ordered).sum(axis=-1)
    kept = KEEP * count
    # The last of them in part: whole ones alone would be up to twice too much where few are known.
    part = np.clip(kept[..., None] - np.arange(x.shape[-1]), 0.0, 1.0)
    total = (np.where(np.isnan(ordered), 0.0, ordered) * part).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance: F64 = total / kept / OF_KEPT
    return variance


def _too_large(count: I64) -> F64:
    few = TOO_LARGE[np.minimum(count, len(TOO_LARGE) - 1)]
    found: F64 = np.where(count < len(TOO_LARGE), few, 1 + AND_BEYOND / np.maximum(count, 1))
    return found
