from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_ACCEPTED: _ClassVar[Status]
    STATUS_DUPLICATE: _ClassVar[Status]
    STATUS_REFUSED: _ClassVar[Status]
    STATUS_RETRY: _ClassVar[Status]

class Library(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIBRARY_UNSPECIFIED: _ClassVar[Library]
    LIBRARY_NCCL: _ClassVar[Library]
    LIBRARY_GLOO: _ClassVar[Library]
    LIBRARY_DEEPEP: _ClassVar[Library]

class Identity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IDENTITY_UNSPECIFIED: _ClassVar[Identity]
    IDENTITY_INIT_ARGUMENTS: _ClassVar[Identity]
    IDENTITY_DERIVED: _ClassVar[Identity]
    IDENTITY_STRUCTURE: _ClassVar[Identity]
    IDENTITY_STORE: _ClassVar[Identity]
    IDENTITY_ENVIRONMENT: _ClassVar[Identity]
    IDENTITY_PROCESS: _ClassVar[Identity]
    IDENTITY_RAS: _ClassVar[Identity]

class StreamKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_KIND_NONE: _ClassVar[StreamKind]
    STREAM_KIND_LEGACY: _ClassVar[StreamKind]
    STREAM_KIND_PER_THREAD: _ClassVar[StreamKind]
    STREAM_KIND_NAMED: _ClassVar[StreamKind]
    STREAM_KIND_UNREAD: _ClassVar[StreamKind]

class Unit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNIT_UNSPECIFIED: _ClassVar[Unit]
    UNIT_LOGICAL: _ClassVar[Unit]
    UNIT_PHYSICAL: _ClassVar[Unit]
    UNIT_RANK: _ClassVar[Unit]
STATUS_UNSPECIFIED: Status
STATUS_ACCEPTED: Status
STATUS_DUPLICATE: Status
STATUS_REFUSED: Status
STATUS_RETRY: Status
LIBRARY_UNSPECIFIED: Library
LIBRARY_NCCL: Library
LIBRARY_GLOO: Library
LIBRARY_DEEPEP: Library
IDENTITY_UNSPECIFIED: Identity
IDENTITY_INIT_ARGUMENTS: Identity
IDENTITY_DERIVED: Identity
IDENTITY_STRUCTURE: Identity
IDENTITY_STORE: Identity
IDENTITY_ENVIRONMENT: Identity
IDENTITY_PROCESS: Identity
IDENTITY_RAS: Identity
STREAM_KIND_NONE: StreamKind
STREAM_KIND_LEGACY: StreamKind
STREAM_KIND_PER_THREAD: StreamKind
STREAM_KIND_NAMED: StreamKind
STREAM_KIND_UNREAD: StreamKind
UNIT_UNSPECIFIED: Unit
UNIT_LOGICAL: Unit
UNIT_PHYSICAL: Unit
UNIT_RANK: Unit

class Frame(_message.Message):
    __slots__ = ("node", "sent_ns", "clock", "batch")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    node: str
    sent_ns: int
    clock: ClockSample
    batch: bytes
    def __init__(self, node: _Optional[str] = ..., sent_ns: _Optional[int] = ..., clock: _Optional[_Union[ClockSample, _Mapping]] = ..., batch: _Optional[bytes] = ...) -> None: ...

class ClockSample(_message.Message):
    __slots__ = ("agent_sent_ns", "collector_received_ns", "collector_sent_ns", "agent_received_ns")
    AGENT_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    AGENT_RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    agent_sent_ns: int
    collector_received_ns: int
    collector_sent_ns: int
    agent_received_ns: int
    def __init__(self, agent_sent_ns: _Optional[int] = ..., collector_received_ns: _Optional[int] = ..., collector_sent_ns: _Optional[int] = ..., agent_received_ns: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("epoch", "sequence", "status", "reason", "frame_sent_ns", "collector_received_ns", "collector_sent_ns", "stride", "origins", "taken")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FRAME_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    status: Status
    reason: str
    frame_sent_ns: int
    collector_received_ns: int
    collector_sent_ns: int
    stride: int
    origins: Origins
    taken: bool
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., status: _Optional[_Union[Status, str]] = ..., reason: _Optional[str] = ..., frame_sent_ns: _Optional[int] = ..., collector_received_ns: _Optional[int] = ..., collector_sent_ns: _Optional[int] = ..., stride: _Optional[int] = ..., origins: _Optional[_Union[Origins, _Mapping]] = ..., taken: _Optional[bool] = ...) -> None: ...

class Origins(_message.Message):
    __slots__ = ("epoch", "rows", "comm_hash", "rank", "lane", "offset", "whole")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMM_HASH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rows: int
    comm_hash: bytes
    rank: bytes
    lane: bytes
    offset: bytes
    whole: bytes
    def __init__(self, epoch: _Optional[int] = ..., rows: _Optional[int] = ..., comm_hash: _Optional[bytes] = ..., rank: _Optional[bytes] = ..., lane: _Optional[bytes] = ..., offset: _Optional[bytes] = ..., whole: _Optional[bytes] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("schema", "node", "epoch", "sequence", "agent_version", "boot_id", "start_ns", "end_ns", "realtime_offset_ns", "stride", "communicators", "instances", "summaries", "traffic", "gpus", "processes", "health", "expert_loads", "engine_readings", "pending", "stages", "strides")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    REALTIME_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATORS_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    SUMMARIES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOADS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_READINGS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    schema: int
    node: str
    epoch: int
    sequence: int
    agent_version: str
    boot_id: str
    start_ns: int
    end_ns: int
    realtime_offset_ns: int
    stride: int
    communicators: _containers.RepeatedCompositeFieldContainer[Communicator]
    instances: Instances
    summaries: Summaries
    traffic: Traffic
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    health: Health
    expert_loads: _containers.RepeatedCompositeFieldContainer[ExpertLoad]
    engine_readings: _containers.RepeatedCompositeFieldContainer[EngineReading]
    pending: Pending
    stages: Stages
    strides: bytes
    def __init__(self, schema: _Optional[int] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., agent_version: _Optional[str] = ..., boot_id: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., realtime_offset_ns: _Optional[int] = ..., stride: _Optional[int] = ..., communicators: _Optional[_Iterable[_Union[Communicator, _Mapping]]] = ..., instances: _Optional[_Union[Instances, _Mapping]] = ..., summaries: _Optional[_Union[Summaries, _Mapping]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., health: _Optional[_Union[Health, _Mapping]] = ..., expert_loads: _Optional[_Iterable[_Union[ExpertLoad, _Mapping]]] = ..., engine_readings: _Optional[_Iterable[_Union[EngineReading, _Mapping]]] = ..., pending: _Optional[_Union[Pending, _Mapping]] = ..., stages: _Optional[_Union[Stages, _Mapping]] = ..., strides: _Optional[bytes] = ...) -> None: ...

class Communicator(_message.Message):
    __slots__ = ("comm_hash", "library", "n_ranks", "rank", "name", "pid", "pid_start_ticks", "workload", "gpu_bus_id", "gpu_index", "identity", "complete", "parent_hash", "role")
    COMM_HASH_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    N_RANKS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_TICKS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    GPU_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    GPU_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    comm_hash: int
    library: Library
    n_ranks: int
    rank: int
    name: str
    pid: int
    pid_start_ticks: int
    workload: str
    gpu_bus_id: str
    gpu_index: int
    identity: Identity
    complete: bool
    parent_hash: int
    role: str
    def __init__(self, comm_hash: _Optional[int] = ..., library: _Optional[_Union[Library, str]] = ..., n_ranks: _Optional[int] = ..., rank: _Optional[int] = ..., name: _Optional[str] = ..., pid: _Optional[int] = ..., pid_start_ticks: _Optional[int] = ..., workload: _Optional[str] = ..., gpu_bus_id: _Optional[str] = ..., gpu_index: _Optional[int] = ..., identity: _Optional[_Union[Identity, str]] = ..., complete: _Optional[bool] = ..., parent_hash: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class Instances(_message.Message):
    __slots__ = ("rows", "communicator", "seq", "lane", "op", "role", "evidence", "flags", "arrival_ns", "duration_ns", "payload_bytes", "sync_blocked_ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SYNC_BLOCKED_NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    communicator: bytes
    seq: bytes
    lane: bytes
    op: bytes
    role: bytes
    evidence: bytes
    flags: bytes
    arrival_ns: bytes
    duration_ns: bytes
    payload_bytes: bytes
    sync_blocked_ns: bytes
    def __init__(self, rows: _Optional[int] = ..., communicator: _Optional[bytes] = ..., seq: _Optional[bytes] = ..., lane: _Optional[bytes] = ..., op: _Optional[bytes] = ..., role: _Optional[bytes] = ..., evidence: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., arrival_ns: _Optional[bytes] = ..., duration_ns: _Optional[bytes] = ..., payload_bytes: _Optional[bytes] = ..., sync_blocked_ns: _Optional[bytes] = ...) -> None: ...

class Summaries(_message.Message):
    __slots__ = ("rows", "communicator", "op", "role", "evidence", "count", "errors", "payload_bytes", "duration_sum_ns", "duration_min_ns", "duration_max_ns", "histogram", "token_bytes")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_SUM_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MIN_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MAX_NS_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    rows: int
    communicator: bytes
    op: bytes
    role: bytes
    evidence: bytes
    count: bytes
    errors: bytes
    payload_bytes: bytes
    duration_sum_ns: bytes
    duration_min_ns: bytes
    duration_max_ns: bytes
    histogram: bytes
    token_bytes: bytes
    def __init__(self, rows: _Optional[int] = ..., communicator: _Optional[bytes] = ..., op: _Optional[bytes] = ..., role: _Optional[bytes] = ..., evidence: _Optional[bytes] = ..., count: _Optional[bytes] = ..., errors: _Optional[bytes] = ..., payload_bytes: _Optional[bytes] = ..., duration_sum_ns: _Optional[bytes] = ..., duration_min_ns: _Optional[bytes] = ..., duration_max_ns: _Optional[bytes] = ..., histogram: _Optional[bytes] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("rows", "communicator", "peer", "sent_bytes", "received_bytes", "receives", "wait_ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVES_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    communicator: bytes
    peer: bytes
    sent_bytes: bytes
    received_bytes: bytes
    receives: bytes
    wait_ns: bytes
    def __init__(self, rows: _Optional[int] = ..., communicator: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., sent_bytes: _Optional[bytes] = ..., received_bytes: _Optional[bytes] = ..., receives: _Optional[bytes] = ..., wait_ns: _Optional[bytes] = ...) -> None: ...

class Pending(_message.Message):
    __slots__ = ("rows", "communicator", "seq", "lane", "op", "evidence", "entered_ns", "state")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    ENTERED_NS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    rows: int
    communicator: bytes
    seq: bytes
    lane: bytes
    op: bytes
    evidence: bytes
    entered_ns: bytes
    state: bytes
    def __init__(self, rows: _Optional[int] = ..., communicator: _Optional[bytes] = ..., seq: _Optional[bytes] = ..., lane: _Optional[bytes] = ..., op: _Optional[bytes] = ..., evidence: _Optional[bytes] = ..., entered_ns: _Optional[bytes] = ..., state: _Optional[bytes] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("index", "uuid", "bus_id", "name", "utilization_ratio", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts", "energy_joules", "sm_clock_hertz", "sm_clock_max_hertz", "throttle_reasons", "process_memory_bytes")
    class ProcessMemoryBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    BUS_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_JOULES_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_HERTZ_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_MAX_HERTZ_FIELD_NUMBER: _ClassVar[int]
    THROTTLE_REASONS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    bus_id: str
    name: str
    utilization_ratio: float
    memory_used_bytes: int
    memory_total_bytes: int
    temperature_celsius: float
    power_watts: float
    energy_joules: float
    sm_clock_hertz: float
    sm_clock_max_hertz: float
    throttle_reasons: _containers.RepeatedScalarFieldContainer[str]
    process_memory_bytes: _containers.ScalarMap[int, int]
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., bus_id: _Optional[str] = ..., name: _Optional[str] = ..., utilization_ratio: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., temperature_celsius: _Optional[float] = ..., power_watts: _Optional[float] = ..., energy_joules: _Optional[float] = ..., sm_clock_hertz: _Optional[float] = ..., sm_clock_max_hertz: _Optional[float] = ..., throttle_reasons: _Optional[_Iterable[str]] = ..., process_memory_bytes: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("pid", "pid_start_ticks", "command", "cpu_seconds", "run_queue_seconds", "rss_bytes", "memory_pressure_ratio", "cpu_pressure_ratio", "launches", "graph_launches", "syncs", "sync_ns", "captured_operations", "cuda", "steps", "blind_steps", "pod", "namespace", "container", "owner_kind", "owner", "slurm_job", "slurm_step", "unit", "mig", "synchronising_seconds", "stopped")
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_TICKS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUN_QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PRESSURE_RATIO_FIELD_NUMBER: _ClassVar[int]
    CPU_PRESSURE_RATIO_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    SYNCS_FIELD_NUMBER: _ClassVar[int]
    SYNC_NS_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BLIND_STEPS_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    OWNER_KIND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SLURM_JOB_FIELD_NUMBER: _ClassVar[int]
    SLURM_STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    MIG_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONISING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    pid: int
    pid_start_ticks: int
    command: str
    cpu_seconds: float
    run_queue_seconds: float
    rss_bytes: int
    memory_pressure_ratio: float
    cpu_pressure_ratio: float
    launches: int
    graph_launches: int
    syncs: int
    sync_ns: int
    captured_operations: int
    cuda: _containers.RepeatedCompositeFieldContainer[CudaUse]
    steps: int
    blind_steps: int
    pod: str
    namespace: str
    container: str
    owner_kind: str
    owner: str
    slurm_job: str
    slurm_step: str
    unit: str
    mig: str
    synchronising_seconds: float
    stopped: bool
    def __init__(self, pid: _Optional[int] = ..., pid_start_ticks: _Optional[int] = ..., command: _Optional[str] = ..., cpu_seconds: _Optional[float] = ..., run_queue_seconds: _Optional[float] = ..., rss_bytes: _Optional[int] = ..., memory_pressure_ratio: _Optional[float] = ..., cpu_pressure_ratio: _Optional[float] = ..., launches: _Optional[int] = ..., graph_launches: _Optional[int] = ..., syncs: _Optional[int] = ..., sync_ns: _Optional[int] = ..., captured_operations: _Optional[int] = ..., cuda: _Optional[_Iterable[_Union[CudaUse, _Mapping]]] = ..., steps: _Optional[int] = ..., blind_steps: _Optional[int] = ..., pod: _Optional[str] = ..., namespace: _Optional[str] = ..., container: _Optional[str] = ..., owner_kind: _Optional[str] = ..., owner: _Optional[str] = ..., slurm_job: _Optional[str] = ..., slurm_step: _Optional[str] = ..., unit: _Optional[str] = ..., mig: _Optional[str] = ..., synchronising_seconds: _Optional[float] = ..., stopped: _Optional[bool] = ...) -> None: ...

class CudaUse(_message.Message):
    __slots__ = ("device", "stream", "launches", "graph_launches", "syncs", "sync_ns")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    SYNCS_FIELD_NUMBER: _ClassVar[int]
    SYNC_NS_FIELD_NUMBER: _ClassVar[int]
    device: int
    stream: StreamKind
    launches: int
    graph_launches: int
    syncs: int
    sync_ns: int
    def __init__(self, device: _Optional[int] = ..., stream: _Optional[_Union[StreamKind, str]] = ..., launches: _Optional[int] = ..., graph_launches: _Optional[int] = ..., syncs: _Optional[int] = ..., sync_ns: _Optional[int] = ...) -> None: ...

class Health(_message.Message):
    __slots__ = ("events_read", "events_submitted", "events_lost", "communicators_unresolved", "operations_unresolved", "blind_graph_launches", "source_success", "batches_dropped", "libraries_failed", "steps", "blind_steps", "processes_untold")
    class EventsLostEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SourceSuccessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bool] = ...) -> None: ...
    EVENTS_READ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_LOST_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATORS_UNRESOLVED_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_UNRESOLVED_FIELD_NUMBER: _ClassVar[int]
    BLIND_GRAPH_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FAILED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BLIND_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_UNTOLD_FIELD_NUMBER: _ClassVar[int]
    events_read: int
    events_submitted: int
    events_lost: _containers.ScalarMap[str, int]
    communicators_unresolved: int
    operations_unresolved: int
    blind_graph_launches: int
    source_success: _containers.ScalarMap[str, bool]
    batches_dropped: int
    libraries_failed: _containers.RepeatedScalarFieldContainer[str]
    steps: int
    blind_steps: int
    processes_untold: int
    def __init__(self, events_read: _Optional[int] = ..., events_submitted: _Optional[int] = ..., events_lost: _Optional[_Mapping[str, int]] = ..., communicators_unresolved: _Optional[int] = ..., operations_unresolved: _Optional[int] = ..., blind_graph_launches: _Optional[int] = ..., source_success: _Optional[_Mapping[str, bool]] = ..., batches_dropped: _Optional[int] = ..., libraries_failed: _Optional[_Iterable[str]] = ..., steps: _Optional[int] = ..., blind_steps: _Optional[int] = ..., processes_untold: _Optional[int] = ...) -> None: ...

class Stages(_message.Message):
    __slots__ = ("rows", "pid", "start_ticks", "device", "stage", "whole", "count", "sum_ns", "union_ns", "span_ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_NS_FIELD_NUMBER: _ClassVar[int]
    UNION_NS_FIELD_NUMBER: _ClassVar[int]
    SPAN_NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    pid: bytes
    start_ticks: bytes
    device: bytes
    stage: bytes
    whole: bytes
    count: bytes
    sum_ns: bytes
    union_ns: bytes
    span_ns: bytes
    def __init__(self, rows: _Optional[int] = ..., pid: _Optional[bytes] = ..., start_ticks: _Optional[bytes] = ..., device: _Optional[bytes] = ..., stage: _Optional[bytes] = ..., whole: _Optional[bytes] = ..., count: _Optional[bytes] = ..., sum_ns: _Optional[bytes] = ..., union_ns: _Optional[bytes] = ..., span_ns: _Optional[bytes] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("workload", "engine", "source", "model", "unit", "rows", "experts", "layer", "counts", "tokens", "rank_of_expert", "logical_of_physical", "source_rank")
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_OF_EXPERT_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_OF_PHYSICAL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    workload: str
    engine: str
    source: str
    model: str
    unit: Unit
    rows: int
    experts: int
    layer: bytes
    counts: bytes
    tokens: bytes
    rank_of_expert: bytes
    logical_of_physical: bytes
    source_rank: int
    def __init__(self, workload: _Optional[str] = ..., engine: _Optional[str] = ..., source: _Optional[str] = ..., model: _Optional[str] = ..., unit: _Optional[_Union[Unit, str]] = ..., rows: _Optional[int] = ..., experts: _Optional[int] = ..., layer: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., rank_of_expert: _Optional[bytes] = ..., logical_of_physical: _Optional[bytes] = ..., source_rank: _Optional[int] = ...) -> None: ...

class EngineReading(_message.Message):
    __slots__ = ("workload", "engine", "address", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    workload: str
    engine: str
    address: str
    values: _containers.ScalarMap[str, float]
    def __init__(self, workload: _Optional[str] = ..., engine: _Optional[str] = ..., address: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...
