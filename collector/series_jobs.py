"""Snapshot -> metric families of jobs: collectives, ranks, communicators. Pure.

Communicators may share a name (two groups "tp-2" of one job), and Prometheus refuses two samples
with the same labels: counters and histograms of one label set are added up, gauges show the worst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.collector.metrics import CATALOG, RANK, Exemplar, Family, Point
from lanterne.collector.snapshot import (
    CLASSES,
    DOMAINS,
    EVIDENCE,
    F64,
    I64,
    CommunicatorView,
    Histogram,
    LongWait,
    Ranks,
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
    yield from _tokens(snapshot.communicators)
    yield _jobs(snapshot)


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
            wait.add((comm.workload, comm.name, op, source), histogram, comm.comm_hash)
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
        self._newest: dict[Key, Exemplar] = {}

    def add(self, key: Key, histogram: Histogram, comm_hash: int = 0) -> None:
        self._bins.setdefault(key, []).append(histogram.bins)
        self._sums[key] = self._sums.get(key, 0.0) + histogram.sum_seconds
        if histogram.longest is not None:
            found = _exemplar(histogram.longest, comm_hash)
            before = self._newest.get(key)
            if before is None or found.at > before.at:
                self._newest[key] = found

    def family(self) -> Family:
        points: list[Point] = []
        for key, bins in self._bins.items():
            labels = dict(zip(self._labels, key, strict=True))
            exemplar = self._newest.get(key)
            points += _histogram(self._name, labels, sum(bins), self._sums[key], exemplar)
        return Family(CATALOG[self._name], points)


def _exemplar(longest: LongWait, comm_hash: int) -> Exemplar:
    """`comm_hash` as the JSON view takes it, so that a link can be made of it."""
    labels = {
        "comm_hash": f"0x{comm_hash:016x}",
        "last_rank": str(longest.last_rank),
        "seq": str(longest.seq),
        "waiting_rank": str(longest.rank),
    }
    return Exemplar(labels, longest.seconds, longest.at)


def _histogram(
    name: str, labels: dict[str, str], bins: I64 | int, total: float, exemplar: Exemplar | None
) -> Iterator[Point]:
    """Cumulative buckets; bin b holds [2^b, 2^(b+1)) ns, so `le` 2^e ns covers the bins below e."""
    upto = np.concatenate(([0], np.cumsum(bins)))
    last = len(upto) - 1
    for exponent in BUCKET_EXPONENTS:
        here = None
        if exemplar is not None and exemplar.value * 1e9 < 2.0**exponent:
            here, exemplar = exemplar, None
        edge = {**labels, "le": repr(2.0**exponent / 1e9)}
        yield Point(f"{name}_bucket", edge, float(upto[min(exponent, last)]), here)
    yield Point(f"{name}_bucket", {**labels, "le": "+Inf"}, float(upto[-1]), exemplar)
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
    blind = ranks.evidence == 0
    yield from _by_source(ranks, keys)
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
    missing = np.where(ranks.klass == CLASSES.index("hang"), 1.0, np.nan)
    yield plain.family("lanterne_rank_missing", missing, plain.worst)
    if len(ranks.recoverable_share):
        back = np.where(judged, np.where(named, ranks.recoverable_share, 0.0), np.nan)
        yield plain.family("lanterne_rank_recoverable_ratio", back, plain.worst)
    yield _info(snapshot, keys)


def _info(snapshot: Snapshot, keys: list[Key]) -> Family:
    metric = CATALOG["lanterne_rank_info"]
    found: dict[Key, None] = {}
    if snapshot.places:
        who = zip(snapshot.ranks.node.tolist(), snapshot.ranks.pid.tolist(), strict=True)
        for key, process in zip(keys, who, strict=True):
            place = snapshot.places.get(process)
            if place is not None and place.pod:
                found[*key, place.namespace, place.pod, place.container, place.owner] = None
    labels = [dict(zip(metric.labels, key, strict=True)) for key in found]
    return Family(metric, [Point(metric.name, one, 1.0) for one in labels])


def _by_source(ranks: Ranks, keys: list[Key]) -> Iterator[Family]:
    """Counters stay once they exist, also while there is no evidence, or another one."""
    for name, by_source, present in (
        ("lanterne_rank_wait_seconds_total", ranks.wait_by_source, ranks.wait_seconds),
        ("lanterne_rank_blame_seconds_total", ranks.blame_by_source, ranks.blame_seconds),
    ):
        if not by_source.size:
            by_source = np.full((len(EVIDENCE), len(keys)), np.nan)
            by_source[ranks.evidence, np.arange(len(keys))] = present
        found: list[tuple[Key, float]] = []
        for source in range(1, len(EVIDENCE)):
            values = by_source[source]
            for row in np.flatnonzero(~np.isnan(values)).tolist():
                found.append(((*keys[row], EVIDENCE[source]), float(values[row])))
        rows = _Rows.of((*RANK, "source"), [key for key, _ in found])
        yield rows.family(name, np.array([value for _, value in found]), rows.add)


def _jobs(snapshot: Snapshot) -> Family:
    name = "lanterne_workload_recoverable_ratio"
    points = [
        Point(name, {"workload": job.workload}, job.recoverable_share)
        for job in snapshot.jobs
        if not np.isnan(job.recoverable_share)
    ]
    return Family(CATALOG[name], points)


def _tokens(comms: Sequence[CommunicatorView]) -> Iterator[Family]:
    """Of the communicator with the busiest rank, where several share a name."""
    found: dict[Key, tuple[float, float]] = {}
    for comm in comms:
        if comm.tokens is not None and len(comm.tokens):
            key = (comm.workload, comm.name)
            told = float(comm.tokens.max()), float(comm.tokens.mean())
            found[key] = max(told, found.get(key, told))
    for i, name in enumerate(("lanterne_moe_rank_tokens_max", "lanterne_moe_rank_tokens_mean")):
        metric = CATALOG[name]
        yield Family(
            metric,
            [Point(name, dict(zip(metric.labels, k, strict=True)), v[i]) for k, v in found.items()],
        )


def _communicators(comms: Sequence[CommunicatorView]) -> Iterator[Family]:
    info: dict[Key, float] = {}
    ranks: dict[Key, float] = {}
    seen: dict[Key, float] = {}
    complete: dict[Key, float] = {}
    absent: dict[Key, float] = {}
    hung: dict[Key, float] = {}
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
        hung[key] = max(hung.get(key, 0.0), comm.hang.seconds if comm.hang else 0.0)
    for name, values in (
        ("lanterne_communicator_info", info),
        ("lanterne_communicator_ranks", ranks),
        ("lanterne_communicator_ranks_seen", seen),
        ("lanterne_communicator_complete_ratio", complete),
        ("lanterne_communicator_waits_absent", absent),
        ("lanterne_communicator_hung_seconds", hung),
    ):
        metric = CATALOG[name]
        yield Family(
            metric,
            [Point(name, dict(zip(metric.labels, k, strict=True)), v) for k, v in values.items()],
        )
