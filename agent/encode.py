"""A closed window and its context -> encoded telemetry.v1 Batches.

Columns become little-endian bytes. A window with more rows than one message should carry is cut
into several batches of the same window, each row in one of them; context goes with the first.
Values that no real run reaches are capped below what the collector accepts, so that one nonsensical
argument of a hostile job cannot cost a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lanterne.agent import expert_wire
from lanterne.agent.cuda import Use
from lanterne.agent.events import I64, U64, Operations
from lanterne.agent.expert_counts import Load
from lanterne.agent.expert_wire import Reading
from lanterne.agent.identity import Communicator
from lanterne.agent.inflight import NOTHING, InFlight
from lanterne.agent.places import NOWHERE, Place
from lanterne.agent.stages import StageColumns
from lanterne.agent.summaries import Summaries
from lanterne.agent.vectors import PeerBytes
from lanterne.agent.windows import WindowColumns
from lanterne.proto import telemetry_pb2 as pb

SCHEMA = 1
MAX_BATCH_BYTES = 8 << 20  # what is larger is dropped: no collector need take it
FINEST = 16  # parts of the rows below
HELPED = 0.9
MAX_INSTANCES = 50_000  # 59 bytes each: 3 MB, below the 4 MB that gRPC accepts by default
MAX_SUMMARIES = 8_192  # 251 bytes each
MAX_TRAFFIC = 60_000  # 24 bytes each
MAX_STAGES = 16_384  # 42 bytes each
MAX_COMMUNICATORS = 8_192
MAX_LIBRARIES = 32
MAX_CUDA_BINS = 64
BYTES_CAP = (1 << 56) - 1
COUNT_CAP = (1 << 48) - 1
TIME_CAP = 7 * 86_400 * 10**9 - 1


class GpuFields(Protocol):
    """agent.nvml.GpuReading."""

    @property
    def index(self) -> int: ...
    @property
    def uuid(self) -> str: ...
    @property
    def bus_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def throttle_reasons(self) -> tuple[str, ...]: ...
    @property
    def process_memory(self) -> dict[int, int]: ...


_LIBRARY = (pb.LIBRARY_UNSPECIFIED, pb.LIBRARY_NCCL, pb.LIBRARY_GLOO, pb.LIBRARY_DEEPEP)
_IDENTITY = (
    pb.IDENTITY_UNSPECIFIED, pb.IDENTITY_INIT_ARGUMENTS, pb.IDENTITY_DERIVED,
    pb.IDENTITY_STRUCTURE, pb.IDENTITY_STORE, pb.IDENTITY_ENVIRONMENT, pb.IDENTITY_PROCESS,
    pb.IDENTITY_RAS,
)  # fmt: skip
GPU_VALUES = (
    "utilization_ratio", "memory_used_bytes", "memory_total_bytes", "temperature_celsius",
    "power_watts", "energy_joules", "sm_clock_hertz", "sm_clock_max_hertz",
)  # fmt: skip
PROCESS_VALUES = (
    "cpu_seconds", "run_queue_seconds", "rss_bytes", "memory_pressure_ratio", "cpu_pressure_ratio",
    "stopped",
)  # fmt: skip
PLACE_TEXTS = (
    "pod", "namespace", "container", "owner_kind", "owner", "slurm_job", "slurm_step", "unit",
    "mig",
)  # fmt: skip


@dataclass(frozen=True)
class Health:
    """The agent's own totals since its start, as in the message of that name."""

    events_read: int = 0
    events_submitted: int = 0
    events_lost: Mapping[str, int] = field(default_factory=dict)
    communicators_unresolved: int = 0
    operations_unresolved: int = 0
    blind_graph_launches: int = 0
    steps: int = 0
    blind_steps: int = 0
    processes_untold: int = 0
    source_success: Mapping[str, bool] = field(default_factory=dict)
    batches_dropped: int = 0
    libraries_failed: Sequence[str] = ()


@dataclass(frozen=True)
class Head:
    """What names this agent run."""

    node: str
    epoch: int  # CLOCK_REALTIME ns of the start
    agent_version: str
    boot_id: str


@dataclass(frozen=True)
class Context:
    """Everything beside the columns. `cuda` and `steps` are by tgid, the latter (steps, blind)."""

    realtime_offset_ns: int = 0
    gpus: Sequence[GpuFields] = ()
    processes: Mapping[int, Any] = field(default_factory=dict)  # agent.host.ProcessReading
    cuda: Mapping[int, Use] = field(default_factory=dict)
    steps: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    health: Health = Health()
    in_flight: InFlight = NOTHING
    # By tgid: how long it has been in a synchronise call that has outlasted a window.
    synchronising: Mapping[int, float] = field(default_factory=dict)
    expert_loads: Sequence[Load] = ()
    engine_readings: Sequence[Reading] = ()
    places: Mapping[tuple[int, int], Place] = field(default_factory=dict)  # by pid, start ticks


def encode(
    window: WindowColumns,
    communicators: Sequence[Communicator],
    context: Context,
    head: Head,
    first_sequence: int,
) -> list[bytes]:
    """-> one batch at least, numbered from `first_sequence`; none is larger than MAX_BATCH_BYTES
    where fewer rows in each can help.

    `communicators` holds every communicator that the columns name, and may hold others.
    """
    finer = 1
    batches = _encode(window, communicators, context, head, first_sequence, finer)
    while (largest := max(map(len, batches))) > MAX_BATCH_BYTES and finer < FINEST:
        finer *= 2
        cut = _encode(window, communicators, context, head, first_sequence, finer)
        if max(map(len, cut)) > HELPED * largest:
            break  # it is not the rows: of what every part repeats there would only be more
        batches = cut
    return batches


def _encode(
    window: WindowColumns,
    communicators: Sequence[Communicator],
    context: Context,
    head: Head,
    first_sequence: int,
    finer: int,
) -> list[bytes]:
    described = communicators[:MAX_COMMUNICATORS]
    place = np.full(1 << 16, len(described), np.uint32)
    for index, comm in enumerate(described):
        place[comm.slot] = index
    strides = _strides(window, described)
    batches: list[bytes] = []
    reports = expert_wire.parts(context.expert_loads, context.engine_readings)
    for part, (instances, summaries, traffic) in enumerate(_parts(window, len(reports), finer)):
        batch = pb.Batch(
            schema=SCHEMA,
            node=head.node,
            epoch=head.epoch,
            sequence=first_sequence + part,
            agent_version=head.agent_version,
            boot_id=head.boot_id,
            start_ns=window.start_ns,
            end_ns=window.end_ns,
            realtime_offset_ns=context.realtime_offset_ns,
            stride=window.sampling.stride,
            strides=strides,
            health=_health(context.health),
        )
        gpu_index = {gpu.bus_id: gpu.index for gpu in context.gpus if gpu.bus_id}
        for comm in described:
            where = context.places.get((comm.tgid, comm.start_ticks))
            _communicator(batch.communicators.add(), comm, gpu_index, where)
        _instances(batch.instances, window, instances, place)
        _summaries(batch.summaries, window.summaries, summaries, place)
        _traffic(batch.traffic, window, traffic, place)
        if part == 0:
            _gpus(batch, context.gpus)
            _processes(batch, context)
            _stages(batch.stages, window.stages)
            _pending(batch.pending, context.in_flight, place, window.end_ns)
        if part < len(reports):
            batch.expert_loads.extend(reports[part].loads)
            batch.engine_readings.extend(reports[part].readings)
        batches.append(batch.SerializeToString())
    return batches


def _parts(window: WindowColumns, least: int, finer: int) -> Iterator[tuple[slice, slice, slice]]:
    rows = (len(window.instances.operations), len(window.summaries.slot), len(window.traffic))
    limits = [most // finer for most in (MAX_INSTANCES, MAX_SUMMARIES, MAX_TRAFFIC)]
    parts = max(1, least, *(-(-n // limit) for n, limit in zip(rows, limits, strict=True)))
    for part in range(parts):
        a, b, c = (slice(part * limit, (part + 1) * limit) for limit in limits)
        yield a, b, c


def _communicator(
    out: pb.Communicator, comm: Communicator, gpu_index: Mapping[str, int], place: Place | None
) -> None:
    # NCCL names the GPU itself; else it is the only one that the process's container has.
    bus_id = comm.bus_id or (place.gpu_bus_id if place is not None else "")
    out.comm_hash = comm.comm_hash
    out.library = _LIBRARY[comm.library]
    out.n_ranks = comm.n_ranks
    out.rank = comm.rank
    out.name = comm.name
    out.pid = comm.tgid
    out.pid_start_ticks = comm.start_ticks
    out.workload = comm.workload if place is None else place.workload
    out.gpu_bus_id = bus_id
    out.gpu_index = gpu_index.get(bus_id, -1)
    out.identity = _IDENTITY[comm.identity]
    out.complete = comm.complete
    out.parent_hash = comm.parent_hash
    out.role = comm.role


def _strides(window: WindowColumns, described: Sequence[Communicator]) -> bytes:
    slots = np.array([comm.slot for comm in described], np.uint16)
    if not window.sampling.whole[slots].any():
        return b""
    return window.sampling.strides(slots).astype("<u4", copy=False).tobytes()


def _capped(values: U64 | I64, cap: int) -> bytes:
    return np.minimum(values, np.uint64(cap)).astype("<u8", copy=False).tobytes()


def _instances(
    out: pb.Instances, window: WindowColumns, rows: slice, place: np.ndarray[Any, Any]
) -> None:
    all_ops: Operations = window.instances.operations
    slots = all_ops.slot[rows]
    out.rows = len(slots)
    out.communicator = place[slots].astype("<u4", copy=False).tobytes()
    out.seq = all_ops.seq[rows].astype("<u4", copy=False).tobytes()
    out.lane = all_ops.lane[rows].tobytes()
    out.op = all_ops.op[rows].tobytes()
    out.role = window.instances.role[rows].tobytes()
    out.evidence = all_ops.evidence[rows].tobytes()
    out.flags = all_ops.flags[rows].tobytes()
    # A clock that ran ahead of the window's end would get the whole batch refused.
    out.arrival_ns = _capped(all_ops.arrival_ns[rows], window.end_ns)
    out.duration_ns = _capped(all_ops.duration_ns[rows], TIME_CAP)
    out.payload_bytes = _capped(all_ops.bytes[rows], BYTES_CAP)
    out.sync_blocked_ns = _capped(all_ops.sync_blocked_ns[rows], TIME_CAP)


def _summaries(
    out: pb.Summaries, table: Summaries, rows: slice, place: np.ndarray[Any, Any]
) -> None:
    slots = table.slot[rows]
    out.rows = len(slots)
    out.communicator = place[slots].astype("<u4", copy=False).tobytes()
    out.op = table.op[rows].tobytes()
    out.role = table.role[rows].tobytes()
    out.evidence = table.evidence[rows].tobytes()
    out.count = _capped(table.count[rows], BYTES_CAP)
    out.errors = _capped(table.errors[rows], BYTES_CAP)
    out.payload_bytes = _capped(table.bytes[rows], BYTES_CAP)
    out.duration_sum_ns = _capped(table.duration_sum_ns[rows], BYTES_CAP)
    out.duration_min_ns = _capped(table.duration_min_ns[rows], TIME_CAP)
    out.duration_max_ns = _capped(table.duration_max_ns[rows], TIME_CAP)
    if table.token_bytes[rows].any():
        out.token_bytes = table.token_bytes[rows].astype("<u4", copy=False).tobytes()
    out.histogram = table.histogram[rows].astype("<u4", copy=False).tobytes()


def _traffic(
    out: pb.Traffic, window: WindowColumns, rows: slice, place: np.ndarray[Any, Any]
) -> None:
    table: PeerBytes = window.traffic
    slots = table.slot[rows]
    out.rows = len(slots)
    out.communicator = place[slots].astype("<u4", copy=False).tobytes()
    out.peer = table.peer[rows].astype("<u4", copy=False).tobytes()
    out.sent_bytes = _capped(table.sent[rows], BYTES_CAP)
    out.received_bytes = _capped(table.received[rows], BYTES_CAP)
    receives = window.receives[rows]
    if receives.any():
        out.receives = _capped(receives, COUNT_CAP)
        out.wait_ns = _capped(window.wait_ns[rows], BYTES_CAP)


def _stages(out: pb.Stages, table: StageColumns) -> None:
    if not len(table):
        return
    rows = slice(0, MAX_STAGES)
    out.rows = len(table.pid[rows])
    for name in ("pid", "start_ticks", "device", "stage", "whole"):
        setattr(out, name, getattr(table, name)[rows].tobytes())
    out.count = _capped(table.count[rows], COUNT_CAP)
    for name in ("sum_ns", "union_ns", "span_ns"):
        setattr(out, name, _capped(getattr(table, name)[rows], BYTES_CAP))


def _pending(out: pb.Pending, table: InFlight, place: np.ndarray[Any, Any], end_ns: int) -> None:
    described = place.max(initial=0)  # what stands for those that are not
    pick = np.flatnonzero(place[table.slot] < described)
    if not len(pick):
        return
    out.rows = len(pick)
    out.communicator = place[table.slot[pick]].astype("<u4", copy=False).tobytes()
    out.seq = table.seq[pick].astype("<u4", copy=False).tobytes()
    for name in ("lane", "op", "evidence"):
        setattr(out, name, getattr(table, name)[pick].tobytes())
    if table.state[pick].any():
        out.state = table.state[pick].tobytes()
    out.entered_ns = _capped(table.entered_ns[pick], end_ns)


def _gpus(batch: pb.Batch, gpus: Iterable[GpuFields]) -> None:
    for gpu in gpus:
        out = batch.gpus.add(index=gpu.index, uuid=gpu.uuid, bus_id=gpu.bus_id, name=gpu.name)
        for name in GPU_VALUES:
            value = getattr(gpu, name)
            if value is not None:
                setattr(out, name, value)
        out.throttle_reasons.extend(gpu.throttle_reasons)
        for pid, used in gpu.process_memory.items():
            out.process_memory_bytes[pid] = used


def _processes(batch: pb.Batch, context: Context) -> None:
    for pid, reading in context.processes.items():
        out = batch.processes.add(
            pid=pid, pid_start_ticks=reading.start_ticks, command=reading.command[:64]
        )
        for name in PROCESS_VALUES:
            value = getattr(reading, name)
            if value is not None:
                setattr(out, name, value)
        place = context.places.get((pid, reading.start_ticks), NOWHERE)
        for name in PLACE_TEXTS:
            if getattr(place, name):
                setattr(out, name, getattr(place, name))
        if pid in context.synchronising:
            out.synchronising_seconds = context.synchronising[pid]
        use = context.cuda.get(pid)
        if use is not None:
            _cuda(out, use)
            out.steps, out.blind_steps = context.steps.get(pid, (0, 0))


def _cuda(out: pb.Process, use: Use) -> None:
    out.launches, out.graph_launches = use.launches, use.graph_launches
    out.syncs, out.sync_ns = use.syncs, use.sync_ns
    out.captured_operations = use.captured_ops
    for one in use.bins[:MAX_CUDA_BINS]:
        out.cuda.add(
            device=one.device,
            stream=one.stream,
            launches=one.launches,
            graph_launches=one.graph_launches,
            syncs=one.syncs,
            sync_ns=one.sync_ns,
        )


def _health(health: Health) -> pb.Health:
    return pb.Health(
        events_read=health.events_read,
        events_submitted=health.events_submitted,
        events_lost=dict(health.events_lost),
        communicators_unresolved=health.communicators_unresolved,
        operations_unresolved=health.operations_unresolved,
        blind_graph_launches=health.blind_graph_launches,
        steps=health.steps,
        blind_steps=health.blind_steps,
        processes_untold=health.processes_untold,
        source_success=dict(health.source_success),
        batches_dropped=health.batches_dropped,
        libraries_failed=list(health.libraries_failed[:MAX_LIBRARIES]),
    )
