"""Snapshot -> metric families of jobs: collectives, ranks, communicators. Pure.

Communicators may share a name (two groups "tp-2" of one job), and Prometheus refuses two samples
with the same labels: counters and histograms of one label set are added up, gauges show the worst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.collector.metrics import CATALOG, RANK, Family, Point
from lanterne.collector.snapshot import (
    CLASSES,
    DOMAINS,
    EVIDENCE,
    F64,
    I64,
    CommunicatorView,
    Histogram,
    Snapshot,
)

# Buckets end at 2^10 ns (1 us) to 2^36 ns (69 s): fixed, so that every scrape has the same `le`s.
BUCKET_EXPONENTS = range(10, 37)

Key = tuple[str, ...]


def families(snapshot: Snapshot) -> Iterator[Family]:
    yield from _histograms(snapshot.communicators)
    yield from _calls(snapshot.communicators)
    yield _bytes(snapshot.communicators)
    yield from _ranks(snapshot)
    yield from _communicators(snapshot.communicators)


def _histograms(comms: Sequence[CommunicatorView]) -> Iterator[Family]:
    wide = ("workload", "comm", "op", "source")
    narrow = ("workload", "source")
    duration = _Merged("lanterne_collective_duration_seconds", wide)
    wait = _Merged("lanterne_collective_wait_seconds", wide)
    dispatch = _Merged("lanterne_moe_dispatch_duration_seconds", narrow)
    combine = _Merged("lanterne_moe_combine_duration_seconds", narrow)
    for comm in comms:
        for (op, source), histogram in comm.durations.items():
            duration.add((comm.workload, comm.name, op, source), histogram)
        for (op, source), histogram in comm.waits.items():
            wait.add((comm.workload, comm.name, op, source), histogram)
        for source, histogram in comm.dispatch.items():
            dispatch.add((comm.workload, source), histogram)
        for source, histogram in comm.combine.items():
            combine.add((comm.workload, source), histogram)
    for merged in (duration, wait, dispatch, combine):
        yield merged.family()


class _Merged:
    """Histograms of one family, those with equal labels added up."""

    def __init__(self, name: str, labels: Key) -> None:
        self._name = name
        self._labels = labels
        self._bins: dict[Key, list[I64]] = {}
        self._sums: dict[Key, float] = {}

    def add(self, key: Key, histogram: Histogram) -> None:
        self._bins.setdefault(key, []).append(histogram.bins)
        self._sums[key] = self._sums.get(key, 0.0) + histogram.sum_seconds

    def family(self) -> Family:
        points: list[Point] = []
        for key, bins in self._bins.items():
            labels = dict(zip(self._labels, key, strict=True))
            points += _histogram(self._name, labels, sum(bins), self._sums[key])
        return Family(CATALOG[self._name], points)


def _histogram(name: str, labels: dict[str, str], bins: I64 | int, total: float) -> Iterator[Point]:
    """Cumulative buckets; bin b holds [2^b, 2^(b+1)) ns, so `le` 2^e ns covers the bins below e."""
    upto = np.concatenate(([0], np.cumsum(bins)))
    last = len(upto) - 1
    for exponent in BUCKET_EXPONENTS:
        edge = repr(2.0**exponent / 1e9)
        yield Point(f"{name}_bucket", {**labels, "le": edge}, float(upto[min(exponent, last)]))
    yield Point(f"{name}_bucket", {**labels, "le": "+Inf"}, float(upto[-1]))
    yield Point(f"{name}_count", labels, float(upto[-1]))
    yield Point(f"{name}_sum", labels, total)


def _calls(comms: Sequence[CommunicatorView]) -> Iterator[Family]:
    total: dict[Key, list[int]] = {}
    for comm in comms:
        for (op, source), counts in comm.calls.items():
            kept = total.setdefault((comm.workload, comm.name, op, source), [0, 0, 0])
            kept[:] = [a + b for a, b in zip(kept, counts, strict=True)]
    names = ("calls", "call_errors", "bytes")
    labels = {k: dict(zip(("workload", "comm", "op", "source"), k, strict=True)) for k in total}
    for i, name in enumerate(f"lanterne_collective_{what}_total" for what in names):
        points = [Point(name, labels[key], float(counts[i])) for key, counts in total.items()]
        yield Family(CATALOG[name], points)


def _bytes(comms: Sequence[CommunicatorView]) -> Family:
    name = "lanterne_alltoall_bytes_total"
    total: dict[Key, int] = {}
    for comm in comms:
        table = comm.bytes_by_domain
        if table is None:
            continue
        for d in np.flatnonzero(table.any(axis=0)).tolist():
            for rank, sent in enumerate(table[:, d].tolist()):
                key = (comm.workload, comm.name, str(rank), DOMAINS[d])
                total[key] = total.get(key, 0) + sent
    labels = CATALOG[name].labels
    return Family(
        CATALOG[name],
        [Point(name, dict(zip(labels, k, strict=True)), float(v)) for k, v in total.items()],
    )


@dataclass(frozen=True)
class _Rows:
    """Label sets, and for every row of Snapshot.ranks which of them it belongs to."""

    labels: list[dict[str, str]]
    index: I64 | None  # None: one each, in order

    @classmethod
    def of(cls, names: Key, keys: Sequence[Key]) -> _Rows:
        place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        labels = [dict(zip(names, key, strict=True)) for key in place]
        if len(place) == len(keys):
            return cls(labels, None)
        return cls(labels, np.array([place[key] for key in keys], dtype=np.int64))

    def add(self, values: F64) -> F64:
        """Sums of the known values of each label set; NaN where none is known."""
        if self.index is None:
            return values
        known = ~np.isnan(values)
        size = len(self.labels)
        out = np.bincount(self.index[known], values[known], size).astype(np.float64)
        out[np.bincount(self.index[known], minlength=size) == 0] = np.nan
        return out

    def worst(self, values: F64) -> F64:
        """The largest known value of each label set; NaN where none is known."""
        if self.index is None:
            return values
        out = np.full(len(self.labels), np.nan)
        np.fmax.at(out, self.index, values)
        return out

    def family(self, name: str, values: F64, fold: Callable[[F64], F64]) -> Family:
        folded = fold(values)
        known = np.flatnonzero(~np.isnan(folded))
        labels = self.labels
        pairs = zip(known.tolist(), folded[known].tolist(), strict=True)
        return Family(CATALOG[name], [Point(name, labels[i], v) for i, v in pairs])


def _ranks(snapshot: Snapshot) -> Iterator[Family]:
    ranks = snapshot.ranks
    comms = [(c.workload, c.name) for c in snapshot.communicators]
    nodes = [n.name for n in snapshot.nodes]
    keys: list[Key] = [
        (*comms[c], str(r), nodes[n], gpu)
        for c, r, n, gpu in zip(
            ranks.comm.tolist(), ranks.rank.tolist(), ranks.node.tolist(), ranks.gpu, strict=True
        )
    ]
    plain = _Rows.of(RANK, keys)
    evidence = [EVIDENCE[e] for e in ranks.evidence.tolist()]
    sourced = _Rows.of(
        (*RANK, "source"), [(*key, source) for key, source in zip(keys, evidence, strict=True)]
    )
    blind = ranks.evidence == 0
    wait, blame = (np.where(blind, np.nan, v) for v in (ranks.wait_seconds, ranks.blame_seconds))
    yield sourced.family("lanterne_rank_wait_seconds_total", wait, sourced.add)
    yield sourced.family("lanterne_rank_blame_seconds_total", blame, sourced.add)
    yield plain.family("lanterne_rank_comm_seconds_total", ranks.comm_seconds, plain.add)
    yield plain.family("lanterne_rank_compute_seconds_total", ranks.compute_seconds, plain.add)
    yield plain.family("lanterne_rank_straggler_ratio", ranks.straggler_ratio, plain.worst)

    # A verdict of 0 says "judged, and not slow": without evidence or enough samples it is absent.
    named = ranks.straggler != 0
    judged = named | (~blind & ~np.isnan(ranks.straggler_ratio))
    classes = [CLASSES[k] for k in np.where(named, ranks.klass, 0).tolist()]
    verdict = _Rows.of(
        (*RANK, "class"), [(*key, klass) for key, klass in zip(keys, classes, strict=True)]
    )
    values = np.where(judged, named.astype(np.float64), np.nan)
    yield verdict.family("lanterne_rank_straggler", values, verdict.worst)


def _communicators(comms: Sequence[CommunicatorView]) -> Iterator[Family]:
    info: dict[Key, float] = {}
    ranks: dict[Key, float] = {}
    seen: dict[Key, float] = {}
    complete: dict[Key, float] = {}
    absent: dict[Key, float] = {}
    for comm in comms:
        key = (comm.workload, comm.name)
        info[*key, comm.library, comm.role, EVIDENCE[comm.evidence]] = 1.0
        ranks[key] = ranks.get(key, 0.0) + comm.n_ranks
        seen[key] = seen.get(key, 0.0) + comm.ranks_seen
        if not np.isnan(comm.complete_share):
            complete[key] = min(complete.get(key, 1.0), comm.complete_share)
        # The code, not the text: numbers in that would make a new series each time.
        reason = comm.absent_code or ("other" if comm.absent_reason else "none")
        absent[*key, reason] = float(reason != "none")
    for name, values in (
        ("lanterne_communicator_info", info),
        ("lanterne_communicator_ranks", ranks),
        ("lanterne_communicator_ranks_seen", seen),
        ("lanterne_communicator_complete_ratio", complete),
        ("lanterne_communicator_waits_absent", absent),
    ):
        metric = CATALOG[name]
        yield Family(
            metric,
            [Point(name, dict(zip(metric.labels, k, strict=True)), v) for k, v in values.items()],
        )
