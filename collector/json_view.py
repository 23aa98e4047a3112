"""A Snapshot as JSON. Unknown numbers are null, hashes are hex texts (JSON numbers lose bits)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from lanterne.collector.snapshot import (
    CLASSES,
    DOMAINS,
    EVIDENCE,
    METHODS,
    CommunicatorView,
    Histogram,
    Ranks,
    Snapshot,
)

TOKEN_RANKS = 4096  # figures by rank of larger communicators are left out of the JSON
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
            "jobs": snapshot.jobs,
            "rank_steps": snapshot.rank_steps,
            "stages": snapshot.stages,
            "gpus": tuple(snapshot.gpus),
            "processes": tuple(snapshot.processes),
            "ingest": snapshot.ingest,
            "refused": snapshot.refused,
        },
        enc_hook=_plain,  # msgspec writes NaN as null by itself
    )


def communicators_json(snapshot: Snapshot, *, comm_hash: str, workload: str, name: str) -> bytes:
    """The communicators that have all that is asked for ("": anything), and their ranks."""
    chosen = [
        number
        for number, comm in enumerate(snapshot.communicators)
        if comm_hash in ("", f"0x{comm.comm_hash:016x}")
        and workload in ("", comm.workload)
        and name in ("", comm.name)
    ]
    rows = np.flatnonzero(np.isin(snapshot.ranks.comm, chosen))
    ranks = _chosen(snapshot.ranks, rows)
    place = {number: at for at, number in enumerate(chosen)}
    nodes = [snapshot.nodes[n].name for n in ranks.node.tolist()]
    comm = np.array([place[n] for n in ranks.comm.tolist()], dtype=np.int64)
    shown = _ranks(replace(ranks, comm=comm))
    return msgspec.json.encode(
        {
            "taken_at": snapshot.taken_at,
            "communicators": [_communicator(snapshot.communicators[n]) for n in chosen],
            "ranks": {**shown, "node": nodes},
        },
        enc_hook=_plain,
    )


def _chosen(ranks: Ranks, rows: np.ndarray) -> Ranks:
    """These rows of every column that is known."""
    columns: dict[str, Any] = {}
    for name in Ranks.__dataclass_fields__:
        column = getattr(ranks, name)
        if not len(column):
            columns[name] = column
        elif isinstance(column, tuple):
            columns[name] = tuple(column[i] for i in rows.tolist())
        else:
            columns[name] = column[..., rows]
    return Ranks(**columns)


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
        "hang": comm.hang,
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
        "serving": comm.serving,
        "load_share": _bounded(comm.load_share),
        "tokens": _bounded(comm.tokens),
        "wait_matrix": comm.wait_matrix,
        "matrix_absent": comm.matrix_absent,
        "recoverable_share": comm.recoverable_share,
    }


def _bounded(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None or len(values) > TOKEN_RANKS else values


def _by_operation(found: Mapping[tuple[str, str], Histogram]) -> list[dict[str, object]]:
    return [{"op": op, "source": source, **_histogram(h)} for (op, source), h in found.items()]


def _histogram(histogram: Histogram) -> dict[str, object]:
    shown: dict[str, object] = {
        "bins": histogram.bins,
        "count": int(histogram.bins.sum()),
        "sum_seconds": histogram.sum_seconds,
    }
    return shown if histogram.longest is None else {**shown, "longest": histogram.longest}


def _ranks(ranks: Ranks) -> dict[str, object]:
    columns = {name: getattr(ranks, name) for name in Ranks.__dataclass_fields__}
    columns["evidence"] = [EVIDENCE[i] for i in ranks.evidence.tolist()]
    columns["method"] = [METHODS[i] for i in ranks.method.tolist()]
    for name in ("wait_by_source", "blame_by_source"):
        by_source = columns.pop(name)
        for e in range(1, len(by_source)):
            if not np.isnan(by_source[e]).all():
                columns[f"{name.split('_')[0]}_seconds_{EVIDENCE[e]}"] = by_source[e]
    columns["class"] = [CLASSES[i] for i in ranks.klass.tolist()]
    del columns["klass"]
    if len(ranks.rank):  # what was not known is left out
        columns = {name: column for name, column in columns.items() if len(column)}
    return columns


def _plain(value: Any) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} in a snapshot cannot be written as JSON")
