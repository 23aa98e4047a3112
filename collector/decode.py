"""One encoded Batch -> DecodedBatch: the only reader of what agents send.

`decode` either returns a DecodedBatch whose every value is in the range that `align` and `analyse`
rely on, or raises BatchRefused(code, reason); no other exception leaves it, whatever the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError

from lanterne.collector import columns
from lanterne.collector.batch import (
    NO_REPORTS,
    NO_STRIDES,
    U32,
    Communicators,
    DecodedBatch,
    Head,
    Reports,
)
from lanterne.collector.checks import Limits, check_node, refuse, text
from lanterne.collector.columns import SPAN_LIMIT_NS, TIME_LIMIT_NS
from lanterne.collector.errors import BatchRefused
from lanterne.collector.newer import leave_out_unknown
from lanterne.collector.readings import check_gpu, check_process, place_of
from lanterne.collector.reports import check_engine_reading, check_expert_load
from lanterne.proto import telemetry_pb2 as pb

SCHEMA = 1
MAX_RANKS = 65_536
MAX_STRIDE = 65_536
CACHED_COMMUNICATORS = 64  # a longer list is put together anew every time

LIMITS = Limits()
NO_COMMUNICATORS = Communicators((), (), (), (), (), (), (), (), (), (), (), ())


def decode(
    data: bytes,
    *,
    received_ns: int = 0,
    limits: Limits = LIMITS,
    left_out: Counter[str] | None = None,
) -> DecodedBatch:
    """Decode and check one Batch. What a later version's agent says and is not known here is left
    out and counted in `left_out` (see `newer`).

    Raises BatchRefused; its code is one of: size, proto, schema, node, text, epoch, sequence,
    window, stride, communicators, n_ranks, rank, enumeration, rows, column, index, time, number.
    """
    if len(data) > limits.batch_bytes:
        refuse("size", f"batch is {len(data)} bytes, the limit is {limits.batch_bytes}")
    try:
        message = pb.Batch.FromString(data)
    except DecodeError as error:
        raise BatchRefused("proto", f"batch is not a lanterne.v1.Batch: {error}") from None
    if message.schema != SCHEMA:
        refuse("schema", f"schema {message.schema} is not known, this collector reads {SCHEMA}")
    check_node(message.node)
    try:
        return _checked(message, len(data), received_ns, limits)
    except BatchRefused as refusal:
        if refusal.code != "enumeration":
            raise
    leave_out_unknown(message, Counter() if left_out is None else left_out)
    return _checked(message, len(data), received_ns, limits)


def _checked(message: pb.Batch, size: int, received_ns: int, limits: Limits) -> DecodedBatch:
    """Raises BatchRefused; `enumeration` where a value is not known."""
    head = _head(message, size, received_ns, limits)
    communicators = _communicators(message, limits)
    n = len(communicators.rank)
    return DecodedBatch(
        head=head,
        communicators=communicators,
        instances=columns.instances(message.instances, n, head.end_ns, limits),
        summaries=columns.summaries(message.summaries, n, limits),
        traffic=columns.traffic(message.traffic, communicators, limits),
        reports=_reports(message, limits),
        stages=columns.stages(message.stages, limits),
        pending=columns.pending(message.pending, n, head.end_ns),
        strides=_strides(message.strides, n),
    )


def _strides(data: bytes, communicators: int) -> U32:
    if not data:
        return NO_STRIDES
    if len(data) != 4 * communicators:
        refuse("column", f"strides has {len(data)} bytes for {communicators} communicators")
    strides = np.frombuffer(data, "<u4")
    if len(strides) and not 1 <= int(strides.min()) <= int(strides.max()) <= MAX_STRIDE:
        refuse("stride", f"strides has values that are not between 1 and {MAX_STRIDE}")
    return strides


def _reports(m: pb.Batch, limits: Limits) -> Reports:
    loads, readings = m.expert_loads, m.engine_readings
    if not loads and not readings:
        return NO_REPORTS
    for name, rows in (("expert_loads", loads), ("engine_readings", readings)):
        if len(rows) > limits.entries:
            refuse("rows", f"{len(rows)} {name}, the limit is {limits.entries}")
    return Reports(
        tuple([check_expert_load(one, limits) for one in loads]),
        tuple([check_engine_reading(one, limits) for one in readings]),
    )


def _head(m: pb.Batch, size: int, received_ns: int, limits: Limits) -> Head:
    start_ns, end_ns = m.start_ns, m.end_ns
    epoch, sequence = m.epoch, m.sequence
    realtime_offset_ns, stride = m.realtime_offset_ns, m.stride
    if not 0 < epoch < TIME_LIMIT_NS:
        refuse("epoch", f"epoch {epoch} is not a time between 1 and 2^62 ns")
    if not 0 < sequence < TIME_LIMIT_NS:
        refuse("sequence", f"sequence {sequence} is not between 1 and 2^62")
    if not start_ns <= end_ns < TIME_LIMIT_NS:
        refuse("window", f"start_ns {start_ns} .. end_ns {end_ns} does not go forward")
    if end_ns - start_ns > SPAN_LIMIT_NS:
        refuse("window", f"window of {end_ns - start_ns} ns, the limit is {SPAN_LIMIT_NS}")
    if abs(realtime_offset_ns) >= TIME_LIMIT_NS:
        refuse("time", f"realtime_offset_ns {realtime_offset_ns} is beyond 2^62")
    if not 1 <= stride <= MAX_STRIDE:
        refuse("stride", f"stride {stride} is not between 1 and {MAX_STRIDE}")
    gpus, processes, health = m.gpus, m.processes, m.health
    if len(gpus) > limits.gpus:
        refuse("rows", f"{len(gpus)} gpus, the limit is {limits.gpus}")
    if len(processes) > limits.processes:
        refuse("rows", f"{len(processes)} processes, the limit is {limits.processes}")
    places = tuple([place_of(p, limits) for p in processes])
    return Head(
        node=m.node,
        epoch=epoch,
        sequence=sequence,
        agent_version=text("agent_version", m.agent_version, limits.text),
        boot_id=text("boot_id", m.boot_id, limits.text),
        start_ns=start_ns,
        end_ns=end_ns,
        realtime_offset_ns=realtime_offset_ns,
        stride=stride,
        received_ns=received_ns,
        encoded_bytes=size,
        encoded_gpus=tuple([check_gpu(g, limits) for g in gpus]),
        encoded_processes=tuple([check_process(p, limits) for p in processes]),
        process_keys=tuple([(p.pid, p.pid_start_ticks) for p in processes]),
        process_places=places if any(places) else (),
        health=_health(health),
        events_lost=_losses(health, limits),
        sources=_sources(health, limits),
        libraries_failed=_failed(health, limits),
    )


def _communicators(m: pb.Batch, limits: Limits) -> Communicators:
    rows = m.communicators
    if not rows:
        return NO_COMMUNICATORS
    if len(rows) > limits.communicators:
        refuse("communicators", f"{len(rows)} communicators, the limit is {limits.communicators}")
    parts = tuple([c.SerializeToString() for c in rows])
    return (_cached_table if len(parts) <= CACHED_COMMUNICATORS else _table)(parts, limits.text)


def _table(parts: tuple[bytes, ...], longest: int) -> Communicators:
    return Communicators(*zip(*(_communicator(c, longest) for c in parts), strict=True))


# A node's list stays the same from batch to batch: what is made of it is kept, for as many nodes
# as are let in.
_cached_table = lru_cache(maxsize=1 << 13)(_table)


@lru_cache(maxsize=1 << 15)
def _communicator(data: bytes, longest: int) -> tuple[object, ...]:
    """Fields of one checked communicator. Cached: a batch repeats those of the one before it."""
    c = pb.Communicator.FromString(data)
    if not 1 <= c.n_ranks <= MAX_RANKS:
        refuse("n_ranks", f"n_ranks {c.n_ranks} is not between 1 and {MAX_RANKS}")
    if c.rank >= c.n_ranks:
        refuse("rank", f"rank {c.rank} of a communicator of {c.n_ranks} ranks")
    if c.library not in (1, 2, 3):
        refuse("enumeration", f"library {c.library} is not 1 (nccl), 2 (gloo) or 3 (deepep)")
    if not 0 <= c.identity <= 7:
        refuse("enumeration", f"identity {c.identity} is not between 0 and 7")
    if c.pid_start_ticks >= TIME_LIMIT_NS:
        refuse("number", f"pid_start_ticks {c.pid_start_ticks} is beyond 2^62")
    for field in ("name", "workload", "gpu_bus_id", "role"):
        text(f"communicator.{field}", getattr(c, field), longest)
    return (
        c.comm_hash,
        c.n_ranks,
        c.rank,
        c.pid,
        c.pid_start_ticks,
        int(c.library),
        c.complete,
        c.gpu_index,
        c.gpu_bus_id,
        c.name,
        c.workload,
        c.role,
    )


def _health(h: pb.Health) -> Mapping[str, float]:
    return {
        "events_read": float(h.events_read),
        "events_submitted": float(h.events_submitted),
        "communicators_unresolved": float(h.communicators_unresolved),
        "operations_unresolved": float(h.operations_unresolved),
        "blind_graph_launches": float(h.blind_graph_launches),
        "steps": float(h.steps),
        "blind_steps": float(h.blind_steps),
        "processes_untold": float(h.processes_untold),
        "batches_dropped": float(h.batches_dropped),
    }


def _losses(h: pb.Health, limits: Limits) -> Mapping[str, int]:
    lost = h.events_lost
    if len(lost) > limits.entries:
        refuse("rows", f"health.events_lost has more than {limits.entries} causes")
    return {text("health.events_lost", k, limits.text): v for k, v in lost.items()}


def _sources(h: pb.Health, limits: Limits) -> Mapping[str, bool]:
    sources = h.source_success
    if len(sources) > limits.entries:
        refuse("rows", f"health.source_success has more than {limits.entries} sources")
    return {text("health.source_success", k, limits.text): v for k, v in sources.items()}


def _failed(h: pb.Health, limits: Limits) -> tuple[str, ...]:
    failed = h.libraries_failed
    if len(failed) > limits.entries:
        refuse("rows", f"health.libraries_failed has more than {limits.entries} entries")
    # "path: why" comes from other programs' files: cut and made printable, never refused.
    return tuple(
        ["".join(c if c.isprintable() else "?" for c in line[: limits.text]) for line in failed]
    )
