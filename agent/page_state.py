"""What the agent's own page and `systemctl status` show of it."""

from __future__ import annotations

import time
from dataclasses import replace

from lanterne.agent.encode import Health
from lanterne.agent.export import AgentState
from lanterne.agent.parts import Parts
from lanterne.service.reload import Reloaded


def page_state(
    before: AgentState, parts: Parts, health: Health, reload: Reloaded | None
) -> AgentState:
    """After a window; `before` says who the agent is."""
    uprobes, registry = parts.uprobes, parts.registry
    totals = parts.stream.totals()
    counters = uprobes.counters if uprobes else {}
    libraries: dict[tuple[str, str], int] = {}
    for library in uprobes.attacher.libraries.values() if uprobes else ():
        pair = (library.kind, library.state)
        libraries[pair] = libraries.get(pair, 0) + 1
    stats = uprobes.run_stats() if uprobes else None
    batches, size = parts.stream.queued
    return replace(
        before,
        events_read=health.events_read,
        events_submitted=health.events_submitted,
        events_lost=health.events_lost,
        nested_calls=counters.get("nested", 0),
        orphan_returns=counters.get("orphan_return", 0),
        comms=len(registry.alive()),
        comms_unresolved=health.communicators_unresolved,
        comms_evicted=registry.evicted,
        comm_events=uprobes.comm_events.read if uprobes else 0,
        comm_creations_lost=registry.creations_lost,
        operations_unresolved=health.operations_unresolved,
        device_operations=parts.pipeline.windows.device.operations,
        device_unmatched=parts.pipeline.windows.device.unmatched,
        device_unplaced=parts.pipeline.windows.device.unplaced,
        device_waits_left_out=parts.pipeline.windows.waits_left_out,
        splits_unmatched=parts.pipeline.windows.splits.unmatched,
        kernels=parts.pipeline.windows.kernels.read,
        kernel_operations=parts.pipeline.windows.kernels.operations,
        kernels_left_out=dict(parts.pipeline.windows.kernels.left_out),
        groups_forced=parts.pipeline.groups_forced,
        blind_graph_launches=health.blind_graph_launches,
        steps=health.steps,
        blind_steps=health.blind_steps,
        processes_untold=health.processes_untold,
        probe_runs=stats[0] if stats else None,
        probe_run_seconds=stats[1] / 1e9 if stats else None,
        processes=len(uprobes.attacher.processes) if uprobes else 0,
        source_success=health.source_success,
        libraries=libraries,
        batches_sent=totals.sent,
        batches_resent=totals.resent,
        batches_acked=totals.acknowledged,
        batches_duplicate=totals.duplicates,
        batches_postponed=totals.retries,
        batches_dropped=totals.lost(),
        spool=parts.keeper.state() if parts.keeper else None,
        connects=totals.connects,
        connection_failures=totals.failures,
        connected=parts.stream.connected,
        queue_batches=batches,
        queue_bytes=size,
        stride=parts.stream.stride,
        expert_loads=dict(parts.experts.counts.taken),
        expert_loads_refused=parts.experts.refused(),
        last_window_seconds=time.time(),
        reload=reload,
        gpus=parts.sources.gpus,
        host=parts.sources.host,
        kubernetes_requests=dict(parts.kubernetes.requests) if parts.kubernetes else {},
    )


def status(state: AgentState, probes: bool) -> str:
    """One line for `systemctl status`."""
    return (
        f"probes {'loaded' if probes else 'NOT loaded, see lanterne-agent doctor'}, "
        f"{state.processes} processes, {state.comms} communicators, "
        f"{'reporting' if state.connected else 'no collector answers'}"
    )
