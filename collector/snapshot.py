"""What the collector knows at one instant: immutable, built by `analyse`, read by every surface.

Prometheus export, the JSON view and `top` all render this and nothing else. Numbers that cannot be
known are NaN (or None), never zero and never a guess. Totals only grow while a communicator lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

EVIDENCE = ("none", "device", "blocking", "enqueue")
CLASSES = ("none", "unknown", "slow_compute", "slow_host", "hot_expert", "slow_sender",
           "slow_receiver", "slow_path", "throttled", "hang")  # fmt: skip
ROLES = ("unknown", "dispatch", "combine")
DOMAINS = ("same_gpu", "same_node", "cross_node", "unknown")


@dataclass(frozen=True)
class Histogram:
    """Durations of one kind: `bins[b]` counts [2^b, 2^(b+1)) ns, `sum_seconds` their sum."""

    bins: I64
    sum_seconds: float


@dataclass(frozen=True)
class Ranks:
    """One row per (communicator, rank), all columns of the same length R."""

    comm: I64  # index into Snapshot.communicators
    rank: I64
    node: I64  # index into Snapshot.nodes
    pid: I64
    gpu: tuple[str, ...]  # NVML index as text, "" when unknown
    evidence: I64  # index into EVIDENCE: what the waits below rest on; 0: no wait is known
    wait_seconds: F64  # total barrier wait; NaN when no evidence
    blame_seconds: F64  # total time that the others would get back if this rank alone were fixed
    comm_seconds: F64  # total transfer time, waits removed; NaN without durations
    compute_seconds: F64  # total own time between operations
    # Over the last analysed span (Snapshot.span_seconds):
    wait_share: F64  # 0..1
    blame_share: F64  # 0..1, sums to at most 1 over a communicator
    own_seconds: F64  # median own time between operations
    straggler_ratio: F64  # own time over the median of same-role peers; NaN below 10 samples
    straggler: I64  # 0/1 verdict
    klass: I64  # index into CLASSES; 0 where straggler == 0
    confidence: F64  # 0..1 of the verdict
    samples: I64  # complete instances behind these figures


@dataclass(frozen=True)
class CommunicatorView:
    comm_hash: int
    library: str  # nccl, gloo, deepep
    workload: str
    name: str  # label value: commName, or role and size; never a pointer or hash
    role: str
    n_ranks: int
    ranks_seen: int
    evidence: int  # index into EVIDENCE, best in the span
    absent_reason: str  # why waits are absent, for people; "" when they are not
    wait_share: float  # mean over ranks in the span
    complete_share: float  # instances with every rank, of those whose deadline passed
    instances: int
    waits_for: int  # rank that the others wait for most; -1 none
    last_end_ns: int  # collector clock of the newest instance
    # (op name, source name) -> histogram
    durations: Mapping[tuple[str, str], Histogram] = field(default_factory=dict)
    waits: Mapping[tuple[str, str], Histogram] = field(default_factory=dict)
    # (op name, source name) -> calls, calls that returned an error, bytes; source "none" included
    calls: Mapping[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    # source name -> histogram; only where dispatch and combine were told apart
    dispatch: Mapping[str, Histogram] = field(default_factory=dict)
    combine: Mapping[str, Histogram] = field(default_factory=dict)
    # [n_ranks, len(DOMAINS)] bytes sent, total; None when no traffic is known
    bytes_by_domain: I64 | None = None
    # [n_ranks, n_ranks] bytes from row to column in the span; None when unknown or too large
    traffic: I64 | None = None
    # skew, gini, balancedness over ranks in the span: of what their combines sent back where these
    # are known, else of all bytes received; absent: unknown
    load: Mapping[str, float] = field(default_factory=dict)
    absent_code: str = ""  # absent_reason as a label value: one of few, without numbers


@dataclass(frozen=True)
class NodeView:
    name: str
    epoch: int
    agent_version: str
    connected: bool
    last_window_end: float  # UNIX seconds
    clock_offset_seconds: float  # NaN until known
    clock_error_seconds: float
    health: Mapping[str, float] = field(default_factory=dict)
    events_lost: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, bool] = field(default_factory=dict)
    libraries_failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuView:
    node: int
    index: int
    uuid: str
    bus_id: str
    name: str
    values: Mapping[str, float]  # the optional fields of proto Gpu that were present
    throttle_reasons: tuple[str, ...]


T = TypeVar("T")


class Later(Sequence[T]):
    """Made when first looked at: most snapshots are replaced before anybody does."""

    def __init__(self, make: Callable[[], tuple[T, ...]]) -> None:
        self._make = make
        self._made: tuple[T, ...] | None = None

    def _all(self) -> tuple[T, ...]:
        if self._made is None:  # twice at worst, where two threads are the first
            self._made = self._make()
        return self._made

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


@dataclass(frozen=True)
class Snapshot:
    taken_at: float  # UNIX seconds
    span_seconds: float
    nodes: tuple[NodeView, ...]
    communicators: tuple[CommunicatorView, ...]
    ranks: Ranks
    gpus: Sequence[GpuView]
    processes: Sequence[Mapping[str, object]]  # proto Process fields, plus "node"
    ingest: Mapping[str, int]  # batches_accepted, batches_duplicate, batches_refused, rows, ...
    refused: Mapping[str, int]  # by reason code
