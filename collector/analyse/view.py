"""The engine's state -> the immutable Snapshot that every surface renders."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe, reasons
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.figures import Figures
from lanterne.collector.analyse.operations import operations, waits
from lanterne.collector.analyse.who import Node
from lanterne.collector.batch import Head
from lanterne.collector.snapshot import (
    CommunicatorView,
    GpuView,
    Later,
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
    figures = Figures(engine, live)
    heads = tuple(node.head for node in engine.registry.nodes)
    nodes = tuple(_node(engine, node, connected) for node in engine.registry.nodes)
    return Snapshot(
        taken_at=now,
        span_seconds=2 * engine.config.window_seconds,
        nodes=nodes,
        communicators=tuple(_communicator(engine, figures, i) for i in range(len(live))),
        ranks=_ranks(engine, figures),
        gpus=Later(lambda: _gpus(heads)),
        processes=Later(lambda: tuple(chain.from_iterable(h.processes for h in heads))),
        ingest={**ingest, **engine.engine_counts()},
        refused=dict(refused),
    )


def _ranks(engine: Engine, f: Figures) -> Ranks:
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


def _communicator(engine: Engine, f: Figures, i: int) -> CommunicatorView:
    number, slot = f.live[i]
    window = engine.window
    low, high = np.searchsorted(f.comm, [i, i + 1])
    blames = f.blame_known[low:high]
    evidence = int(f.evidence[i])
    waits_for = -1
    if evidence and len(blames) and float(blames.max()) >= MIN_BLAME:
        waits_for = int(f.rank[low + int(blames.argmax())])
    instances = int(window.instances[number])
    durations, calls, dispatch, combine = operations(f.histograms.get(number, []))
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
        waits=waits(f.waits.get(number, [])),
        calls=calls,
        dispatch=dispatch,
        combine=combine,
        bytes_by_domain=(
            engine.traffic.by_domain[slot.base : slot.base + slot.ranks].copy()
            if number in engine.traffic.known
            else None
        ),
        traffic=matrix,
        load=_load(engine.loads.of(slot.base, slot.ranks), matrix),
    )


def _load(combined: I64 | None, matrix: I64 | None) -> dict[str, float]:
    """`combined`: what each rank sent back; without it, what it received of whatever kind."""
    if combined is not None:
        load = combined.astype(np.float64)
    elif matrix is not None and matrix.any():
        load = moe.rank_load(matrix)
    else:
        return {}
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
        estimate = engine.clock_of(engine.registry.nodes[number].head)
        worst = max(worst, math.inf if estimate is None else estimate.error_ns / NS)
    return worst


def _node(engine: Engine, node: Node, connected: Collection[str] | None) -> NodeView:
    head = node.head
    estimate = engine.clock_of(head)
    return NodeView(
        name=node.name,
        epoch=head.epoch,
        agent_version=head.agent_version,
        connected=True if connected is None else node.name in connected,
        last_window_end=(head.end_ns + head.realtime_offset_ns) / NS,
        clock_offset_seconds=math.nan if estimate is None else estimate.offset_ns / NS,
        clock_error_seconds=math.nan if estimate is None else estimate.error_ns / NS,
        health=head.health,
        events_lost=head.events_lost,
        sources=head.sources,
        libraries_failed=head.libraries_failed,
    )


def _gpus(heads: tuple[Head, ...]) -> tuple[GpuView, ...]:
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
        for number, head in enumerate(heads)
        for gpu in head.gpus
    )
