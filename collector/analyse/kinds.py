"""A closed window's own times -> medians and means per communicator and kind of operation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import costs, own
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
        self.upper: list[F64] = []
        self.count: list[I64] = []
        self.blocked: list[F64] = []
        self.size: list[F64] = []
        self.noise: list[float] = []
        self.freedom: list[float] = []
        self.recoverable: list[float] = []  # ns an instance, see `costs`
        self.own: list[npt.NDArray[np.float32]] = []  # [rank, instance], sampled

    def combined(self) -> tuple[F64, I64, float, float]:
        """Per operation over the kinds, each weighted by how often it occurred.

        -> (median, mean, upper quantile) [3, rank], samples [rank], noise, its degrees of freedom.
        """
        if len(self.kind) == 1:  # of thousands of communicators: nothing to average
            only = np.array((self.median[0], self.mean[0], self.upper[0]))
            return only, self.count[0], self.noise[0], self.freedom[0]
        weight = np.array(self.instances, dtype=np.float64)
        share = weight / weight.sum()
        figures = np.array([share @ np.array(v) for v in (self.median, self.mean, self.upper)])
        samples: I64 = np.sum(self.count, axis=0)
        return (
            figures,
            samples,
            float(share @ np.array(self.noise)),
            float(share @ np.array(self.freedom)),
        )


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
    median, mean, upper, samples = own.medians(own_time)
    noise, freedom = own.noise(own_time)
    recoverable = costs.recoverables(own_time, median)
    some = np.maximum(samples, 1)
    blocked_mean = blocked.sum(axis=-1, dtype=np.float64) / some
    size_mean = size.sum(axis=-1, dtype=np.float64) / some
    for i, group in enumerate(groups.tolist()):
        s = found.setdefault(group // KINDS, KindStats())
        s.kind.append(group % KINDS)
        s.instances.append(int(count[i]))
        s.median.append(median[:, i])
        s.mean.append(mean[:, i])
        s.upper.append(upper[:, i])
        s.count.append(samples[:, i])
        s.blocked.append(blocked_mean[:, i])
        s.size.append(size_mean[:, i])
        s.noise.append(float(noise[i]))
        s.freedom.append(float(freedom[i]))
        s.recoverable.append(float(recoverable[i]))
        s.own.append(own_time[:, i, : int(count[i])])
