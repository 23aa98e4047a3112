"""A closed window's own times -> straggler ratio, verdict and class of every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import drift, past, straggler, suspects
from lanterne.collector.analyse.kinds import KindStats
from lanterne.collector.analyse.past import KEPT, Past
from lanterne.collector.analyse.peers import Groups
from lanterne.collector.analyse.suspects import Suspects

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

FEW_PEERS = 7
ENOUGH_ELSEWHERE = 4
PATIENCE = 6  # windows without figures until a verdict is dropped
RELAPSE = 60  # windows: who is named again so soon needs twice as long a calm to be cleared
LONGEST_CALM = 24
CLEAR_NOW_AND_THEN = suspects.HITS
RESTLESS = 0.5  # of what noise allows in a window
CONFIDENT_SAMPLES = 30
LONE_PAIR = 0.7  # confidence where the other rank of a pair is all there is to compare with


@dataclass(frozen=True)
class Observed:
    """One communicator in the closed window."""

    slot: int
    base: int  # its first member
    ranks: int
    rows: int  # timed instances
    span_ns: float
    kinds: dict[int, tuple[int, int, int]]  # what the numbers of its kinds mean: op, role, evidence


@dataclass
class Window:
    """What the window brought, [row] or [statistic, row]; rows are all ranks observed."""

    members: I64
    of: I64  # index into the list of Observed
    rank: I64
    own: F64  # ns an operation
    samples: I64
    error: F64  # relative standard error of the median, and its degrees of freedom
    freedom: F64
    per_ns: F64  # operations a ns


class Verdicts:
    """[member] figures of the last closed window, and what outlives it."""

    def __init__(self, members: int, min_gain: float = straggler.MIN_GAIN) -> None:
        """min_gain: share of the time that a rank must lose to be named."""
        self._min_gain = min_gain
        # Members are set by `forget` when they are given: until then their memory is not touched.
        self.own = np.zeros(members)
        self.ratio = np.zeros(members)
        self.named = np.zeros(members, bool)
        self.klass = np.zeros(members, np.int64)
        self.confidence = np.zeros(members)
        # What the verdict rests on, kept while it holds:
        self.method = np.zeros(members, np.uint8)  # snapshot.METHODS
        self.score = np.zeros(members)  # excess over the most that noise allows
        self.excess = np.zeros(members)  # ratio that the method found
        self.peers = np.zeros(members, np.int32)
        self.windows = np.zeros(members, np.int32)  # since it was named
        self.statistic = np.zeros(members, np.uint8)  # of suspects' three
        self.suspected = np.zeros(members, bool)  # in the last window
        self._horizon = np.zeros(members, np.int32)
        self._calm = np.zeros(members, np.int32)  # windows in a row that speak against it
        self._quiet = np.zeros(members, np.int32)  # windows in a row without figures
        self._free = np.zeros(members, np.int32)  # windows since it was cleared
        self._relapses = np.zeros(members, np.int32)  # named again soon after being cleared
        self._unclear = np.zeros(members, np.int32)  # windows in a row that may be a fault's
        self._past = Past(members)
        self._drift = drift.Drift(members)

    def forget(self, base: int, ranks: int) -> None:
        self._clear(np.arange(base, base + ranks))
        members = slice(base, base + ranks)
        self.own[members] = self.ratio[members] = np.nan
        self.peers[members] = self._quiet[members] = self._relapses[members] = 0
        self._unclear[members] = 0
        self._free[members] = RELAPSE + 1
        self._past.forget(members)
        self._drift.forget(members)

    def regroup(self, members: I64) -> None:
        """Members that are compared with others from now on: their past against these is void."""
        self._past.forget(members)
        self._drift.forget(members)

    def silence(self, base: int, ranks: int) -> None:
        """A window without evidence: a verdict is held for some, the history stays."""
        members = np.arange(base, base + ranks)
        self.own[members] = self.ratio[members] = np.nan
        self._without_figures(members)

    def _without_figures(self, members: I64) -> None:
        self._quiet[members] += 1
        over = members[self._quiet[members] > PATIENCE]
        # Nothing has spoken against it: what led to it counts again as soon as there are figures.
        self._free[over[self.named[over]]] = RELAPSE + 1
        self._clear(over)

    def _clear(self, members: I64) -> None:
        self.named[members] = self.suspected[members] = False
        self.klass[members] = self.method[members] = 0
        self.confidence[members] = self.score[members] = 0
        self.excess[members] = np.nan
        self.windows[members] = self._calm[members] = 0

    def update(
        self,
        stats: dict[int, KindStats],
        observed: list[Observed],
        group: I64 | None = None,
        pool: I64 | None = None,
        alike: I64 | None = None,
    ) -> None:
        """Judge the ranks of communicators.

        group: [row] whom each rank is compared with, rows being all ranks of all communicators in
        order; None: those of its communicator. pool: [row] ranks that do the same elsewhere, used
        beside it where the group is a pair. alike: [row] how many of its group do what it does;
        where these are fewer than two, only changes against them are judged.
        """
        w = _window(stats, observed)
        if not len(w.members):
            return
        groups = Groups(w.of if group is None else group)
        own = np.log(np.where(w.own > 0, w.own, np.nan))
        center, peers = groups.center(own)
        apart = own - center
        if alike is not None:
            peers = np.minimum(peers, alike)
        elsewhere = _elsewhere(own, pool, peers[0])
        self._past.push(w.members, apart, own)
        steady = ~self.named[w.members] & (self._free[w.members] >= past.NEWEST_FOR_NOISE)
        # Of a rank alone only the changes in itself are known, which may be its work's.
        noise = suspects.noise_of(
            self._past, w.members, groups, steady, _of_difference(w.error, peers[0]), w.freedom
        )
        # Of the named, `_free` is 0; a verdict that stands may rest on what it began with.
        since = np.where(self.named[w.members], KEPT, self._free[w.members] + 1)
        found = suspects.examine(self._past, w.members, groups, peers[0], noise, elsewhere, since)
        self._drift.add(found, w.members, groups, self._past, peers[0])
        usual, _ = self._past.usual(w.members)
        self._settle(w, found, apart, usual, peers[0])
        named, rows = self.named[w.members], np.arange(len(w.members))
        statistic = self.statistic[w.members] * named
        against = apart[statistic, rows]
        alone = peers[0] < 2
        against[alone] = (apart - usual)[statistic[alone], rows[alone]]
        self.own[w.members] = np.where(np.isnan(apart[0]) & ~alone, np.nan, w.own[0])
        self.ratio[w.members] = np.exp(against)
        self.peers[w.members] = peers[0]
        calm = ~found.suspected & ~named & ~self._restless(w.members, apart, usual, noise)
        # What is usual for the few peers of a suspect is not what they do beside it.
        calm &= (peers[0] >= FEW_PEERS) | (groups.count(~calm) == 0)
        self._past.learn(w.members, calm, peers[0] + 1 < past.FEW)
        self.suspected[w.members] = found.suspected

    def _restless(self, members: I64, apart: F64, usual: F64, noise: suspects.Noise) -> Bool:
        """[row] whether it is so much above what is usual that this may be a fault, though not
        known to be one. What lasts for longer than the tests look back is its usual.
        """
        last, _ = self._past.last(members, suspects.HORIZONS[0])
        least = np.maximum(RESTLESS * noise.allowed(1), math.log(straggler.RATIO_LONG))
        with np.errstate(invalid="ignore"):
            above = ((last - usual)[0] >= least[0]) & ((apart - usual)[0] >= least[0])
        self._unclear[members] = np.where(above, self._unclear[members] + 1, 0)
        restless: Bool = above & (self._unclear[members] <= suspects.HORIZONS[-1])
        return restless

    def _settle(self, w: Window, found: Suspects, apart: F64, usual: F64, peers: I64) -> None:
        """Name the suspects that are worth it, clear those that have been calm for long enough."""
        members, rows = w.members, np.arange(len(w.members))
        lost = self._loses(w, found, apart, usual)
        with np.errstate(invalid="ignore"):
            worth = lost >= self._min_gain
        candidate = found.suspected & worth
        named = self.named[members]
        # What began as slow throughout ends with that: its windows would count singly for long.
        candidate &= ~(named & _singly(found.method, found.horizon) & ~self._single(members))
        fresh = candidate & ~named
        before = self.statistic[members]
        clearer = (found.statistic == before) & (found.margin >= self.score[members])
        taken = fresh | (candidate & (clearer | (found.statistic < before)))
        self.method[members[taken]] = found.method[taken]
        self.excess[members[taken]] = np.exp(found.excess[taken])
        self.statistic[members[taken]] = found.statistic[taken]
        self._horizon[members[taken]] = found.horizon[taken]
        self.score[members[taken]] = found.margin[taken]
        self.confidence[members[taken]] = _confidence(found.margin, w.samples, peers)[taken]
        self.windows[members[fresh]] = 0
        again = self._free[members[fresh]] <= RELAPSE
        self._relapses[members[fresh]] = np.where(again, self._relapses[members[fresh]] + 1, 0)
        self._free[members] = np.where(
            named | fresh, 0, np.minimum(self._free[members], RELAPSE) + 1
        )
        statistic = self.statistic[members]
        method = self.method[members]
        against = apart[statistic, rows]
        risen = (method == suspects.OWN_HISTORY) | (method == suspects.DRIFT) | (peers < 2)
        rise = against - usual[statistic, rows]
        # Back at what it used to be is calm too, where it has always been slower than its peers.
        known = np.where(risen, rise, np.fmin(against, rise))
        with np.errstate(invalid="ignore"):
            calm = (known < math.log(straggler.RATIO_CLEAR)) | (lost < self._min_gain / 2)
        self._calm[members] = np.where(calm & named, self._calm[members] + 1, 0)
        silent = np.isnan(known)
        self._quiet[members[~silent]] = 0
        self.named[members[fresh]] = True
        self.windows[members[named | fresh]] += 1
        enough = np.full(len(members), straggler.CLEAR_AFTER)
        enough[self._single(members)] = CLEAR_NOW_AND_THEN
        enough = np.minimum(enough << np.minimum(self._relapses[members], 4), LONGEST_CALM)
        # Many windows together still have the fault in them when the newest have been calm.
        lately = (found.horizon == suspects.HORIZONS[0]) | (found.method == suspects.INTERMITTENT)
        over = named & ~(candidate & lately) & (self._calm[members] >= enough)
        self._clear(members[over])
        self._without_figures(members[silent])

    def _single(self, members: I64) -> Bool:
        return _singly(self.method[members], self._horizon[members])

    def _loses(self, w: Window, found: Suspects, apart: F64, usual: F64) -> F64:
        """[row] share of the time by which the rank is longer on its own than it should be."""
        rows, members = np.arange(len(w.members)), w.members
        with np.errstate(invalid="ignore", over="ignore"):
            # By the median or by the mean: a rank that is slow now and then shows in the latter.
            excess = np.fmax(*(w.own[s] * -np.expm1(-apart[s]) for s in (0, 1)))
            risen = np.fmax(*(w.own[s] * -np.expm1(-(apart - usual)[s]) for s in (0, 1)))
        method = np.where(found.suspected, found.method, self.method[members])
        then = (method == suspects.OWN_HISTORY) | (method == suspects.DRIFT)
        lost = np.where(then, np.fmax(risen, np.where(found.suspected, 0.0, excess)), excess)
        # In single windows: the average over them.
        singly = _singly(method, found.horizon) & found.suspected
        mean = w.own[found.statistic, rows] * -np.expm1(-np.nan_to_num(found.excess))
        lost = np.where(singly, np.fmax(lost, mean), lost)
        share: F64 = lost * w.per_ns
        return share


def _singly(method: npt.NDArray[np.integer], horizon: npt.NDArray[np.integer]) -> Bool:
    """Whether single windows name a rank, not a stretch of them."""
    found: Bool = (method == suspects.INTERMITTENT) & (horizon == suspects.OF_WINDOWS)
    return found


def _window(stats: dict[int, KindStats], observed: list[Observed]) -> Window:
    ranks = np.array([o.ranks for o in observed], dtype=np.int64)
    total = int(ranks.sum())
    own, samples = np.full((3, total), np.nan), np.zeros(total, np.int64)
    error, freedom = np.zeros((2, len(observed)))
    at = 0
    for i, comm in enumerate(observed):
        rows = slice(at, at + comm.ranks)
        own[:, rows], samples[rows], error[i], freedom[i] = stats[comm.slot].combined()
        at += comm.ranks
    of = np.repeat(np.arange(len(observed)), ranks)
    rank = np.arange(total) - np.repeat(np.cumsum(ranks) - ranks, ranks)
    own[0, samples < straggler.MIN_SAMPLES] = np.nan
    own[1:, samples < straggler.MIN_SAMPLES_MEAN] = np.nan
    span = np.maximum(np.array([o.span_ns for o in observed]), 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.nan_to_num(error[of] / own[0], nan=0.0, posinf=0.0)
    return Window(
        members=np.array([o.base for o in observed], dtype=np.int64)[of] + rank,
        of=of,
        rank=rank,
        own=own,
        samples=samples,
        error=relative,
        freedom=freedom[of],
        per_ns=(np.array([o.rows for o in observed]) / span)[of],
    )


def _elsewhere(own: F64, pool: I64 | None, peers: I64) -> Bool:
    """[statistic, row] whether a rank of a pair is also slower than those that do the same in
    other communicators of its workload.
    """
    if pool is None or not (peers < 2).any():
        return np.zeros(own.shape, bool)
    groups = Groups(pool)
    center, number = groups.center(own)
    with np.errstate(invalid="ignore"):
        found = suspects.outside(
            own - center, groups.spread(own - center), straggler.SCORE, straggler.FLOOR
        )
        found &= own - center >= math.log(straggler.RATIO)
    return found & (number >= ENOUGH_ELSEWHERE) & (peers < 2)


def _of_difference(error: F64, peers: I64) -> F64:
    """Of a rank's figure over the median of so many others', from that of one figure."""
    wider: F64 = error * np.sqrt(1 + np.pi / 2 / np.maximum(peers, 1.57))
    return wider


def _confidence(margin: F64, samples: I64, peers: I64) -> F64:
    """0..1: how far beyond the thresholds, from how many samples, against how many peers."""
    clear = np.clip(margin / 2, 0.5, 1.0) * np.clip(samples / CONFIDENT_SAMPLES, 0.3, 1.0)
    trust: F64 = np.where(peers < 2, LONE_PAIR, 1.0) * clear
    return trust
