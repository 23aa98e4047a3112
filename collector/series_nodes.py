"""Snapshot -> metric families of nodes, GPUs and the collector itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lanterne.collector.metrics import CATALOG, Family, Point
from lanterne.collector.snapshot import GpuView, NodeView, Snapshot
from lanterne.service.reload import Reloaded

Rows = Sequence[tuple[tuple[str, ...], float]]

# proto Gpu field -> metric
_GPU_VALUES = {
    "utilization_ratio": "lanterne_gpu_utilization_ratio",
    "memory_used_bytes": "lanterne_gpu_memory_used_bytes",
    "memory_total_bytes": "lanterne_gpu_memory_size_bytes",  # "_total" would read as a counter
    "temperature_celsius": "lanterne_gpu_temperature_celsius",
    "power_watts": "lanterne_gpu_power_watts",
    "energy_joules": "lanterne_gpu_energy_joules_total",
    "sm_clock_hertz": "lanterne_gpu_sm_clock_hertz",
    "sm_clock_max_hertz": "lanterne_gpu_sm_clock_max_hertz",
}
# proto Health field -> metric
_HEALTH = {
    "events_read": "lanterne_node_events_read_total",
    "batches_dropped": "lanterne_node_batches_dropped_total",
    "communicators_unresolved": "lanterne_node_communicators_unresolved",
    "operations_unresolved": "lanterne_node_operations_unresolved_total",
    "blind_graph_launches": "lanterne_node_blind_graph_launches_total",
    "steps": "lanterne_node_steps_total",
    "blind_steps": "lanterne_node_blind_steps_total",
    "processes_untold": "lanterne_node_processes_untold",
}


@dataclass(frozen=True)
class Runtime:
    """What the running collector knows of itself beside the snapshot."""

    version: str
    queue_depth: int
    engine_errors: int
    state_errors: Mapping[str, int] | None = None  # by reason
    state_saved_at: float = 0.0  # UNIX seconds; 0: never
    reload: Reloaded | None = None
    http_refused: Mapping[str, int] | None = None  # by reason
    otlp: Mapping[str, int] | None = None  # exports by status; None: not configured


def families(snapshot: Snapshot) -> Iterator[Family]:
    nodes = [n.name for n in snapshot.nodes]
    yield from _nodes(snapshot.nodes)
    yield from _gpus(snapshot.gpus, nodes)
    yield from _ingest(snapshot)


def runtime_families(runtime: Runtime) -> Iterator[Family]:
    """These exist before the first snapshot, too."""
    yield _family("lanterne_collector_info", [((runtime.version,), 1.0)])
    yield _family("lanterne_collector_queue_depth", [((), float(runtime.queue_depth))])
    yield _family("lanterne_collector_engine_errors_total", [((), float(runtime.engine_errors))])
    yield _labelled("lanterne_collector_state_errors_total", runtime.state_errors or {})
    yield _labelled("lanterne_collector_http_refused_total", runtime.http_refused or {})
    yield _labelled("lanterne_collector_otlp_exports_total", runtime.otlp or {})
    saved = runtime.state_saved_at
    yield _family("lanterne_collector_state_timestamp_seconds", [((), saved)] if saved else [])
    told = runtime.reload
    success = [((), float(told.success))] if told else []
    yield _family("lanterne_collector_config_reload_success", success)
    at = [((), told.succeeded_at)] if told else []
    yield _family("lanterne_collector_config_reload_timestamp_seconds", at)


def _family(name: str, rows: Rows) -> Family:
    """Rows of (label values, value); unknown values are left out."""
    metric = CATALOG[name]
    points = [
        Point(name, dict(zip(metric.labels, key, strict=True)), value)
        for key, value in rows
        if not math.isnan(value)
    ]
    return Family(metric, points)


def _nodes(nodes: tuple[NodeView, ...]) -> Iterator[Family]:
    yield _family("lanterne_node_info", [((n.name, n.agent_version), 1.0) for n in nodes])
    yield _family("lanterne_node_connected", [((n.name,), float(n.connected)) for n in nodes])
    yield _family(
        "lanterne_collector_last_window_timestamp_seconds",
        [((n.name,), n.last_window_end) for n in nodes],
    )
    yield _family(
        "lanterne_collector_clock_offset_seconds",
        [((n.name,), n.clock_offset_seconds) for n in nodes],
    )
    yield _family(
        "lanterne_collector_clock_error_seconds",
        [((n.name,), n.clock_error_seconds) for n in nodes],
    )
    for field, name in _HEALTH.items():
        rows = [((n.name,), float(n.health[field])) for n in nodes if field in n.health]
        yield _family(name, rows)
    yield _family(
        "lanterne_node_events_lost_total",
        [((n.name, cause), float(v)) for n in nodes for cause, v in sorted(n.events_lost.items())],
    )
    yield _family(
        "lanterne_node_source_success",
        [((n.name, source), float(ok)) for n in nodes for source, ok in sorted(n.sources.items())],
    )
    yield _family(
        "lanterne_node_libraries_failed",
        [((n.name,), float(len(n.libraries_failed))) for n in nodes],
    )


def _gpus(gpus: Sequence[GpuView], nodes: list[str]) -> Iterator[Family]:
    keys = [(nodes[g.node], str(g.index)) for g in gpus]
    pairs = list(zip(keys, gpus, strict=True))
    yield _family(
        "lanterne_gpu_info", [((*key, g.uuid, g.bus_id, g.name), 1.0) for key, g in pairs]
    )
    # One labels mapping a GPU, shared by its families: it is formatted once.
    labels = [{"node": node, "gpu": index} for node, index in keys]
    for field, name in _GPU_VALUES.items():
        points = [
            Point(name, shared, float(g.values[field]))
            for shared, g in zip(labels, gpus, strict=True)
            if field in g.values and not math.isnan(g.values[field])
        ]
        yield Family(CATALOG[name], points)
    yield _family(
        "lanterne_gpu_throttle_info",
        [((*key, reason), 1.0) for key, g in pairs for reason in dict.fromkeys(g.throttle_reasons)],
    )


def _ingest(snapshot: Snapshot) -> Iterator[Family]:
    ingest: Mapping[str, int] = snapshot.ingest
    left = dict(ingest)
    batches = _with_prefix(left, "batches_")
    streams = _with_prefix(left, "streams_")
    met_running = _with_prefix(left, "met_running_")
    rows = {"taken": left.pop("rows", 0)} | _with_prefix(left, "rows_")
    named = {
        "lanterne_collector_frames_total": left.pop("frames", None),
        "lanterne_collector_alignment_cells": left.pop("cells_used", None),
        "lanterne_collector_recorded_frames_total": left.pop("recorded_frames", None),
        "lanterne_collector_recorded_bytes_total": left.pop("recorded_bytes", None),
    }
    yield _labelled("lanterne_collector_batches_total", batches)
    yield _labelled("lanterne_collector_batches_refused_total", snapshot.refused)
    yield _labelled("lanterne_collector_streams_refused_total", streams)
    yield _labelled("lanterne_collector_rows_total", rows)
    yield _labelled("lanterne_collector_dropped_total", left)
    for name, value in named.items():
        yield _family(name, [] if value is None else [((), float(value))])
    yield _family("lanterne_collector_snapshot_timestamp_seconds", [((), snapshot.taken_at)])
    yield _family("lanterne_collector_ranks", [((), float(len(snapshot.ranks.rank)))])
    yield _family("lanterne_collector_communicators", [((), float(len(snapshot.communicators)))])
    yield _labelled("lanterne_collector_communicators_met_running", met_running)


def _with_prefix(counts: dict[str, int], prefix: str) -> dict[str, int]:
    """Takes these counts out, their names without the prefix."""
    names = [name for name in counts if name.startswith(prefix)]
    return {name.removeprefix(prefix): counts.pop(name) for name in names}


def _labelled(name: str, counts: Mapping[str, int]) -> Family:
    return _family(name, [((label,), float(value)) for label, value in sorted(counts.items())])
