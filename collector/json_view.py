"""A Snapshot as JSON. Unknown numbers are null, hashes are hex texts (JSON numbers lose bits)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from lanterne.collector.snapshot import (
    CLASSES,
    DOMAINS,
    EVIDENCE,
    CommunicatorView,
    Histogram,
    Ranks,
    Snapshot,
)

TRAFFIC_RANKS = 128  # a matrix of more ranks is left out of the JSON


def snapshot_json(snapshot: Snapshot) -> bytes:
    """The whole snapshot; `ranks` is columns, as in snapshot.py, one entry a rank."""
    return msgspec.json.encode(
        {
            "taken_at": snapshot.taken_at,
            "span_seconds": snapshot.span_seconds,
            "nodes": snapshot.nodes,
            "communicators": [_communicator(c) for c in snapshot.communicators],
            "ranks": _ranks(snapshot.ranks),
            "gpus": tuple(snapshot.gpus),
            "processes": tuple(snapshot.processes),
            "ingest": snapshot.ingest,
            "refused": snapshot.refused,
        },
        enc_hook=_plain,  # msgspec writes NaN as null by itself
    )


def nodes_json(snapshot: Snapshot) -> bytes:
    """Of each node what its agent last said; cheap, to be asked for often."""
    return msgspec.json.encode(
        {"taken_at": snapshot.taken_at, "nodes": snapshot.nodes}, enc_hook=_plain
    )


def _communicator(comm: CommunicatorView) -> dict[str, object]:
    sent, traffic = comm.bytes_by_domain, comm.traffic
    return {
        "comm_hash": f"0x{comm.comm_hash:016x}",
        "library": comm.library,
        "workload": comm.workload,
        "name": comm.name,
        "role": comm.role,
        "n_ranks": comm.n_ranks,
        "ranks_seen": comm.ranks_seen,
        "evidence": EVIDENCE[comm.evidence],
        "absent_reason": comm.absent_reason,
        "absent_code": comm.absent_code,
        "wait_share": comm.wait_share,
        "complete_share": comm.complete_share,
        "instances": comm.instances,
        "waits_for": None if comm.waits_for < 0 else comm.waits_for,
        "durations": _by_operation(comm.durations),
        "waits": _by_operation(comm.waits),
        "calls": [
            {"op": op, "source": source, "calls": n, "errors": errors, "bytes": size}
            for (op, source), (n, errors, size) in comm.calls.items()
        ],
        "dispatch": {source: _histogram(h) for source, h in comm.dispatch.items()},
        "combine": {source: _histogram(h) for source, h in comm.combine.items()},
        "bytes_by_domain": None
        if sent is None
        else {domain: sent[:, d] for d, domain in enumerate(DOMAINS)},
        "traffic": None if traffic is None or len(traffic) > TRAFFIC_RANKS else traffic,
        "load": comm.load,
    }


def _by_operation(found: Mapping[tuple[str, str], Histogram]) -> list[dict[str, object]]:
    return [{"op": op, "source": source, **_histogram(h)} for (op, source), h in found.items()]


def _histogram(histogram: Histogram) -> dict[str, object]:
    return {
        "bins": histogram.bins,
        "count": int(histogram.bins.sum()),
        "sum_seconds": histogram.sum_seconds,
    }


def _ranks(ranks: Ranks) -> dict[str, object]:
    columns = {name: getattr(ranks, name) for name in Ranks.__dataclass_fields__}
    columns["evidence"] = [EVIDENCE[i] for i in ranks.evidence.tolist()]
    columns["class"] = [CLASSES[i] for i in ranks.klass.tolist()]
    del columns["klass"]
    return columns


def _plain(value: Any) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} in a snapshot cannot be written as JSON")
