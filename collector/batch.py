"""What one validated Batch holds: the columns and facts that `align` and `analyse` rely on.

`decode` makes these; every value has been checked there. Columns of one width lie in one block, so
that a batch costs a few numpy calls however many columns it has: batches are many and small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lanterne.collector.readings import Gpu, gpu_of, process_of

HISTOGRAM_BINS = 48

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
S = TypeVar("S", bound=np.generic)


def _row(block: npt.NDArray[S], number: int) -> npt.NDArray[S]:
    row: npt.NDArray[S] = block[number]
    return row


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
    """Columns of proto Instances; times ns on the agent's clock."""

    words: U32  # [2, rows] communicator, seq
    small: U8  # [5, rows] lane, op, role, evidence, flags
    large: I64  # [4, rows] arrival_ns, duration_ns, payload_bytes, sync_blocked_ns

    def __len__(self) -> int:
        return int(self.words.shape[1])

    @property
    def communicator(self) -> U32:
        return _row(self.words, 0)

    @property
    def seq(self) -> U32:
        return _row(self.words, 1)

    @property
    def lane(self) -> U8:
        return _row(self.small, 0)

    @property
    def op(self) -> U8:
        return _row(self.small, 1)

    @property
    def role(self) -> U8:
        return _row(self.small, 2)

    @property
    def evidence(self) -> U8:
        return _row(self.small, 3)

    @property
    def flags(self) -> U8:
        return _row(self.small, 4)

    @property
    def arrival_ns(self) -> I64:
        return _row(self.large, 0)

    @property
    def duration_ns(self) -> I64:
        return _row(self.large, 1)

    @property
    def payload_bytes(self) -> I64:
        return _row(self.large, 2)

    @property
    def sync_blocked_ns(self) -> I64:
        return _row(self.large, 3)


@dataclass(frozen=True, slots=True)
class Summaries:
    """Columns of proto Summaries."""

    communicator: U32
    small: U8  # [3, rows] op, role, evidence
    large: I64  # [4, rows] count, errors, payload_bytes, duration_sum_ns
    histogram: U32  # [rows, 48]
    token_bytes: U32  # [rows], 0 unknown; [0] where none is known

    def __len__(self) -> int:
        return len(self.communicator)

    @property
    def count(self) -> I64:
        return _row(self.large, 0)


@dataclass(frozen=True, slots=True)
class Traffic:
    words: U32  # [2, rows] communicator, peer
    large: I64  # [2, rows] sent_bytes, received_bytes
    waits: I64  # [2, rows] receives, wait_ns; [2, 0] where no receive was timed

    def __len__(self) -> int:
        return int(self.words.shape[1])

    @property
    def communicator(self) -> U32:
        return _row(self.words, 0)

    @property
    def peer(self) -> U32:
        return _row(self.words, 1)

    @property
    def sent_bytes(self) -> I64:
        return _row(self.large, 0)

    @property
    def received_bytes(self) -> I64:
        return _row(self.large, 1)

    @property
    def receives(self) -> I64:
        return _row(self.waits, 0)

    @property
    def wait_ns(self) -> I64:
        return _row(self.waits, 1)


@dataclass(frozen=True, slots=True)
class Stages:
    """Kernels of processes by device and stage; see the message of that name."""

    words: U32  # [2, rows] pid, device
    small: U8  # [2, rows] stage, whole
    large: I64  # [5, rows] start_ticks, count, sum_ns, union_ns, span_ns

    def __len__(self) -> int:
        return int(self.words.shape[1])


NO_STAGES = Stages(
    np.zeros((2, 0), np.uint32), np.zeros((2, 0), np.uint8), np.zeros((5, 0), np.int64)
)


@dataclass(frozen=True, slots=True)
class Pending:
    """What was begun and is not over at the window's end; see the message of that name."""

    words: U32  # [2, rows] communicator, seq
    small: U8  # [4, rows] lane, op, evidence, state
    entered_ns: I64

    def __len__(self) -> int:
        return int(self.words.shape[1])


NO_PENDING = Pending(np.zeros((2, 0), np.uint32), np.zeros((4, 0), np.uint8), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Head:
    """Everything but the columns: what is kept of a node's newest batch.

    Readings of GPUs and processes stay encoded (checked) until somebody looks at them: every second
    brings new ones, and most are never looked at.
    """

    node: str
    epoch: int
    sequence: int
    agent_version: str
    boot_id: str
    start_ns: int
    end_ns: int
    realtime_offset_ns: int
    stride: int
    received_ns: int  # the collector's CLOCK_MONOTONIC
    encoded_bytes: int  # size of the whole batch
    encoded_gpus: tuple[bytes, ...]
    encoded_processes: tuple[bytes, ...]
    process_keys: tuple[tuple[int, int], ...]  # pid, pid_start_ticks
    process_places: tuple[tuple[str, ...], ...]  # readings.PLACE_FIELDS; empty: none is known
    health: Mapping[str, float]
    events_lost: Mapping[str, int]
    sources: Mapping[str, bool]
    libraries_failed: tuple[str, ...]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(map(gpu_of, self.encoded_gpus))

    @property
    def processes(self) -> tuple[Mapping[str, object], ...]:
        return tuple(process_of(data, self.node) for data in self.encoded_processes)


@dataclass(frozen=True, slots=True)
class Reports:
    """What engines told, still encoded (checked): see `reports`."""

    expert_loads: tuple[bytes, ...] = ()
    engine_readings: tuple[bytes, ...] = ()


NO_REPORTS = Reports()


NO_STRIDES = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch that may be applied."""

    head: Head
    communicators: Communicators
    instances: Instances
    summaries: Summaries
    traffic: Traffic
    reports: Reports = NO_REPORTS
    stages: Stages = NO_STAGES
    pending: Pending = NO_PENDING
    strides: U32 = field(
        default_factory=lambda: NO_STRIDES
    )  # of each communicator; [0]: `stride` is that of all

    @property
    def node(self) -> str:
        return self.head.node

    @property
    def epoch(self) -> int:
        return self.head.epoch

    @property
    def sequence(self) -> int:
        return self.head.sequence

    @property
    def stride(self) -> int:
        return self.head.stride

    @property
    def received_ns(self) -> int:
        return self.head.received_ns
