"""Which ranks look slow at the end of a window, by which comparison, and how clearly.

Every test is made for three statistics of the own times (median, mean, upper quantile) and over the
last 2, 5, 8 and 12 windows. A rank is suspected where its excess is large (the ratio), outside its
peers' spread (the score of `straggler`) and outside the noise over so many windows (`past`), which
may be less where many ranks stand out at once (`together`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import straggler, together
from lanterne.collector.analyse.past import LAGS, STATISTICS, Past
from lanterne.collector.analyse.peers import Groups

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NO_METHOD, PEERS, OWN_HISTORY, INTERMITTENT, DRIFT = range(5)  # snapshot.METHODS

HORIZONS = (2, 5, 8, 12)  # windows
NOISIER = np.array([1.0, 1.0, 1.4])[:, None]  # of each statistic, beside a median's
RARER = np.array([1.0, 1.0, 1.05])[:, None]  # an upper quantile is far out more often than others
ALIKE = 0.5  # correlation of neighbouring windows, where it is not known at all
MIDDLE_COSTS = 1.05  # standard deviation of the middle windows' mean over that of all
MEDIAN_COSTS = np.pi / 2  # variance of a median over that of a mean
HITS, STRETCHES, LATELY, OF_WINDOWS = 4, 3, 4, 12
ENOUGH_PEERS = 15
SCORE_LONG = 6.0  # for less than the full ratio: ranks differ by some per cent for good
UNKNOWN = 1e6  # no excess is beyond a noise that is not known
CROWD = 0.25  # of a group: so many leave what is usual for them at once because of their work


@dataclass
class Suspects:
    """One entry a row; unset where not suspected."""

    suspected: Bool
    method: I64
    statistic: I64
    excess: F64  # logarithm of the ratio that led to it
    margin: F64  # the excess over what the noise allows; at least 1
    horizon: I64

    @classmethod
    def none(cls, rows: int) -> Suspects:
        return cls(
            suspected=np.zeros(rows, bool),
            method=np.zeros(rows, np.int64),
            statistic=np.zeros(rows, np.int64),
            excess=np.full(rows, np.nan),
            margin=np.zeros(rows),
            horizon=np.full(rows, HORIZONS[0]),
        )

    def add(self, found: Bool, method: int, horizon: int, excess: F64, margin: F64) -> None:
        """found, excess, margin: [statistic, row]. What was found first stays, but where a better
        known statistic finds it too."""
        for statistic in range(len(found)):
            kind = method if statistic == 0 else INTERMITTENT
            fresh = found[statistic] & ~self.suspected
            self.method[fresh], self.statistic[fresh] = kind, statistic
            self.excess[fresh] = excess[statistic, fresh]
            self.margin[fresh] = margin[statistic, fresh]
            self.horizon[fresh] = horizon
            self.suspected |= fresh


@dataclass(frozen=True)
class Noise:
    one: F64  # [statistic, row] standard deviation in one window
    shared: F64  # correlation of neighbouring windows
    limit: F64  # [row]

    def allowed(self, windows: int) -> F64:
        """[statistic, row] excess over so many windows that could still be noise."""
        factor = 1.0 if windows <= 2 else MIDDLE_COSTS
        with np.errstate(invalid="ignore"):
            found = self.limit * self.one * factor * straggler.shrink(self.shared, windows)
        return np.fmin(np.nan_to_num(found, nan=UNKNOWN), UNKNOWN)


def noise_of(
    past: Past, members: I64, groups: Groups, steady: Bool, error: F64, freedom: F64
) -> Noise:
    """steady: see `Past.noise`. error, freedom: [row] relative standard error of a median within
    the window, see `own`.
    """
    within, freedom = past.within(members, error, freedom)
    between, shared, pairs = past.noise(members, groups, steady)
    # A job of few steps that begins: what the first windows differ by is less than it will be.
    begins = (past.windows(members) <= LAGS[1]) & (within <= 0)
    shared[:, begins] = ALIKE
    between[:, begins] /= math.sqrt(1 - ALIKE)
    one = np.maximum(between, within * NOISIER) * RARER
    return Noise(one, shared, straggler.limit(pairs + freedom))


def examine(
    past: Past,
    members: I64,
    groups: Groups,
    peers: I64,
    noise: Noise,
    elsewhere: Bool,
    since: I64,
) -> Suspects:
    """peers: [row] how many the row is compared with. elsewhere: [statistic, row] whether it is
    also slower than ranks of the same role in other communicators. since: [row] windows after its
    last verdict has ended: what led to that one is over, and names nobody again.
    """
    found = Suspects.none(len(members))
    usual, usual_own = past.usual(members)
    newest, _ = past.last(members, 1)
    # What is usual is not known exactly either: its variance, beside that of a window.
    unsure = MEDIAN_COSTS / np.maximum(past.usual_windows(members), 1)
    unsure = np.minimum(unsure * (1 + noise.shared) / (1 - noise.shared), 1.0)
    for horizon in HORIZONS:
        apart, own = past.last(members, horizon)
        apart[:, since < horizon] = np.nan
        least = math.log(straggler.RATIO if horizon == HORIZONS[0] else straggler.RATIO_LONG)
        allowed = noise.allowed(horizon)
        # How much a few peers differ for good is not known: less than the full ratio may be that.
        of_peers = np.where(peers >= ENOUGH_PEERS, least, math.log(straggler.RATIO))
        with np.errstate(invalid="ignore", divide="ignore"):
            still = newest >= least  # or it is over
            by_peers = still & ((peers >= 2) | elsewhere) & (apart >= of_peers)
            by_peers &= together.beyond(apart / allowed, groups.of, peers >= ENOUGH_PEERS)
            if by_peers.any():
                full = apart >= math.log(straggler.RATIO)
                spread = groups.spread(apart)
                by_peers &= np.where(
                    full,
                    outside(apart, spread, straggler.SCORE, straggler.FLOOR),
                    outside(apart, spread, SCORE_LONG, straggler.FLOOR / 2),
                )
                # Half of them and more are not slow, they do something else.
                half = 2 * groups.count(_any(by_peers)) >= peers + 1
                by_peers &= ~half | elsewhere
                found.add(by_peers, PEERS, horizon, apart, apart / allowed)
            rise = apart - usual
            beside = np.sqrt(allowed**2 + unsure * noise.allowed(1) ** 2)
            by_history = (newest - usual >= least) & (rise >= least)
            by_history &= together.beyond(rise / beside, groups.of, peers >= ENOUGH_PEERS)
            by_history &= own - usual_own >= rise / 2  # or it is the peers that got faster
            if by_history.any():
                spread = groups.spread(rise)
                by_history &= outside(rise, spread, straggler.SCORE, straggler.FLOOR)
                crowd = groups.count(_any(by_history)) > np.maximum(2, CROWD * (peers + 1))
                by_history &= ~crowd | (horizon == HORIZONS[-1])
                found.add(by_history, OWN_HISTORY, horizon, rise, rise / beside)
    _now_and_then(found, past, members, peers, noise, usual, since)
    return found


def _any(found: Bool) -> Bool:
    some: Bool = np.logical_or.reduce(found, axis=0)
    return some


def outside(excess: F64, spread: tuple[F64, I64], score: float, floor: float) -> Bool:
    """[statistic, row] whether the excess is outside what the peers differ by (Groups.spread)."""
    mad, peers = spread
    scale = np.maximum(1.4826 * np.where(peers >= 2, mad, 0.0), floor)
    outside: Bool = excess >= score * scale
    return outside


def _now_and_then(
    found: Suspects,
    past: Past,
    members: I64,
    peers: I64,
    noise: Noise,
    usual: F64,
    since: I64,
) -> None:
    """Ranks that are slow in single windows, again and again."""
    singly = past.singly(members, OF_WINDOWS).astype(np.float64)  # [row, statistic, window]
    base = np.maximum(usual, 0.0).T[:, :, None]
    least = np.maximum(noise.allowed(1), math.log(straggler.RATIO))
    with np.errstate(invalid="ignore"):
        hit = singly - base >= least.T[:, :, None]
        hit &= np.arange(OF_WINDOWS) < since[:, None, None]
        often = (hit.sum(axis=-1) >= HITS).T
        # A single stretch is not again and again, nor is what has been over for some windows.
        begins = hit[:, :, :-1] & ~hit[:, :, 1:]
        often &= (begins.sum(axis=-1) >= STRETCHES).T & hit[:, :, :LATELY].any(axis=-1).T
        often &= peers >= 2
    if often.any():
        mean = np.where(hit, singly, 0.0).sum(axis=-1).T / OF_WINDOWS
        margin = hit.sum(axis=-1).T / HITS
        for statistic in range(STATISTICS):
            only = np.zeros_like(often)
            only[statistic] = often[statistic]
            found.add(only, INTERMITTENT, OF_WINDOWS, mean, margin)
