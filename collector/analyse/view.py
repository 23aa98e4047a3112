"""The engine's state -> the immutable Snapshot that every surface renders."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import hang, load, reasons, victims
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.figures import Figures
from lanterne.collector.analyse.operations import operations, waits
from lanterne.collector.analyse.paths import NO_MATRIX
from lanterne.collector.analyse.who import Node
from lanterne.collector.batch import Head
from lanterne.collector.snapshot import (
    CommunicatorView,
    GpuView,
    Later,
    NodeView,
    Place,
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
        communicators=tuple(_communicator(engine, figures, i, now) for i in range(len(live))),
        ranks=_ranks(engine, figures),
        gpus=Later(lambda: _gpus(heads)),
        processes=Later(lambda: tuple(chain.from_iterable(h.processes for h in heads))),
        ingest={**ingest, **engine.engine_counts()},
        refused=dict(refused),
        stages=engine.stages.views(figures, engine.window, engine.registry),
        experts=engine.experts.views(engine.now_ns, int(engine.config.idle_seconds * NS)),
        jobs=victims.jobs(engine, figures),
        engines=engine.experts.engines(engine.now_ns, int(engine.config.idle_seconds * NS)),
        advice=engine.advisor.advice(),
        places=_places(heads),
        rank_steps=engine.accounts.rank_steps.views(
            {number: i for i, (number, _) in enumerate(live)}, engine.registry
        ),
    )


def _ranks(engine: Engine, f: Figures) -> Ranks:
    window, registry, v = engine.window, engine.registry, engine.verdicts
    causes = engine.causes
    of = f.evidence[f.comm]
    known = of > 0
    member = f.member
    total = np.where(known, window.wait_total[of, member] / NS, np.nan)
    blamed = np.where(known, window.blame_total[of, member] / NS, np.nan)
    named = causes.named[member] & known
    ever = window.ever()[f.slots][f.comm].T
    ranks = Ranks(
        comm=f.comm.astype(np.int64),
        rank=f.rank.astype(np.int64),
        node=registry.node[member].astype(np.int64),
        pid=registry.process_pid[registry.process[member]],
        gpu=_texts(registry.gpu_index[member]),
        evidence=of.astype(np.int64),
        wait_seconds=total,
        blame_seconds=blamed,
        comm_seconds=window.comm_total[member] / NS,
        compute_seconds=np.where(ever.any(axis=0), window.compute_total[member] / NS, np.nan),
        wait_share=f.wait_share,
        blame_share=f.blame_share,
        own_seconds=np.where(known, v.own[member] / NS, np.nan),
        straggler_ratio=np.where(known, v.ratio[member], np.nan),
        straggler=named.astype(np.int64),
        klass=np.where(named, causes.klass[member], 0),
        confidence=np.where(named, causes.confidence[member], 0.0),
        samples=f.outcome[f.comm, w.SCORED],
        recoverable_share=np.where(named, causes.share[member], np.where(known, 0.0, np.nan)),
        why=causes.texts(member, named),
        method=np.where(named, v.method[member], 0).astype(np.int64),
        found_ratio=np.where(named, v.excess[member], np.nan),
        score=np.where(named, v.score[member], np.nan),
        compared=v.peers[member].astype(np.int64),
        windows=np.where(named, v.windows[member], 0).astype(np.int64),
        wait_by_source=np.where(ever, window.wait_total[:, member] / NS, np.nan),
        blame_by_source=np.where(ever, window.blame_total[:, member] / NS, np.nan),
    )
    return hang.overlay(engine.hangs, ranks, f.slots)


def _places(heads: tuple[Head, ...]) -> dict[tuple[int, int], Place]:
    return {
        (node, pid): Place(*place)
        for node, head in enumerate(heads)
        if head.process_places
        for (pid, _), place in zip(head.process_keys, head.process_places, strict=True)
        if place
    }


def _texts(numbers: npt.NDArray[np.int32]) -> tuple[str, ...]:
    """Numbers as label values, "" for those below 0; each text made once."""
    distinct, inverse = np.unique(numbers, return_inverse=True)
    texts = [str(n) if n >= 0 else "" for n in distinct.tolist()]
    return tuple(map(texts.__getitem__, inverse.tolist()))


def _communicator(engine: Engine, f: Figures, i: int, now: float) -> CommunicatorView:
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
    combined = engine.loads.of(slot.base, slot.ranks)
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
        waits=waits(
            f.waits.get(number, []),
            engine.accounts.longest.of(number, lambda at: now - (engine.now_ns - at) / NS),
        ),
        calls=calls,
        dispatch=dispatch,
        combine=combine,
        bytes_by_domain=(
            engine.traffic.by_domain[slot.base : slot.base + slot.ranks].copy()
            if number in engine.traffic.known
            else None
        ),
        traffic=matrix,
        load=load.figures(combined, matrix),
        load_share=load.shares(combined, matrix),
        tokens=engine.loads.tokens(slot.base, slot.ranks),
        wait_matrix=_seconds(engine.paths.closed.get(number)),
        matrix_absent="" if number in engine.paths.closed else NO_MATRIX,
        recoverable_share=engine.causes.recoverable.get(number, math.nan),
        hang=hang.shown(engine.hangs.found.get(number)),
        serving=engine.accounts.serving.of(number),
    )


def _seconds(matrix: F64 | None) -> F64 | None:
    return None if matrix is None else matrix / NS


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
