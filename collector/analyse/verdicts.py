"""A closed window's own times -> straggler ratio, verdict and class of every rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import own, straggler
from lanterne.collector.analyse.who import KINDS
from lanterne.collector.analyse.window import OwnBlock

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MIN_KIND_INSTANCES = 3
CHUNK = 1 << 21


class KindStats:
    """Of one communicator in one window, per kind of operation seen often enough."""

    def __init__(self) -> None:
        self.kind: list[int] = []
        self.instances: list[int] = []
        self.median: list[F64] = []
        self.mean: list[F64] = []
        self.count: list[I64] = []
        self.blocked: list[F64] = []
        self.size: list[F64] = []
        self.noise: list[float] = []
        self.own: list[npt.NDArray[np.float32]] = []  # [rank, instance], sampled


class Verdicts:
    """[member] figures of the last closed window, and what outlives it."""

    def __init__(self, members: int, min_gain: float = straggler.MIN_GAIN) -> None:
        """min_gain: share of the time that fixing a rank must give back, or it is not named."""
        self._min_gain = min_gain
        # Members are set by `forget` when they are given: until then their memory is not touched.
        self.own = np.zeros(members)
        self.ratio = np.zeros(members)
        self.named = np.zeros(members, bool)
        self.klass = np.zeros(members, np.int64)
        self.confidence = np.zeros(members)
        self._streak = np.zeros(members, np.int64)
        self._history = np.zeros((members, straggler.HISTORY))

    def forget(self, base: int, ranks: int) -> None:
        members = slice(base, base + ranks)
        self.own[members] = self.ratio[members] = np.nan
        self.named[members] = False
        self.klass[members] = self._streak[members] = 0
        self.confidence[members] = 0
        self._history[members] = np.nan

    def silence(self, base: int, ranks: int) -> None:
        """A window without evidence: nobody is named, the history stays."""
        members = slice(base, base + ranks)
        self.own[members] = self.ratio[members] = np.nan
        self.named[members] = False
        self.klass[members] = self._streak[members] = 0
        self.confidence[members] = 0

    def update(
        self,
        stats: dict[int, KindStats],
        slots: list[int],
        base: I64,
        ranks: int,
        rows: I64,
        span_ns: F64,
        kinds: list[dict[int, tuple[int, int, int]]],
    ) -> None:
        """Judge the ranks of communicators of one size.

        slots, base, rows (timed instances), span_ns, kinds (what the kind numbers mean): one entry
        per communicator.
        """
        median, mean, samples, noise = _combine(stats, slots, ranks)
        members = base[:, None] + np.arange(ranks)
        few = samples < straggler.MIN_SAMPLES
        median[few] = np.nan
        mean[samples < straggler.MIN_SAMPLES_MEAN] = np.nan
        history = self._history[members]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio, score = straggler.compare(median, history, noise)
            ratio2, score2 = straggler.compare(mean, history, noise)
            by_median = straggler.candidates(ratio, score, samples, straggler.MIN_SAMPLES)
        alone = (~np.isnan(median)).sum(axis=1, keepdims=True) < 3
        by_mean = ~alone & straggler.candidates(ratio2, score2, samples, straggler.MIN_SAMPLES_MEAN)
        suspects = by_median | by_mean | self.named[members]
        gains = _gains(stats, slots, suspects) * (rows / np.maximum(span_ns, 1.0))[:, None]
        worth = gains >= self._min_gain
        use_mean = by_mean & ~by_median
        shown = np.where(use_mean, ratio2, ratio)
        candidate = (by_median | by_mean) & worth
        with np.errstate(invalid="ignore"):
            slow = np.fmax(ratio, ratio2) >= straggler.RATIO_CLEAR
            calm = ~(slow & (gains >= self._min_gain / 2))
        named, streak = straggler.settle(
            self.named[members], self._streak[members], candidate, calm
        )
        self.named[members], self._streak[members] = named, streak
        self.own[members], self.ratio[members] = median, shown
        best = np.nan_to_num(np.fmax(score, score2), nan=0.0)
        trust = np.clip(best / (2 * straggler.SCORE), 0, 1) * np.clip(samples / 30, 0, 1)
        self.confidence[members] = np.where(named, trust, 0.0)
        self._remember(members, median, by_median | by_mean | named)
        self._classify(stats, slots, members, named, candidate, use_mean, kinds)

    def _remember(self, members: I64, median: F64, slow: npt.NDArray[np.bool_]) -> None:
        keep = ~slow & ~np.isnan(median)
        chosen = members[keep]
        self._history[chosen, 1:] = self._history[chosen, :-1].copy()
        self._history[chosen, 0] = median[keep]

    def _classify(
        self,
        stats: dict[int, KindStats],
        slots: list[int],
        members: I64,
        named: npt.NDArray[np.bool_],
        candidate: npt.NDArray[np.bool_],
        use_mean: npt.NDArray[np.bool_],
        kinds: list[dict[int, tuple[int, int, int]]],
    ) -> None:
        self.klass[members[~named]] = 0
        for i, rank in zip(*np.nonzero(named), strict=True):
            member = members[i, rank]
            if not candidate[i, rank] and self.klass[member] != 0:
                continue  # in hysteresis: this window does not show why
            s = stats[slots[i]]
            own_times = s.mean if use_mean[i, rank] else s.median
            found = []
            for k, kind in enumerate(s.kind):
                op, role, evidence = kinds[i][kind]
                found.append(
                    straggler.Kind(
                        op=op,
                        role=role,
                        evidence=evidence,
                        instances=s.instances[k],
                        own=own_times[k],
                        blocked=s.blocked[k],
                        size=s.size[k],
                    )
                )
            self.klass[member] = straggler.classify(found, int(rank))


def _combine(
    stats: dict[int, KindStats], slots: list[int], ranks: int
) -> tuple[F64, F64, I64, F64]:
    """Own time per operation over the kinds, each weighted by how often it occurred.

    -> (median, mean, samples) [C, rank], noise [C, 1].
    """
    median, mean = np.full((2, len(slots), ranks), np.nan)
    samples = np.zeros((len(slots), ranks), np.int64)
    noise = np.zeros((len(slots), 1))
    for i, slot in enumerate(slots):
        s = stats[slot]
        weight = np.array(s.instances, dtype=np.float64)
        share = weight / weight.sum()
        median[i] = share @ np.array(s.median)
        mean[i] = share @ np.array(s.mean)
        samples[i] = np.sum(s.count, axis=0)
        noise[i] = share @ np.array(s.noise)
    return median, mean, samples, noise


def _gains(stats: dict[int, KindStats], slots: list[int], suspects: npt.NDArray[np.bool_]) -> F64:
    """[C, rank] time per operation that fixing a suspect gives back, ns; 0 for the others."""
    gains = np.zeros(suspects.shape)
    for i in np.flatnonzero(suspects.any(axis=1)).tolist():
        s = stats[slots[i]]
        chosen = np.flatnonzero(suspects[i])
        share = np.array(s.instances) / np.sum(s.instances)
        parts = [straggler.gain(own_time, chosen) for own_time in s.own]
        gains[i, chosen] = share @ np.array(parts)
    return gains


def kind_stats(blocks: list[OwnBlock]) -> dict[int, KindStats]:
    """Medians per (communicator, kind) of a window's own times -> {slot: KindStats}."""
    found: dict[int, KindStats] = {}
    for ranks in sorted({b.ranks for b in blocks}):
        same = [b for b in blocks if b.ranks == ranks]
        group = np.concatenate([b.group for b in same])
        own_time = np.concatenate([b.own for b in same], axis=1)
        blocked = np.concatenate([b.blocked for b in same], axis=1)
        size = np.concatenate([b.size for b in same], axis=1)
        order = np.argsort(group, kind="stable")
        distinct, start, count = np.unique(group[order], return_index=True, return_counts=True)
        enough = np.flatnonzero(count >= MIN_KIND_INSTANCES)
        width = 1 << np.ceil(np.log2(count)).astype(np.int64)
        for padded in np.unique(width[enough]).tolist():
            chosen = enough[width[enough] == padded]
            step = max(1, CHUNK // (padded * ranks))
            for at in range(0, len(chosen), step):
                part = chosen[at : at + step]
                _chunk(
                    found,
                    distinct[part],
                    order,
                    start[part],
                    count[part],
                    padded,
                    (own_time, blocked, size),
                )
    return found


def _chunk(
    found: dict[int, KindStats],
    groups: I64,
    order: I64,
    start: I64,
    count: I64,
    width: int,
    columns: tuple[npt.NDArray[np.float32], ...],
) -> None:
    """Groups of about the same number of rows at once, padded to `width` with NaN."""
    offset = np.arange(width)
    valid = offset < count[:, None]
    rows = order[np.where(valid, start[:, None] + offset, 0)]  # [G, width]
    own_time, blocked, size = (c[:, rows] for c in columns)  # [rank, G, width]
    own_time[:, ~valid] = np.nan
    missing = np.isnan(own_time)
    blocked[missing], size[missing] = 0, 0
    median, mean, samples = own.medians(own_time)
    noise = own.noise(own_time)
    some = np.maximum(samples, 1)
    blocked_mean = blocked.sum(axis=-1, dtype=np.float64) / some
    size_mean = size.sum(axis=-1, dtype=np.float64) / some
    for i, group in enumerate(groups.tolist()):
        s = found.setdefault(group // KINDS, KindStats())
        s.kind.append(group % KINDS)
        s.instances.append(int(count[i]))
        s.median.append(median[:, i])
        s.mean.append(mean[:, i])
        s.count.append(samples[:, i])
        s.blocked.append(blocked_mean[:, i])
        s.size.append(size_mean[:, i])
        s.noise.append(float(noise[i]))
        s.own.append(own_time[:, i, : int(count[i])])
