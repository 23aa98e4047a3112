"""What a report shows of a recording, gathered from its snapshots in bounded memory.

Totals become differences per bin of time; when there are too many bins, two are made one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.steps import PARTS
from lanterne.collector.replay_bins import Binned, add
from lanterne.collector.snapshot import (
    CLASSES,
    DOMAINS,
    EVIDENCE,
    CommunicatorView,
    ExpertView,
    Histogram,
    Snapshot,
)

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MOST_WINDOWS = 4096
MATRIX_RANKS = 512

# Sums of a workload in a window, from which `compare` makes its figures.
SUMS = ("seconds", "instances", "rank_seconds", "wait", "compute", "transfer", "own_rounds",
        "dispatch", "dispatches", "combine", "combines", "other", "others", "skew", "skews",
        *(f"bytes_{domain}" for domain in DOMAINS))  # fmt: skip
STAGE_SUMS = ("seconds", "kernels", "busy", "span")
STEP_PARTS = ("span", *PARTS)  # of serving steps: [seconds, steps] each


@dataclass
class Track:
    """One communicator."""

    view: CommunicatorView  # as last seen
    nodes: tuple[str, ...] = ()  # by rank
    gpus: tuple[str, ...] = ()
    evidence: str = "none"
    wait: Binned = field(default_factory=Binned)  # [rank] seconds waited
    blame: Binned = field(default_factory=Binned)
    load: Binned = field(default_factory=Binned)  # [rank] bytes received, summed over snapshots
    loads: Binned = field(default_factory=Binned)  # [1] snapshots in that sum
    wait_total: F64 = field(default_factory=lambda: np.zeros(0))
    blame_total: F64 = field(default_factory=lambda: np.zeros(0))
    traffic: F64 | None = None  # [from, to] bytes, summed over snapshots
    skew: float = float("nan")


@dataclass
class Episode:
    """A rank that was named."""

    workload: str
    comm: str
    rank: int
    node: str
    gpu: str
    klass: str
    evidence: str
    first: float  # seconds since the start
    last: float
    ratio: float
    confidence: float
    blame_share: float = 0.0  # over the whole recording


@dataclass
class Experts:
    view: ExpertView
    load: Binned = field(default_factory=Binned)  # [expert] assignments, over all layers


class Series:
    """observe(snapshot, at) for each; then read."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tracks: dict[tuple[int, str], Track] = {}
        self.episodes: dict[tuple[object, ...], Episode] = {}
        self.windows: dict[str, Binned] = {}  # workload -> SUMS
        self.latency: dict[tuple[str, str], Binned] = {}  # (workload, figure) -> [sum, readings]
        self.stages: dict[tuple[str, str], Binned] = {}  # (workload, stage) -> STAGE_SUMS
        self.steps: dict[tuple[str, str], Binned] = {}  # (workload, one of STEP_PARTS)
        self.experts: dict[tuple[str, ...], Experts] = {}
        self.last: Snapshot | None = None
        self.busy: Snapshot | None = None  # the last in which operations had ended, if there is any
        self.busy_seconds = 0.0
        self._stepped: dict[tuple[int, str], float] = {}  # start of the last step seen
        self._before: dict[tuple[object, ...], F64] = {}
        self._since = self._at = 0.0  # what is new in a snapshot is of the time between

    def observe(self, snapshot: Snapshot, at: float) -> None:
        """`at`: seconds of the recording up to which data is in the snapshot."""
        self._since, self._at = self._at, max(at, self._at)
        passed = self._at - self._since
        bounds = np.searchsorted(
            snapshot.ranks.comm, np.arange(len(snapshot.communicators) + 1)
        ).tolist()
        sums: dict[str, F64] = {}
        for number, view in enumerate(snapshot.communicators):
            part = slice(bounds[number], bounds[number + 1])
            found = self._communicator(snapshot, view, part, at)
            sums[view.workload] = sums.get(view.workload, 0.0) + found
            self._name(snapshot, view, part, at)
        for workload in sorted(sums):
            sums[workload][SUMS.index("seconds")] = passed
            self.windows.setdefault(workload, Binned(MOST_WINDOWS)).add(at, sums[workload])
        self._engines(snapshot, at)
        self._stages(snapshot, at)
        self._experts(snapshot, at)
        told = snapshot.communicators or snapshot.experts
        if self.last is None or (told and passed > 0):
            self.last = snapshot  # while there was data: the very last one is taken in silence
        if any(found[SUMS.index("instances")] > 0 for found in sums.values()):
            self.busy, self.busy_seconds = snapshot, at
        self.seconds = max(self.seconds, at)

    def _more(self, key: tuple[object, ...], total: F64) -> F64:
        """What a total has grown by; all of it where it began anew."""
        total = np.nan_to_num(total)
        before = self._before.get(key)
        self._before[key] = total
        if before is None or len(before) != len(total):
            return total
        grown = total - before
        return np.where(grown < -1e-9, total, np.maximum(grown, 0.0))

    def _communicator(
        self, snapshot: Snapshot, view: CommunicatorView, part: slice, at: float
    ) -> F64:
        """Takes note of one communicator -> its share of SUMS."""
        r = snapshot.ranks
        key = (view.comm_hash, view.library)
        track = self.tracks.setdefault(key, Track(view))
        track.view = view if view.ranks_seen or track.view is None else track.view
        rank = r.rank[part]
        names = [n.name for n in snapshot.nodes]
        track.nodes = tuple(names[n] if n >= 0 else "" for n in r.node[part].tolist())
        track.gpus = r.gpu[part]
        if view.evidence:
            track.evidence = EVIDENCE[view.evidence]
        wait = self._more((*key, "wait"), r.wait_seconds[part])
        blame = self._more((*key, "blame"), r.blame_seconds[part])
        by_rank = np.zeros((2, view.n_ranks))
        by_rank[:, rank] = wait, blame
        track.wait.spread(self._since, self._at, by_rank[0])
        track.blame.spread(self._since, self._at, by_rank[1])
        track.wait_total = add(track.wait_total, by_rank[0])
        track.blame_total = add(track.blame_total, by_rank[1])
        self._traffic(track, view, at)
        self._serving(key, view, at)
        compute = self._more((*key, "compute"), r.compute_seconds[part])
        transfer = self._more((*key, "transfer"), r.comm_seconds[part])
        return self._sums(key, view, wait, compute, transfer)

    def _traffic(self, track: Track, view: CommunicatorView, at: float) -> None:
        if "skew" in view.load:
            track.skew = view.load["skew"]
        if view.traffic is None or not view.traffic.any():
            return
        track.load.add(at, view.traffic.sum(axis=0).astype(np.float64))
        track.loads.add(at, np.ones(1))
        if view.n_ranks <= MATRIX_RANKS:
            more = view.traffic.astype(np.float64)
            track.traffic = more if track.traffic is None else track.traffic + more

    def _serving(self, key: tuple[int, str], view: CommunicatorView, at: float) -> None:
        """Steps that were not seen before; a snapshot has the latest ones."""
        if view.serving is None or "start" not in view.serving.steps:
            return
        columns = view.serving.steps
        start = columns["start"].astype(np.float64)
        fresh = start > self._stepped.get(key, -np.inf)
        if not fresh.any():
            return
        self._stepped[key] = float(start[fresh].max())
        for part in STEP_PARTS:
            if part not in columns:
                continue
            values = columns[part][fresh].astype(np.float64)
            known = values[np.isfinite(values)]
            binned = self.steps.setdefault((view.workload, part), Binned(MOST_WINDOWS))
            binned.add(at, np.array([known.sum(), float(len(known))]))

    def _sums(
        self,
        key: tuple[int, str],
        view: CommunicatorView,
        wait: F64,
        compute: F64,
        transfer: F64,
    ) -> F64:
        instances = float(self._more((*key, "instances"), np.array([float(view.instances)]))[0])
        timed = self._histograms((*key, "all"), view.durations.values())
        dispatch = self._histograms((*key, "dispatch"), view.dispatch.values())
        combine = self._histograms((*key, "combine"), view.combine.values())
        sent = view.bytes_by_domain
        bytes_sent = self._more(
            (*key, "bytes"),
            np.zeros(len(DOMAINS)) if sent is None else sent.sum(axis=0).astype(np.float64),
        )
        skew = view.load.get("skew", float("nan"))
        known = float(np.isfinite(skew))
        values = {
            "instances": instances,
            "rank_seconds": instances * len(wait),
            "wait": float(wait.sum()),
            "compute": float(compute.sum()),
            "transfer": float(transfer.sum()),
            "own_rounds": instances * len(wait) if compute.any() else 0.0,
            "dispatch": dispatch[0],
            "dispatches": dispatch[1],
            "combine": combine[0],
            "combines": combine[1],
            "other": max(timed[0] - dispatch[0] - combine[0], 0.0),
            "others": max(timed[1] - dispatch[1] - combine[1], 0.0),
            "skew": skew if known else 0.0,
            "skews": known,
        }
        values |= dict(zip([f"bytes_{d}" for d in DOMAINS], bytes_sent.tolist(), strict=True))
        return np.array([values.get(name, 0.0) for name in SUMS])

    def _histograms(
        self, key: tuple[object, ...], found: Iterable[Histogram]
    ) -> tuple[float, float]:
        """(seconds, operations) more than before."""
        histograms = list(found)
        total = np.array(
            [
                sum(h.sum_seconds for h in histograms),
                sum(float(h.bins.sum()) for h in histograms),
            ]
        )
        seconds, count = self._more(key, total).tolist()
        return seconds, count

    def _name(self, snapshot: Snapshot, view: CommunicatorView, part: slice, at: float) -> None:
        r = snapshot.ranks
        for row in (part.start + np.flatnonzero(r.straggler[part])).tolist():
            klass = CLASSES[int(r.klass[row])]
            rank = int(r.rank[row])
            key = (view.comm_hash, view.library, rank, klass)
            node = int(r.node[row])
            have = self.episodes.get(key)
            if have is None:
                have = self.episodes[key] = Episode(
                    workload=view.workload,
                    comm=view.name,
                    rank=rank,
                    node=snapshot.nodes[node].name if node >= 0 else "",
                    gpu=r.gpu[row],
                    klass=klass,
                    evidence=EVIDENCE[int(r.evidence[row])],
                    first=at,
                    last=at,
                    ratio=float("nan"),
                    confidence=0.0,
                )
            have.last = at
            have.ratio = float(np.fmax(have.ratio, r.straggler_ratio[row]))
            have.confidence = max(have.confidence, float(r.confidence[row]))

    def _engines(self, snapshot: Snapshot, at: float) -> None:
        for engine in snapshot.engines:
            for name, value in sorted(engine.values.items()):
                if np.isfinite(value):
                    binned = self.latency.setdefault((engine.workload, name), Binned(MOST_WINDOWS))
                    binned.add(at, np.array([value, 1.0]))

    def _stages(self, snapshot: Snapshot, at: float) -> None:
        """GPU time by stage of the expert layer, where kernels are told."""
        for view in snapshot.stages:
            process = (view.node, view.pid, view.device)
            for stage in sorted(view.count):
                total = np.array(
                    [
                        view.sum_seconds.get(stage, 0.0),
                        float(view.count[stage]),
                        view.busy_seconds.get(stage, 0.0),
                        view.span_seconds,
                    ]
                )
                more = self._more((*process, "stage", stage), total)
                binned = self.stages.setdefault((view.workload, stage), Binned(MOST_WINDOWS))
                binned.add(at, more)

    def _experts(self, snapshot: Snapshot, at: float) -> None:
        for view in snapshot.experts:
            key = (view.workload, view.engine, view.source, view.model)
            have = self.experts.get(key)
            if have is None:
                have = self.experts[key] = Experts(view)
            elif view.window_end <= have.view.window_end:
                continue
            have.view = view
            have.load.add(at, view.load.sum(axis=0))

    def named(self) -> list[Episode]:
        """Who cost the others most, first; with their share of the whole recording."""
        for (comm_hash, library, rank, _), episode in self.episodes.items():
            track = self.tracks[comm_hash, library]  # type: ignore[index]
            total = float(track.blame_total[rank]) if self.seconds > 0 else 0.0  # type: ignore[call-overload]
            episode.blame_share = min(1.0, total / self.seconds) if self.seconds > 0 else 0.0
        return sorted(
            self.episodes.values(),
            key=lambda e: (-e.blame_share, e.workload, e.comm, e.rank, e.klass),
        )
