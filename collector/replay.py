"""A recording through the same analysis, in the recording's own time: no clock is read.

Snapshots are taken when the live collector would have taken them, by the receive times of the
frames, so that the output depends on the recording alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.checks import Limits
from lanterne.collector.clock import ClockObservation
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused, RecordingError
from lanterne.collector.recording import (
    BATCH,
    CLOCK,
    MOST_FRAME,
    Damage,
    Header,
    Received,
    parts,
    read,
    read_header,
)
from lanterne.collector.snapshot import Snapshot
from lanterne.proto import telemetry_pb2 as pb

NS = 10**9
SNAPSHOT_NS = NS
GAP_SNAPSHOTS = 600  # of a silence; a longer one is passed over: nothing is left to be forgotten
LIMITS = Limits(batch_bytes=MOST_FRAME)  # what was accepted then is accepted now


@dataclass
class Source:
    """What was read; complete once `snapshots` has ended."""

    files: tuple[str, ...]
    header: Header
    frames: int = 0
    batches: int = 0
    refused: int = 0
    first_ns: int = 0  # when the first frame came
    lead_ns: int = 0  # how much before that the first batch begins
    last_ns: int = 0
    damage: Damage = field(default_factory=Damage)

    def unix(self, monotonic_ns: int) -> float:
        return (monotonic_ns + self.header.created_ns - self.header.monotonic_ns) / NS

    @property
    def start(self) -> float:
        """UNIX seconds from which there is data."""
        return self.unix(self.first_ns - self.lead_ns)

    @property
    def seconds(self) -> float:
        return (self.last_ns - self.first_ns + self.lead_ns) / NS


def open_recording(path: Path) -> tuple[Source, list[Path]]:
    """Raises RecordingError."""
    files = parts(path)
    return Source(tuple(f.name for f in files), read_header(path)), files


class Moment(NamedTuple):
    snapshot: Snapshot
    at: float  # seconds of the recording up to which data is in it


def snapshots(source: Source, files: list[Path]) -> Iterator[Moment]:
    """One a second of the recording's time, and the last. Raises RecordingError if it is empty."""
    engine = Engine(engine_config(source.header.engine), boot_id=source.header.boot_id)
    due = 0
    for file in files:
        for received in read(file, source.damage):
            if not due:
                source.first_ns = received.received_ns
                # Half way between the batches of its node, so that each second gets its own.
                due = received.received_ns + SNAPSHOT_NS // 2
            for at in _due(due, received.received_ns):
                data = at - source.first_ns + source.lead_ns // 2
                yield Moment(engine.snapshot(source.unix(at), now_ns=at), data / NS)
                due = at + SNAPSHOT_NS
            source.frames += 1
            source.last_ns = max(source.last_ns, received.received_ns)
            _apply(engine.apply, received, source)
    if not source.frames:
        raise RecordingError(f"{source.files[-1]}: holds no frames: no agent reported meanwhile")
    last = source.unix(source.last_ns)
    yield Moment(engine.snapshot(last, now_ns=source.last_ns), source.seconds)
    # Nothing comes any more: what still waits for late ranks is decided, and counts as of then.
    end = source.last_ns + int(engine.config.deadline_seconds * NS) + 1
    yield Moment(engine.snapshot(last, now_ns=end), source.seconds)


def _due(due: int, now: int) -> Iterator[int]:
    """When snapshots are to be taken until `now`."""
    passed = max(0, (now - due) // SNAPSHOT_NS + 1)
    for number in range(min(passed, GAP_SNAPSHOTS)):
        yield due + number * SNAPSHOT_NS
    if passed > GAP_SNAPSHOTS:
        yield now


def _apply(apply: Callable[..., None], received: Received, source: Source) -> None:
    try:
        frame = pb.Frame.FromString(received.frame)
        if received.flags & CLOCK and frame.HasField("clock"):
            c = frame.clock
            apply(
                ClockObservation(
                    node=frame.node,
                    agent_sent_ns=c.agent_sent_ns,
                    collector_received_ns=c.collector_received_ns,
                    collector_sent_ns=c.collector_sent_ns,
                    agent_received_ns=c.agent_received_ns,
                )
            )
        if received.flags & BATCH:
            batch = decode(frame.batch, received_ns=received.received_ns, limits=LIMITS)
            if not source.batches:
                source.lead_ns = batch.head.end_ns - batch.head.start_ns
            source.batches += 1
            apply(batch)
    except (BatchRefused, DecodeError):
        source.refused += 1


def engine_config(recorded: Mapping[str, float]) -> EngineConfig:
    """The settings of the collector that recorded; those that are unknown here are left out."""
    default = EngineConfig()
    known = {
        f.name: type(getattr(default, f.name))(recorded[f.name])
        for f in fields(EngineConfig)
        if f.name in recorded
    }
    return EngineConfig(**known)
