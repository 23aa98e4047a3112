"""One encoded Batch -> validated columns: the only reader of what agents send.

`decode` either returns a DecodedBatch whose every value is in the range that `align` and `analyse`
rely on, or raises BatchRefused(code, reason); no other exception leaves it, whatever the bytes.
Columns are views of the message's own bytes where possible: nothing is copied per row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from lanterne.collector.errors import BatchRefused
from lanterne.proto import telemetry_pb2 as pb

SCHEMA = 1
HISTOGRAM_BINS = 48
MAX_RANKS = 65_536
MAX_STRIDE = 65_536
TIME_LIMIT_NS = 1 << 62  # keeps sums of a time and a duration inside int64
SPAN_LIMIT_NS = 7 * 86_400 * 10**9  # longest credible duration, and longest window
AHEAD_LIMIT_NS = 10 * 10**9  # an arrival may lie this far after its window's end
BYTES_LIMIT = 1 << 56
COUNT_LIMIT = 1 << 48

_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?\Z")

Array = npt.NDArray[np.generic]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Limits:
    """Largest accepted sizes of one batch."""

    batch_bytes: int = 8 << 20
    communicators: int = 8_192
    instances: int = 1 << 18
    summaries: int = 1 << 16
    traffic: int = 1 << 18
    gpus: int = 64
    processes: int = 4_096
    text: int = 256
    entries: int = 64  # of a map or list in Health or Gpu


@dataclass(frozen=True, slots=True)
class Communicators:
    """One row per (communicator, rank) of the batch; the index that the other columns use."""

    comm_hash: tuple[int, ...]
    n_ranks: tuple[int, ...]
    rank: tuple[int, ...]
    pid: tuple[int, ...]
    pid_start_ticks: tuple[int, ...]
    library: tuple[int, ...]
    complete: tuple[bool, ...]
    gpu_index: tuple[int, ...]
    gpu_bus_id: tuple[str, ...]
    name: tuple[str, ...]
    workload: tuple[str, ...]
    role: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instances:
    """Columns of proto Instances, all of the same length; times ns on the agent's clock."""

    communicator: I64
    seq: I64
    lane: U8
    op: U8
    role: U8
    evidence: U8
    flags: U8
    arrival_ns: I64
    duration_ns: I64
    bytes: I64
    sync_blocked_ns: I64


@dataclass(frozen=True, slots=True)
class Summaries:
    """Columns of proto Summaries; `histogram` has shape [rows, 48]."""

    communicator: I64
    op: U8
    role: U8
    evidence: U8
    count: I64
    errors: I64
    bytes: I64
    duration_sum_ns: I64
    histogram: I64


@dataclass(frozen=True, slots=True)
class Traffic:
    communicator: I64
    peer: I64
    sent_bytes: I64
    received_bytes: I64


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    bus_id: str
    name: str
    values: Mapping[str, float]
    throttle_reasons: tuple[str, ...]
    process_memory_bytes: Mapping[int, int]


NOTHING = np.zeros(0, np.int64)
NO_INSTANCES = Instances(*(NOTHING,) * 11)  # type: ignore[arg-type]
NO_SUMMARIES = Summaries(*(NOTHING,) * 9)  # type: ignore[arg-type]
NO_TRAFFIC = Traffic(*(NOTHING,) * 4)


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch that may be applied. `received_ns` is the collector's CLOCK_MONOTONIC."""

    node: str
    epoch: int
    sequence: int
    agent_version: str
    boot_id: str
    start_ns: int
    end_ns: int
    realtime_offset_ns: int
    stride: int
    received_ns: int
    communicators: Communicators
    instances: Instances
    summaries: Summaries
    traffic: Traffic
    gpus: tuple[Gpu, ...]
    processes: tuple[Mapping[str, object], ...]
    health: Mapping[str, float]
    events_lost: Mapping[str, int]
    sources: Mapping[str, bool]
    libraries_failed: tuple[str, ...]


def decode(data: bytes, *, received_ns: int = 0, limits: Limits = Limits()) -> DecodedBatch:
    """Decode and check one Batch.

    Raises BatchRefused; its code is one of: size, proto, schema, node, text, epoch, sequence,
    window, stride, communicators, n_ranks, rank, enumeration, rows, column, index, time, number.
    """
    if len(data) > limits.batch_bytes:
        _refuse("size", f"batch is {len(data)} bytes, the limit is {limits.batch_bytes}")
    try:
        message = pb.Batch.FromString(data)
    except DecodeError as error:
        raise BatchRefused("proto", f"batch is not a lanterne.v1.Batch: {error}") from None
    if message.schema != SCHEMA:
        _refuse("schema", f"schema {message.schema} is not known, this collector reads {SCHEMA}")
    check_node(message.node)
    _check_head(message, limits)
    communicators = _communicators(message, limits)
    n = len(communicators.rank)
    return DecodedBatch(
        node=message.node,
        epoch=message.epoch,
        sequence=message.sequence,
        agent_version=_text("agent_version", message.agent_version, limits.text),
        boot_id=_text("boot_id", message.boot_id, limits.text),
        start_ns=message.start_ns,
        end_ns=message.end_ns,
        realtime_offset_ns=message.realtime_offset_ns,
        stride=message.stride,
        received_ns=received_ns,
        communicators=communicators,
        instances=_instances(message.instances, n, message.end_ns, limits),
        summaries=_summaries(message.summaries, n, limits),
        traffic=_traffic(message.traffic, communicators, limits),
        gpus=_gpus(message, limits),
        processes=_processes(message, limits),
        health=_health(message.health),
        events_lost=_losses(message.health, limits),
        sources=_sources(message.health, limits),
        libraries_failed=_failed(message.health, limits),
    )


def check_node(node: str) -> None:
    """Raise BatchRefused unless `node` may become a label value: 1 to 253 letters, digits, ._:-"""
    if not _NODE.match(node):
        _refuse("node", f"node {node[:64]!r} is not 1 to 253 of letters, digits and ._:-")


def _refuse(code: str, reason: str) -> None:
    raise BatchRefused(code, reason)


def _check_head(m: pb.Batch, limits: Limits) -> None:
    if not 0 < m.epoch < TIME_LIMIT_NS:
        _refuse("epoch", f"epoch {m.epoch} is not a time between 1 and 2^62 ns")
    if not 0 < m.sequence < TIME_LIMIT_NS:
        _refuse("sequence", f"sequence {m.sequence} is not between 1 and 2^62")
    if not m.start_ns <= m.end_ns < TIME_LIMIT_NS:
        _refuse("window", f"start_ns {m.start_ns} .. end_ns {m.end_ns} does not go forward")
    if m.end_ns - m.start_ns > SPAN_LIMIT_NS:
        _refuse("window", f"window of {m.end_ns - m.start_ns} ns, the limit is {SPAN_LIMIT_NS}")
    if abs(m.realtime_offset_ns) >= TIME_LIMIT_NS:
        _refuse("time", f"realtime_offset_ns {m.realtime_offset_ns} is beyond 2^62")
    if not 1 <= m.stride <= MAX_STRIDE:
        _refuse("stride", f"stride {m.stride} is not between 1 and {MAX_STRIDE}")


def _text(field: str, value: str, longest: int) -> str:
    if len(value) > longest:
        _refuse("text", f"{field} has {len(value)} characters, the limit is {longest}")
    if not value.isprintable():
        _refuse("text", f"{field} {value[:64]!r} holds characters that cannot be printed")
    return value


def _communicators(m: pb.Batch, limits: Limits) -> Communicators:
    rows = m.communicators
    if len(rows) > limits.communicators:
        _refuse("communicators", f"{len(rows)} communicators, the limit is {limits.communicators}")
    if not rows:
        return NO_COMMUNICATORS
    return Communicators(
        *zip(*(_communicator(c.SerializeToString(), limits.text) for c in rows), strict=True)
    )


@lru_cache(maxsize=1 << 15)
def _communicator(data: bytes, longest: int) -> tuple[object, ...]:
    """Fields of one checked communicator. Cached: a batch repeats those of the one before it."""
    c = pb.Communicator.FromString(data)
    if not 1 <= c.n_ranks <= MAX_RANKS:
        _refuse("n_ranks", f"n_ranks {c.n_ranks} is not between 1 and {MAX_RANKS}")
    if c.rank >= c.n_ranks:
        _refuse("rank", f"rank {c.rank} of a communicator of {c.n_ranks} ranks")
    if c.library not in (1, 2):
        _refuse("enumeration", f"library {c.library} is not 1 (nccl) or 2 (gloo)")
    if not 0 <= c.identity <= 6:
        _refuse("enumeration", f"identity {c.identity} is not between 0 and 6")
    if c.pid_start_ticks >= TIME_LIMIT_NS:
        _refuse("number", f"pid_start_ticks {c.pid_start_ticks} is beyond 2^62")
    for field in ("name", "workload", "gpu_bus_id", "role"):
        _text(f"communicator.{field}", getattr(c, field), longest)
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


NO_COMMUNICATORS = Communicators((), (), (), (), (), (), (), (), (), (), (), ())


class _Columns:
    """Reads the columns of one message, each of `rows` values."""

    def __init__(self, message: object, table: str, limit: int, n_communicators: int) -> None:
        self._message = message
        self._table = table
        self.rows: int = message.rows  # type: ignore[attr-defined]
        self._n = n_communicators
        if self.rows > limit:
            _refuse("rows", f"{table}.rows is {self.rows}, the limit is {limit}")

    def raw(self, field: str, dtype: np.dtype[Any], width: int = 1) -> npt.NDArray[Any]:
        data: bytes = getattr(self._message, field)
        want = self.rows * width * dtype.itemsize
        if len(data) != want:
            _refuse("column", f"{self._table}.{field} is {len(data)} bytes, not {want}")
        return np.frombuffer(data, dtype)

    def small(self, field: str, most: int, code: str = "enumeration") -> U8:
        """u8 column of values 0 .. most."""
        column: U8 = self.raw(field, _U1)
        if most < 255 and self.rows and (top := int(_top(column))) > most:
            _refuse(code, f"{self._table}.{field} holds {top}, the limit is {most}")
        return column

    def number(self, field: str, below: int, code: str = "number") -> I64:
        """u64 column of values under `below` (at most 2^62), as int64."""
        column = self.raw(field, _U8)
        if self.rows and (top := int(_top(column))) >= below:
            _refuse(code, f"{self._table}.{field} holds {top}, the limit is {below}")
        return column.view(np.int64)

    def word(self, field: str) -> I64:
        return self.raw(field, _U4).astype(np.int64)

    def index(self) -> I64:
        column = self.raw("communicator", _U4)
        if self.rows and (top := int(_top(column))) >= self._n:
            _refuse("index", f"{self._table}.communicator names {top} of {self._n} communicators")
        return column.astype(np.int64)


_U1, _U4, _U8 = np.dtype("<u1"), np.dtype("<u4"), np.dtype("<u8")
_top = np.maximum.reduce  # ndarray.max without its Python wrapper: batches are many and small


_UNTIMED = np.array([1, 0, 0, 1], dtype=np.int64)  # evidence without durations


def _instances(m: pb.Instances, n: int, end_ns: int, limits: Limits) -> Instances:
    c = _Columns(m, "instances", limits.instances, n)
    evidence = c.small("evidence", 3)
    duration = c.number("duration_ns", SPAN_LIMIT_NS, "time")
    if c.rows and bool((duration * _UNTIMED[evidence]).any()):
        _refuse("time", "instances.duration_ns is not 0 where evidence is 0 or 3")
    arrival = c.number("arrival_ns", TIME_LIMIT_NS, "time")
    if c.rows and (latest := int(_top(arrival))) > end_ns + AHEAD_LIMIT_NS:
        _refuse("time", f"instances.arrival_ns {latest} is after the window's end {end_ns}")
    return Instances(
        communicator=c.index(),
        seq=c.word("seq"),
        lane=c.small("lane", 1),
        op=c.small("op", 255),
        role=c.small("role", 2),
        evidence=evidence,
        flags=c.small("flags", 7),
        arrival_ns=arrival,
        duration_ns=duration,
        bytes=c.number("bytes", BYTES_LIMIT),
        sync_blocked_ns=c.number("sync_blocked_ns", SPAN_LIMIT_NS, "time"),
    )


def _summaries(m: pb.Summaries, n: int, limits: Limits) -> Summaries:
    c = _Columns(m, "summaries", limits.summaries, n)
    c.raw("duration_min_ns", _U8)
    c.raw("duration_max_ns", _U8)
    histogram = c.raw("histogram", _U4, HISTOGRAM_BINS).astype(np.int64)
    return Summaries(
        communicator=c.index(),
        op=c.small("op", 255),
        role=c.small("role", 2),
        evidence=c.small("evidence", 3),
        count=c.number("count", COUNT_LIMIT),
        errors=c.number("errors", COUNT_LIMIT),
        bytes=c.number("bytes", BYTES_LIMIT),
        duration_sum_ns=c.number("duration_sum_ns", BYTES_LIMIT, "time"),
        histogram=histogram.reshape(c.rows, HISTOGRAM_BINS),
    )


def _traffic(m: pb.Traffic, communicators: Communicators, limits: Limits) -> Traffic:
    c = _Columns(m, "traffic", limits.traffic, len(communicators.rank))
    index, peer = c.index(), c.word("peer")
    if c.rows:
        sizes = np.array(communicators.n_ranks, dtype=np.int64)[index]
        wrong = np.flatnonzero(peer >= sizes)
        if len(wrong):
            row = wrong[0]
            _refuse("rank", f"traffic.peer {peer[row]} of a communicator of {sizes[row]} ranks")
    return Traffic(
        communicator=index,
        peer=peer,
        sent_bytes=c.number("sent_bytes", BYTES_LIMIT),
        received_bytes=c.number("received_bytes", BYTES_LIMIT),
    )


HEALTH_TOTALS = (
    "events_read",
    "events_submitted",
    "communicators_unresolved",
    "operations_unresolved",
    "blind_graph_launches",
    "batches_dropped",
)


def _fields(message: Message, table: str, longest: int) -> dict[str, Any]:
    """Present scalar fields by name; text checked, numbers finite."""
    found: dict[str, Any] = {}
    for descriptor, value in message.ListFields():  # one call for all, where HasField is one each
        name = descriptor.name
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):
                _refuse("number", f"{table}.{name} is {value}")
        elif kind is str and (len(value) > longest or not value.isprintable()):
            _text(f"{table}.{name}", value, longest)
        found[name] = value
    return found


def _gpus(m: pb.Batch, limits: Limits) -> tuple[Gpu, ...]:
    if len(m.gpus) > limits.gpus:
        _refuse("rows", f"{len(m.gpus)} gpus, the limit is {limits.gpus}")
    return tuple(_gpu(g, limits) for g in m.gpus)


def _gpu(g: pb.Gpu, limits: Limits) -> Gpu:
    row = _fields(g, "gpu", limits.text)
    reasons = tuple(row.pop("throttle_reasons", ()))
    memory = dict(row.pop("process_memory_bytes", {}))
    if len(reasons) > limits.entries:
        _refuse("rows", f"gpu.throttle_reasons has more than {limits.entries} entries")
    if len(memory) > limits.processes:
        _refuse("rows", f"gpu.process_memory_bytes has more than {limits.processes} entries")
    for reason in reasons:
        _text("gpu.throttle_reasons", reason, limits.text)
    index, uuid = row.pop("index", 0), row.pop("uuid", "")
    bus_id, name = row.pop("bus_id", ""), row.pop("name", "")
    return Gpu(index, uuid, bus_id, name, row, reasons, memory)


_PROCESS: dict[str, object] = {
    "pid": 0,
    "pid_start_ticks": 0,
    "command": "",
    "launches": 0,
    "graph_launches": 0,
    "syncs": 0,
    "sync_ns": 0,
    "captured_operations": 0,
}


def _processes(m: pb.Batch, limits: Limits) -> tuple[Mapping[str, object], ...]:
    if len(m.processes) > limits.processes:
        _refuse("rows", f"{len(m.processes)} processes, the limit is {limits.processes}")
    missing = _PROCESS | {"node": m.node}
    return tuple(missing | _fields(p, "process", limits.text) for p in m.processes)


def _health(h: pb.Health) -> Mapping[str, float]:
    return {field: float(getattr(h, field)) for field in HEALTH_TOTALS}


def _losses(h: pb.Health, limits: Limits) -> Mapping[str, int]:
    if len(h.events_lost) > limits.entries:
        _refuse("rows", f"health.events_lost has more than {limits.entries} causes")
    return {_text("health.events_lost", k, limits.text): v for k, v in h.events_lost.items()}


def _sources(h: pb.Health, limits: Limits) -> Mapping[str, bool]:
    if len(h.source_success) > limits.entries:
        _refuse("rows", f"health.source_success has more than {limits.entries} sources")
    return {_text("health.source_success", k, limits.text): v for k, v in h.source_success.items()}


def _failed(h: pb.Health, limits: Limits) -> tuple[str, ...]:
    if len(h.libraries_failed) > limits.entries:
        _refuse("rows", f"health.libraries_failed has more than {limits.entries} entries")
    # "path: why" comes from other programs' files: cut and made printable, never refused.
    return tuple(
        "".join(c if c.isprintable() else "?" for c in text[: limits.text])
        for text in h.libraries_failed
    )
