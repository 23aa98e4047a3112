"""Readings of GPUs and processes: checked when they come in, turned into rows when looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf.message import Message

from lanterne.collector.checks import Limits, refuse, text
from lanterne.proto import telemetry_pb2 as pb

MAX_DEVICES = 65_536


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    bus_id: str
    name: str
    values: Mapping[str, float]  # the optional fields of proto Gpu that were present
    throttle_reasons: tuple[str, ...]
    process_memory_bytes: Mapping[int, int]


def check_gpu(g: pb.Gpu, limits: Limits) -> bytes:
    """-> the reading, encoded. Raises BatchRefused."""
    _check_names(g.uuid, g.bus_id, g.name, limits.text)
    sum_of_all = (
        g.utilization_ratio
        + g.temperature_celsius
        + g.power_watts
        + g.energy_joules
        + g.sm_clock_hertz
        + g.sm_clock_max_hertz
    )
    if not math.isfinite(sum_of_all):  # one look instead of six; which one it was matters now
        _check_numbers(g, "gpu")
    reasons = g.throttle_reasons
    if reasons:
        if len(reasons) > limits.entries:
            refuse("rows", f"gpu.throttle_reasons has more than {limits.entries} entries")
        for reason in reasons:
            text("gpu.throttle_reasons", reason, limits.text)
    if len(g.process_memory_bytes) > limits.processes:
        refuse("rows", f"gpu.process_memory_bytes has more than {limits.processes} entries")
    return g.SerializeToString()


def check_process(p: pb.Process, limits: Limits) -> bytes:
    """-> the reading, encoded. Raises BatchRefused."""
    if p.command:
        text("process.command", p.command, limits.text)
    if len(p.cuda) > limits.entries:
        refuse("rows", f"process.cuda has {len(p.cuda)} entries, the limit is {limits.entries}")
    for use in p.cuda:
        if not -1 <= use.device < MAX_DEVICES:
            refuse("number", f"process.cuda.device is {use.device}")
    pressure = p.memory_pressure_ratio + p.cpu_pressure_ratio
    seconds = p.cpu_seconds + p.run_queue_seconds + p.synchronising_seconds
    if not math.isfinite(seconds + pressure):
        _check_numbers(p, "process")
    return p.SerializeToString()


@lru_cache(maxsize=1 << 15)
def _check_names(uuid: str, bus_id: str, name: str, longest: int) -> None:
    """Cached: these do not change. A refusal is not cached, it is raised every time."""
    text("gpu.uuid", uuid, longest)
    text("gpu.bus_id", bus_id, longest)
    text("gpu.name", name, longest)


# Where a process belongs: fields of proto Process, in the order of their numbers.
PLACE_FIELDS = (
    "pod", "namespace", "container", "owner_kind", "owner", "slurm_job", "slurm_step", "unit",
    "mig",
)  # fmt: skip
PlaceTexts = tuple[str, ...]  # one for each of them; empty where nothing is known
NO_PLACE: PlaceTexts = ()


def place_of(p: pb.Process, limits: Limits) -> PlaceTexts:
    """Raises BatchRefused."""
    place = (
        p.pod, p.namespace, p.container, p.owner_kind, p.owner, p.slurm_job, p.slurm_step, p.unit,
        p.mig,
    )  # fmt: skip
    return _checked_place(place, limits.text) if any(place) else NO_PLACE


@lru_cache(maxsize=1 << 15)
def _checked_place(place: PlaceTexts, longest: int) -> PlaceTexts:
    """Cached: the same text objects serve for every batch."""
    for name, value in zip(PLACE_FIELDS, place, strict=True):
        text(f"process.{name}", value, longest)
    return place


def _check_numbers(message: Message, table: str) -> None:
    for field, value in message.ListFields():
        if type(value) is float and not math.isfinite(value):
            refuse("number", f"{table}.{field.name} is {value}")


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def gpu_of(data: bytes) -> Gpu:
    """A reading that `check_gpu` has passed."""
    row = _fields(pb.Gpu.FromString(data))
    reasons = tuple(row.pop("throttle_reasons", ()))
    memory = dict(row.pop("process_memory_bytes", {}))
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
    "steps": 0,
    "blind_steps": 0,
} | dict.fromkeys(PLACE_FIELDS, "")
_STREAMS = ("none", "legacy", "per_thread", "named")  # StreamKind; beyond: unknown


def process_of(data: bytes, node: str) -> Mapping[str, object]:
    """A reading that `check_process` has passed: proto Process's fields, and "node".

    "cuda" is a tuple of mappings with the fields of CudaUse; device None where it is unknown."""
    row = _fields(pb.Process.FromString(data))
    row["cuda"] = tuple(_cuda(use) for use in row.get("cuda", ()))
    return _PROCESS | {"node": node} | row


def _cuda(use: pb.CudaUse) -> dict[str, object]:
    return {
        "device": None if use.device < 0 else use.device,
        "stream": _STREAMS[use.stream] if use.stream < len(_STREAMS) else "unknown",
        "launches": use.launches,
        "graph_launches": use.graph_launches,
        "syncs": use.syncs,
        "sync_ns": use.sync_ns,
    }
