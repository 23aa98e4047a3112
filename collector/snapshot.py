"""What the collector knows at one instant: immutable, built by `analyse`, read by every surface.

Prometheus export, the JSON view and `top` all render this and nothing else. Numbers that cannot be
known are NaN (or None), never zero and never a guess. Totals only grow while a communicator lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

EVIDENCE = ("none", "device", "blocking", "enqueue")
CLASSES = ("none", "unknown", "slow_compute", "slow_host", "hot_expert", "slow_sender",
           "slow_receiver", "slow_path", "throttled", "hang")  # fmt: skip
METHODS = ("none", "peers", "history", "intermittent", "drift", "hang")
ROLES = ("unknown", "dispatch", "combine")
DOMAINS = ("same_gpu", "same_node", "cross_node", "unknown")


@dataclass(frozen=True)
class LongWait:
    """One operation in which a rank waited long."""

    seconds: float
    seq: int  # of the operation in its communicator
    rank: int  # that waited longest
    last_rank: int  # that came last
    at: float  # UNIX seconds


@dataclass(frozen=True)
class Histogram:
    """Durations of one kind: `bins[b]` counts [2^b, 2^(b+1)) ns, `sum_seconds` their sum."""

    bins: I64
    sum_seconds: float
    longest: LongWait | None = None  # of late, where it is known


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
    # Of named ranks; length R, or empty where not known:
    recoverable_share: F64 = field(default_factory=lambda: np.zeros(0))  # of the time, if fixed
    why: tuple[str, ...] = ()  # the evidence for the class, for people; may be empty
    # What the verdict rests on; length R, or empty where not known:
    method: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # index into METHODS
    found_ratio: F64 = field(default_factory=lambda: np.zeros(0))  # that the method found
    score: F64 = field(default_factory=lambda: np.zeros(0))  # excess over what noise allows
    compared: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # peers compared with
    windows: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # since it was named
    # [evidence, R] totals of all that was ever known, NaN where none was; empty: as above
    wait_by_source: F64 = field(default_factory=lambda: np.zeros((0, 0)))
    blame_by_source: F64 = field(default_factory=lambda: np.zeros((0, 0)))


# Where a rank of a communicator that stands still is; see analyse.hang_states.
HANG_STATES = (
    "gone", "not_arrived", "not_arrived_host_running", "not_arrived_host_synchronising",
    "arrived_device_not_started", "arrived_device_started", "arrived_in_call", "arrived", "unknown",
    "stopped", "in_earlier_call",
)  # fmt: skip


@dataclass(frozen=True)
class HangState:
    """The ranks in one of HANG_STATES."""

    state: str
    ranks: tuple[int, ...]
    seconds: float  # the longest of them; NaN unknown
    text: str  # of these ranks, in words


@dataclass(frozen=True)
class HangView:
    """A communicator that stands still; ranks are those of the communicator."""

    seconds: float  # since anything happened in it
    op: str  # that the ranks are in; "" unknown
    seq: int
    missing: tuple[int, ...]  # none: all are in it, and it does not end
    gone: tuple[int, ...]  # those of them whose process has ended
    arrived: tuple[int, ...]
    states: tuple[HangState, ...] = ()  # each rank is in one of them


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
    # Of the same, by rank: [n_ranks] shares that sum to 1, and tokens in the span where the bytes
    # of a token are known for all of it; None: unknown
    load_share: F64 | None = None
    tokens: I64 | None = None
    absent_code: str = ""  # absent_reason as a label value: one of few, without numbers
    # [n_ranks, n_ranks] seconds that a receive (row) from a rank (column) took once both were
    # there, mean of the last window; None: no receives were timed
    wait_matrix: F64 | None = None
    matrix_absent: str = ""  # why, for people: without it senders, receivers and paths are unknown
    recoverable_share: float = float("nan")  # of the time, every rank at its role's median
    serving: StepView | None = None  # where its steps are known
    hang: HangView | None = None


@dataclass(frozen=True)
class Blamed:
    """A process, by its rank in its largest communicator."""

    comm: int  # index into Snapshot.communicators
    rank: int
    node: int  # index into Snapshot.nodes
    pid: int
    share: float  # of the workload's time


@dataclass(frozen=True)
class JobView:
    workload: str
    recoverable_share: float  # of the step, every rank at its role's median; NaN unknown
    blame: tuple[Blamed, ...]  # largest first; the shares of all ranks sum to at most 1


# The stages of Stages in telemetry.proto that are shown one by one.
STAGES = ("other", "attention", "routing", "permutation", "expert_gemm", "dispatch", "combine",
          "collective")  # fmt: skip


@dataclass(frozen=True)
class StageView:
    """GPU time of one process on one device, by stage, from its kernels as timed there."""

    workload: str
    rank: int  # in the process's largest communicator
    node: int  # index into Snapshot.nodes
    pid: int
    device: int  # as the process numbers them
    gpu: str  # NVML index as text, "" when unknown
    whole: bool  # all kernels were told in the span, not a sample of them
    # By name, of STAGES; totals since the process was first told of.
    count: Mapping[str, int]
    sum_seconds: Mapping[str, float]  # kernels side by side each by itself
    busy_seconds: Mapping[str, float]  # time with at least one of them
    span_seconds: float  # time that these figures cover
    bubble: float  # 1 - |compute or transfer| / time in the span, waits excluded; NaN unknown
    comm_compute: float  # transfer of dispatch and combine / expert GEMMs; NaN unknown


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


class Place(NamedTuple):
    """Where a process belongs; "" unknown, or not there."""

    pod: str = ""
    namespace: str = ""
    container: str = ""
    owner_kind: str = ""
    owner: str = ""
    slurm_job: str = ""
    slurm_step: str = ""
    unit: str = ""
    mig: str = ""


@dataclass(frozen=True)
class GpuView:
    node: int
    index: int
    uuid: str
    bus_id: str
    name: str
    values: Mapping[str, float]  # the optional fields of proto Gpu that were present
    throttle_reasons: tuple[str, ...]


@dataclass(frozen=True)
class ExpertView:
    """Load of the experts of one model, as one source told it; arrays are not to be changed.

    `load` and `hour` are of logical experts wherever these are known, else of what `unit` says.
    """

    workload: str
    engine: str
    source: str
    model: str
    unit: str  # logical, physical (of unknown replicas), rank
    layer: tuple[int, ...]  # number of each of the L rows
    load: F64  # [L, E] assignments in the last window that had any
    tokens: F64  # [L]; NaN unknown
    physical_load: F64 | None  # [L, P] the same by physical expert, where the two differ
    rank_of_expert: I64 | None  # [L, P or E] where each is; None: unknown
    logical_of_physical: I64 | None  # [L, P]
    measures: Mapping[str, F64]  # name -> [L], as in analyse.layers.LayerMeasures
    summary: Mapping[str, float]  # over layers
    window_end: float  # UNIX seconds
    hour: F64 = field(default_factory=lambda: np.zeros((0, 0)))  # [L, E] in the last hour
    hour_seconds: float = 0.0  # how much of it is known
    top: I64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [L, 5] of the hour
    hot: I64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [L, E / 10] of the hour
    primary: bool = False  # the source that the metrics of the workload show

    def with_hour(self, hour: F64, seconds: float, top: I64, hot: I64) -> ExpertView:
        return replace(self, hour=hour, hour_seconds=seconds, top=top, hot=hot)

    def as_primary(self, primary: bool) -> ExpertView:
        return self if self.primary == primary else replace(self, primary=primary)


@dataclass(frozen=True)
class StepView:
    """Steps of a communicator with expert layers; seconds, means over its ranks."""

    period: int  # operations in the usual step
    evidence: str
    steps: Mapping[str, npt.NDArray[np.generic]]  # the latest; columns of analyse.steps.Steps
    usual: npt.NDArray[np.bool_]  # which of them are of the most common kind
    medians: Mapping[str, float]  # by part, over all known steps of that kind


@dataclass(frozen=True)
class RankSteps:
    """Steps of one rank over all of its communicators, where it has several."""

    comm: int  # index into Snapshot.communicators: the one with expert layers
    rank: int  # in that
    pid: int
    communicators: tuple[int, ...]  # all that the steps are over
    steps: StepView


@dataclass(frozen=True)
class EngineView:
    """What an engine tells of itself: ttft_p95 and so on in seconds, balancedness, counts."""

    workload: str
    engine: str
    address: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class AdviceOption:
    """One way to go on that was weighed; shares are of the busiest GPU's time."""

    kind: str
    gain: float  # mean over windows that the plan was not made from
    at_least: float  # what the next window may give, given how those scattered
    added_slots: int
    moved_experts: int


@dataclass(frozen=True)
class AdviceView:
    """One piece of advice; kind "nothing" is the advice to leave things as they are."""

    workload: str
    kind: str  # nothing, placement, hot_set, replication, move_shared, bias, batch, stop_dropping
    text: str  # one sentence, for people
    gain: float  # expected on the next window, share of the time; NaN where it cannot be said
    evidence: Mapping[str, float] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # why this, or why nothing
    warning: str = ""
    options: tuple[AdviceOption, ...] = ()  # what else was weighed, "nothing" among it
    layers: tuple[int, ...] = ()  # numbers of the rows of the plan
    plan: I64 | None = None  # [layers, slots] the expert in each slot
    gpus: int = 0  # slot s of a layer is on GPU s // (slots / gpus)


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
    jobs: tuple[JobView, ...] = ()
    experts: Sequence[ExpertView] = ()
    engines: Sequence[EngineView] = ()
    advice: Sequence[AdviceView] = ()
    stages: tuple[StageView, ...] = ()
    # (index into nodes, pid) -> where the process belongs, as far as that is known
    places: Mapping[tuple[int, int], Place] = field(default_factory=dict)
    rank_steps: tuple[RankSteps, ...] = ()
