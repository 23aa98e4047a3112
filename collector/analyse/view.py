"""The engine's state -> the immutable Snapshot that every surface renders."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe, ops, reasons, totals
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.registry import Node, Slot
from lanterne.collector.snapshot import (
    EVIDENCE,
    CommunicatorView,
    GpuView,
    Histogram,
    NodeView,
    Ranks,
    Snapshot,
)

if TYPE_CHECKING:
    from lanterne.collector.analyse.engine import Engine

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
NS = 1e9
MIN_BLAME = 0.001  # of the span: below, nobody is waited for


def build(
    engine: Engine,
    now: float,
    ingest: Mapping[str, int],
    refused: Mapping[str, int],
    connected: Collection[str] | None,
) -> Snapshot:
    """Render everything at once; `engine` is not changed."""
    live = [(n, s) for n, s in enumerate(engine.registry.slots) if s is not None]
    figures = _Figures(engine, live)
    nodes = tuple(_node(engine, node, connected) for node in engine.registry.nodes)
    return Snapshot(
        taken_at=now,
        span_seconds=2 * engine.config.window_seconds,
        nodes=nodes,
        communicators=tuple(_communicator(engine, figures, i) for i in range(len(live))),
        ranks=_ranks(engine, figures),
        gpus=_gpus(engine),
        processes=tuple(chain.from_iterable(n.batch.processes for n in engine.registry.nodes)),
        ingest={**ingest, **engine.engine_counts()},
        refused=dict(refused),
    )


class _Figures:
    """Per live communicator and per member, worked out once for both views."""

    def __init__(self, engine: Engine, live: list[tuple[int, Slot]]) -> None:
        window, registry = engine.window, engine.registry
        self.live = live
        self.slots = np.array([n for n, _ in live], dtype=np.int64)
        bases = np.array([s.base for _, s in live], dtype=np.int64)
        sizes = np.array([s.ranks for _, s in live], dtype=np.int64)
        self.comm = np.repeat(np.arange(len(live)), sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(live) else np.zeros(0, int)
        self.rank = np.arange(len(self.comm)) - np.repeat(starts, sizes)
        self.member = np.repeat(bases, sizes) + self.rank
        seen = registry.process[self.member] >= 0
        self.comm, self.rank, self.member = self.comm[seen], self.rank[seen], self.member[seen]
        self.seen = np.bincount(self.comm, minlength=len(live))
        self.outcome = window.current.outcome[self.slots] + window.closed.outcome[self.slots]
        evidence = window.current.evidence[self.slots] + window.closed.evidence[self.slots]
        # What most instances rest on; on a tie the better evidence.
        self.evidence = np.where(evidence.any(axis=1), evidence.argmax(axis=1), 0)
        self.evidence[~reasons.shown(self.outcome)] = 0
        self.span = window.spans()[self.slots]
        of = self.evidence[self.comm]
        with np.errstate(invalid="ignore", divide="ignore"):
            span = np.where(self.span > 0, self.span, np.nan)[self.comm]
            wait = window.current.wait[of, self.member] + window.closed.wait[of, self.member]
            blame = window.current.blame[of, self.member] + window.closed.blame[of, self.member]
            self.wait_share = np.where(of > 0, np.clip(wait / span, 0, 1), np.nan)
            self.blame_share = np.where(of > 0, np.clip(blame / span, 0, 1), np.nan)
        shares = np.bincount(self.comm, np.nan_to_num(self.wait_share), minlength=len(live))
        self.mean_share = shares / np.maximum(self.seen, 1)
        self.blame_known = np.nan_to_num(self.blame_share)
        self.histograms = _by_slot(engine.summaries)
        self.waits = _by_slot(engine.waits)


def _by_slot(table: totals.Grouped) -> dict[int, list[tuple[int, int, int, I64]]]:
    """slot -> (op, role, evidence, values) rows."""
    found: dict[int, list[tuple[int, int, int, I64]]] = {}
    for key, row in table.index.items():
        slot, op, role, evidence = totals.unkey(key)
        found.setdefault(slot, []).append((op, role, evidence, table.values[row]))
    return found


def _ranks(engine: Engine, f: _Figures) -> Ranks:
    window, registry, v = engine.window, engine.registry, engine.verdicts
    of = f.evidence[f.comm]
    known = of > 0
    member = f.member
    total = np.where(known, window.wait_total[of, member] / NS, np.nan)
    blamed = np.where(known, window.blame_total[of, member] / NS, np.nan)
    named = v.named[member] & known
    return Ranks(
        comm=f.comm.astype(np.int64),
        rank=f.rank.astype(np.int64),
        node=registry.node[member].astype(np.int64),
        pid=registry.process_pid[registry.process[member]],
        gpu=_texts(registry.gpu_index[member]),
        evidence=of.astype(np.int64),
        wait_seconds=total,
        blame_seconds=blamed,
        comm_seconds=window.comm_total[member] / NS,
        compute_seconds=np.where(known, window.compute_total[member] / NS, np.nan),
        wait_share=f.wait_share,
        blame_share=f.blame_share,
        own_seconds=np.where(known, v.own[member] / NS, np.nan),
        straggler_ratio=np.where(known, v.ratio[member], np.nan),
        straggler=named.astype(np.int64),
        klass=np.where(named, v.klass[member], 0),
        confidence=np.where(named, v.confidence[member], 0.0),
        samples=f.outcome[f.comm, w.SCORED],
    )


def _texts(numbers: npt.NDArray[np.int32]) -> tuple[str, ...]:
    """Numbers as label values, "" for those below 0; each text made once."""
    distinct, inverse = np.unique(numbers, return_inverse=True)
    texts = [str(n) if n >= 0 else "" for n in distinct.tolist()]
    return tuple(map(texts.__getitem__, inverse.tolist()))


def _communicator(engine: Engine, f: _Figures, i: int) -> CommunicatorView:
    number, slot = f.live[i]
    window = engine.window
    low, high = np.searchsorted(f.comm, [i, i + 1])
    blames = f.blame_known[low:high]
    evidence = int(f.evidence[i])
    waits_for = -1
    if evidence and len(blames) and float(blames.max()) >= MIN_BLAME:
        waits_for = int(f.rank[low + int(blames.argmax())])
    instances = int(window.instances[number])
    durations, calls, dispatch, combine = _operations(f.histograms.get(number, []))
    matrix = engine.traffic.matrix(number)
    absent_code, absent_text = "", ""
    if not evidence:
        absent_code, absent_text = reasons.absent(
            f.outcome[i],
            ranks=slot.ranks,
            seen=int(f.seen[i]),
            joining=engine.joining.waiting(number),
            clock_error_s=_clock_error(engine, f.member[low:high]),
        )
    return CommunicatorView(
        comm_hash=slot.comm_hash,
        library=slot.library,
        workload=slot.workload,
        name=slot.label,
        role=slot.role,
        n_ranks=slot.ranks,
        ranks_seen=int(f.seen[i]),
        evidence=evidence,
        absent_reason=absent_text,
        absent_code=absent_code,
        wait_share=float(f.mean_share[i]) if evidence else math.nan,
        complete_share=int(window.complete_total[number]) / instances if instances else math.nan,
        instances=instances,
        waits_for=waits_for,
        last_end_ns=int(window.last_end[number]),
        durations=durations,
        waits=_waits(f.waits.get(number, [])),
        calls=calls,
        dispatch=dispatch,
        combine=combine,
        bytes_by_domain=(
            engine.traffic.by_domain[slot.base : slot.base + slot.ranks].copy()
            if number in engine.traffic.known
            else None
        ),
        traffic=matrix,
        load=_load(matrix),
    )


def _load(matrix: I64 | None) -> dict[str, float]:
    if matrix is None or not matrix.any():
        return {}
    load = moe.rank_load(matrix)
    return {
        "skew": moe.skew(load),
        "gini": moe.gini(load),
        "balancedness": moe.balancedness(load),
    }


def _clock_error(engine: Engine, members: I64) -> float:
    """Seconds by which the arrivals of a communicator's nodes may be wrong, at worst."""
    worst = 0.0
    for number in np.unique(engine.registry.node[members]).tolist():
        if number < 0:
            continue
        estimate = engine.clock_of(engine.registry.nodes[number].batch)
        worst = max(worst, math.inf if estimate is None else estimate.error_ns / NS)
    return worst


Durations = dict[tuple[str, str], Histogram]
Calls = dict[tuple[str, str], tuple[int, int, int]]
Halves = tuple[dict[str, Histogram], dict[str, Histogram]]


def _operations(
    rows: list[tuple[int, int, int, I64]],
) -> tuple[
    Durations,
    dict[tuple[str, str], tuple[int, int, int]],
    dict[str, Histogram],
    dict[str, Histogram],
]:
    """-> durations and calls by (op, source), dispatch and combine by source."""
    durations: Durations = {}
    calls: Calls = {}
    halves: Halves = ({}, {})
    for op, role, evidence, values in rows:
        source = EVIDENCE[evidence]
        kind = (ops.name(op), source)
        before = calls.get(kind, (0, 0, 0))
        head = values[: totals.DURATION].tolist()
        calls[kind] = (before[0] + head[0], before[1] + head[1], before[2] + head[2])
        if evidence not in (ops.DEVICE, ops.BLOCKING):
            continue
        new = Histogram(values[4:].copy(), int(values[totals.DURATION]) / NS)
        durations[kind] = _add(durations.get(kind), new)
        if role:
            half = halves[role - 1]
            half[source] = _add(half.get(source), new)
    return durations, calls, halves[0], halves[1]


def _add(a: Histogram | None, b: Histogram) -> Histogram:
    if a is None:
        return b
    return Histogram(a.bins + b.bins, a.sum_seconds + b.sum_seconds)


def _waits(rows: list[tuple[int, int, int, I64]]) -> Durations:
    return {
        (ops.name(op), EVIDENCE[evidence]): Histogram(values[1:].copy(), int(values[0]) / NS)
        for op, _, evidence, values in rows
    }


def _node(engine: Engine, node: Node, connected: Collection[str] | None) -> NodeView:
    batch = node.batch
    estimate = engine.clock_of(batch)
    return NodeView(
        name=node.name,
        epoch=batch.epoch,
        agent_version=batch.agent_version,
        connected=True if connected is None else node.name in connected,
        last_window_end=(batch.end_ns + batch.realtime_offset_ns) / NS,
        clock_offset_seconds=math.nan if estimate is None else estimate.offset_ns / NS,
        clock_error_seconds=math.nan if estimate is None else estimate.error_ns / NS,
        health=batch.health,
        events_lost=batch.events_lost,
        sources=batch.sources,
        libraries_failed=batch.libraries_failed,
    )


def _gpus(engine: Engine) -> tuple[GpuView, ...]:
    return tuple(
        GpuView(
            node=number,
            index=gpu.index,
            uuid=gpu.uuid,
            bus_id=gpu.bus_id,
            name=gpu.name,
            values=gpu.values,
            throttle_reasons=gpu.throttle_reasons,
        )
        for number, node in enumerate(engine.registry.nodes)
        for gpu in node.batch.gpus
    )
