"""What a replayed recording showed, as figures (JSON)."""

from __future__ import annotations

import math

import numpy as np

from lanterne.collector.replay import Source
from lanterne.collector.replay_series import Episode, Experts, Series, Track
from lanterne.collector.snapshot import DOMAINS


def tracks(series: Series) -> list[Track]:
    """Those with the most waiting first."""
    return sorted(
        series.tracks.values(),
        key=lambda t: (-float(t.wait_total.sum()), t.view.workload, t.view.name, t.view.comm_hash),
    )


def as_json(source: Source, series: Series) -> dict[str, object]:
    named = series.named()
    return {
        "format": "recording",
        "recording": {
            "files": list(source.files),
            "version": source.header.version,
            "start": source.start,
            "seconds": source.seconds,
            "frames": source.frames,
            "batches": source.batches,
            "batches_refused": source.refused,
            "torn_bytes": source.damage.torn_bytes,
            "damaged_blocks": source.damage.blocks,
        },
        "cause": named[0].klass if named else "none",
        "recoverable_share": recoverable(series),
        "verdicts": [_verdict(e) for e in named],
        "communicators": [_track(t, series.seconds) for t in tracks(series)],
        "experts": [_experts(e) for _, e in sorted(series.experts.items())],
    }


def recoverable(series: Series) -> float:
    """Of the communicator that loses most to ranks that are named: the share that would return."""
    lost: dict[tuple[str, str], float] = {}
    for episode in series.named():
        key = (episode.workload, episode.comm)
        lost[key] = lost.get(key, 0.0) + episode.blame_share
    return min(1.0, max(lost.values(), default=0.0))


def _verdict(e: Episode) -> dict[str, object]:
    return {
        "rank": e.rank,
        "class": e.klass,
        "blame_share": e.blame_share,
        "workload": e.workload,
        "comm": e.comm,
        "node": e.node,
        "gpu": e.gpu,
        "evidence": e.evidence,
        "straggler_ratio": _known(e.ratio),
        "confidence": e.confidence,
        "first_seconds": e.first,
        "last_seconds": e.last,
    }


def _track(t: Track, span: float) -> dict[str, object]:
    ranks = max(len(t.wait_total), 1)
    return {
        "workload": t.view.workload,
        "comm": t.view.name,
        "comm_hash": f"0x{t.view.comm_hash:016x}",
        "n_ranks": t.view.n_ranks,
        "evidence": t.evidence,
        "absent_reason": t.view.absent_reason if t.evidence == "none" else "",
        "instances": t.view.instances,
        "wait_share": _known(float(t.wait_total.sum()) / ranks / span) if span > 0 else None,
        "wait_seconds": t.wait_total.tolist(),
        "blame_seconds": t.blame_total.tolist(),
        "bin_seconds": t.wait.width,
        "wait_seconds_by_bin": [[_known(x) for x in row] for row in t.wait.matrix().tolist()],
        "load_skew": _known(t.skew),
        "bytes_by_domain": None
        if t.view.bytes_by_domain is None
        else dict(zip(DOMAINS, t.view.bytes_by_domain.sum(axis=0).tolist(), strict=True)),
    }


def _experts(e: Experts) -> dict[str, object]:
    load = np.nan_to_num(e.load.matrix()).sum(axis=1)
    return {
        "workload": e.view.workload,
        "engine": e.view.engine,
        "source": e.view.source,
        "model": e.view.model,
        "unit": e.view.unit,
        "load": load.tolist(),
        "summary": {k: _known(v) for k, v in sorted(e.view.summary.items())},
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
