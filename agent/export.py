"""The agent's own /metrics: one collector that yields fresh families from the newest state.

Nothing is kept between scrapes: a process, GPU or library that is gone is gone from the page, too.
Counters of known causes are there from the start, at zero. The names follow Prometheus' rules;
`promtool check metrics` passes on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lanterne.agent.health import HealthPages
from lanterne.agent.keeper import SpoolState
from lanterne.agent.page_server import PageServer
from lanterne.probes.layout import COUNTERS
from lanterne.service.guard import Guard
from lanterne.service.reload import Reloaded

LOST_REASONS = tuple(name.removeprefix("lost_") for name in COUNTERS if name.startswith("lost_"))
SOURCES = ("uprobes", "nvml", "host")
LIBRARY_STATES = ("attached", "failed", "nothing_to_probe")
LIBRARY_KINDS = ("nccl", "gloo", "cuda", "deepep", "nccl_ep", "parcagpu", "profiler", "torch")
DROP_REASONS = ("queue_full", "refused", "too_large", "spool_full", "spool_damaged")
# agent.creations; no_pointer: the variable for it was empty for 16 s, or cannot be read.
CREATION_REASONS = ("failed", "no_pointer", "too_many", "no_room", "process_ended")
# agent.kernels: malformed, clock, process, name and window_full are in no stage time either.
KERNEL_REASONS = (
    "sampled", "lost", "unchecked", "order", "communicator", "unplaced", "plugin", "held",
    "malformed", "clock", "process", "name", "window_full",
)  # fmt: skip


@dataclass(frozen=True)
class AgentState:
    """What a page is made from; a new one after each window."""

    node: str = ""
    version: str = ""
    events_read: int = 0
    events_submitted: int = 0
    events_lost: Mapping[str, int] = field(default_factory=dict)
    nested_calls: int = 0
    orphan_returns: int = 0
    comms: int = 0
    comms_unresolved: int = 0
    comms_evicted: int = 0
    comm_events: int = 0
    comm_creations_lost: Mapping[str, int] = field(default_factory=dict)  # by reason
    operations_unresolved: int = 0
    groups_forced: int = 0
    device_operations: int = 0
    device_unmatched: int = 0
    device_unplaced: int = 0
    device_waits_left_out: int = 0
    splits_unmatched: int = 0
    kernels: int = 0
    kernel_operations: int = 0
    kernels_left_out: Mapping[str, int] = field(default_factory=dict)
    blind_graph_launches: int = 0
    steps: int = 0
    blind_steps: int = 0
    processes_untold: int = 0
    probe_runs: int | None = None  # None: the kernel does not count (kernel.bpf_stats_enabled)
    probe_run_seconds: float | None = None
    processes: int = 0
    source_success: Mapping[str, bool] = field(default_factory=dict)
    libraries: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (kind, state)
    expert_loads: Mapping[str, int] = field(default_factory=dict)  # by source
    expert_loads_refused: Mapping[str, int] = field(default_factory=dict)  # by cause
    batches_sent: int = 0
    batches_resent: int = 0
    batches_acked: int = 0
    batches_duplicate: int = 0
    batches_postponed: int = 0
    batches_dropped: Mapping[str, int] = field(default_factory=dict)
    spool: SpoolState | None = None  # None: there is none
    connects: int = 0
    connection_failures: int = 0
    connected: bool = False
    queue_batches: int = 0
    queue_bytes: int = 0
    stride: int = 1
    last_window_seconds: float = 0.0  # CLOCK_REALTIME
    reload: Reloaded | None = None
    gpus: Sequence[Any] = ()  # agent.nvml.GpuReading
    host: Mapping[int, Any] = field(default_factory=dict)  # pid -> agent.host.ProcessReading
    # By side (api, kubelet, pod_resources) and result (ok, failed)
    kubernetes_requests: Mapping[tuple[str, str], int] = field(default_factory=dict)


# name, help, field of AgentState
_COUNTERS = (
    ("lanterne_agent_events_read", "Records read from the kernel's ring.", "events_read"),
    (
        "lanterne_agent_events_submitted",
        "Records the probes put into the ring.",
        "events_submitted",
    ),
    ("lanterne_agent_nested_calls", "Calls inside calls, not recorded by design.", "nested_calls"),
    (
        "lanterne_agent_orphan_returns",
        "Returns without an entry, of calls under way when their probe was attached.",
        "orphan_returns",
    ),
    (
        "lanterne_agent_comm_events",
        "Creations, first uses and ends of communicators read from their ring.",
        "comm_events",
    ),
    (
        "lanterne_agent_comms_evicted",
        "Communicators forgotten because there were more than the configured bound.",
        "comms_evicted",
    ),
    (
        "lanterne_agent_operations_unresolved",
        "Operations dropped because their communicator stayed unidentified.",
        "operations_unresolved",
    ),
    (
        "lanterne_agent_groups_forced",
        "Open groups of calls that were closed early for lack of room.",
        "groups_forced",
    ),
    (
        "lanterne_agent_device_operations",
        "Operations that profiler plugins told of, parts counted one by one.",
        "device_operations",
    ),
    (
        "lanterne_agent_device_unmatched",
        "Of them, left out because the call that launched them is not known.",
        "device_unmatched",
    ),
    (
        "lanterne_agent_device_unplaced",
        "Of them, replays of graphs left out because not every one was seen from the beginning.",
        "device_unplaced",
    ),
    (
        "lanterne_agent_device_waits_left_out",
        "Sums of waits for a peer, told by plugins, of communicators or peers that are not known.",
        "device_waits_left_out",
    ),
    (
        "lanterne_agent_splits_unmatched",
        "Split sizes of PyTorch and their operations that do not fit: no tokens are known of them.",
        "splits_unmatched",
    ),
    ("lanterne_agent_kernels", "GPU kernels that parcagpu told of.", "kernels"),
    (
        "lanterne_agent_kernel_operations",
        "Of them, those that were sent as operations of a communicator.",
        "kernel_operations",
    ),
    (
        "lanterne_agent_blind_graph_launches",
        "Graph launches of processes that have collectives in graphs, which no plugin tells.",
        "blind_graph_launches",
    ),
    (
        "lanterne_agent_steps",
        "Steps of processes that hold communicators: from one synchronise call to the next.",
        "steps",
    ),
    (
        "lanterne_agent_blind_steps",
        "Of them, steps whose collectives ran in graphs where nobody sees them.",
        "blind_steps",
    ),
    ("lanterne_agent_batches_sent", "Batches sent for the first time.", "batches_sent"),
    ("lanterne_agent_batches_resent", "Batches sent again.", "batches_resent"),
    ("lanterne_agent_batches_acked", "Batches that the collector has.", "batches_acked"),
    (
        "lanterne_agent_batches_duplicate",
        "Batches that the collector acknowledged and had already.",
        "batches_duplicate",
    ),
    (
        "lanterne_agent_batches_postponed",
        "Batches that the collector asked to be sent again later.",
        "batches_postponed",
    ),
    ("lanterne_agent_collector_connects", "Connections that a collector answered.", "connects"),
    (
        "lanterne_agent_collector_failures",
        "Connections that could not be made, or broke off.",
        "connection_failures",
    ),
)
# name, help, reasons that are known, field of AgentState
_BY_REASON = (
    (
        "lanterne_agent_events_lost",
        "Records that never reached the agent.",
        LOST_REASONS,
        "events_lost",
    ),
    (
        "lanterne_agent_comm_creations_lost",
        "Calls that should have made a communicator, and none is known of them.",
        CREATION_REASONS,
        "comm_creations_lost",
    ),
    (
        "lanterne_agent_batches_dropped",
        "Batches that no collector has.",
        DROP_REASONS,
        "batches_dropped",
    ),
    (
        "lanterne_agent_kernels_left_out",
        "GPU kernels that parcagpu told of and that stand for no operation, or for nothing.",
        KERNEL_REASONS,
        "kernels_left_out",
    ),
)
_GAUGES = (
    ("lanterne_agent_comms", "Communicators followed now.", "comms"),
    ("lanterne_agent_comms_unresolved", "Of them, not identified yet.", "comms_unresolved"),
    ("lanterne_agent_processes", "Processes that map a probed library.", "processes"),
    (
        "lanterne_agent_processes_untold",
        "Processes that use CUDA and are left out because there are more than the bound.",
        "processes_untold",
    ),
    ("lanterne_agent_collector_connected", "1 while a collector answers.", "connected"),
    ("lanterne_agent_queue_batches", "Batches not acknowledged.", "queue_batches"),
    ("lanterne_agent_queue_bytes", "Their bytes.", "queue_bytes"),
    ("lanterne_agent_stride", "Instances sent: sequence % stride == 0.", "stride"),
    (
        "lanterne_agent_last_window_timestamp_seconds",
        "When the newest window closed.",
        "last_window_seconds",
    ),
)
_GPU = (
    ("lanterne_gpu_utilization_ratio", "Share of time with a kernel running.", "utilization_ratio"),
    ("lanterne_gpu_memory_used_bytes", "GPU memory in use.", "memory_used_bytes"),
    ("lanterne_gpu_memory_size_bytes", "GPU memory there is.", "memory_total_bytes"),
    ("lanterne_gpu_temperature_celsius", "GPU temperature.", "temperature_celsius"),
    ("lanterne_gpu_power_watts", "GPU power draw.", "power_watts"),
    ("lanterne_gpu_sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock_hertz"),
    ("lanterne_gpu_sm_clock_max_hertz", "Highest clock allowed.", "sm_clock_max_hertz"),
)
_HOST = (
    ("lanterne_process_resident_bytes", "Memory of the rank's process.", "rss_bytes"),
    (
        "lanterne_process_memory_pressure_ratio",
        "Share of the last 10 s in which tasks of its cgroup waited for memory.",
        "memory_pressure_ratio",
    ),
    (
        "lanterne_process_cpu_pressure_ratio",
        "Share of the last 10 s in which tasks of its cgroup waited for a CPU.",
        "cpu_pressure_ratio",
    ),
)
_HOST_COUNTERS = (
    ("lanterne_process_cpu_seconds", "CPU time of the rank's process.", "cpu_seconds"),
    ("lanterne_process_run_queue_seconds", "Time it waited for a CPU.", "run_queue_seconds"),
)


class AgentCollector(Collector):
    """`state` gives the newest AgentState; it is called once a scrape, from the HTTP thread.
    `refused`: HTTP clients turned away, by reason."""

    def __init__(self, state: Callable[[], AgentState], refused: Mapping[str, int] | None = None):
        self._state = state
        self._refused = refused or {}

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not ask for a state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        info = GaugeMetricFamily("lanterne_agent_info", "Constant 1.", labels=["node", "version"])
        info.add_metric([state.node, state.version], 1)
        yield info
        for name, text, key in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(state, key))
        for name, text, key in _GAUGES:
            yield GaugeMetricFamily(name, text, value=float(getattr(state, key)))
        yield from _labelled(state)
        yield from _reload(state.reload)
        yield from _probe_cost(state)
        if state.spool is not None:
            yield from _spool(state.spool)
        turned_away = CounterMetricFamily(
            "lanterne_agent_http_refused",
            "HTTP clients turned away, by reason (docs/operate.md).",
            labels=["reason"],
        )
        for reason, count in sorted(self._refused.items()):
            turned_away.add_metric([reason], count)
        yield turned_away
        yield from _gpus(state)
        yield from _host(state)


def _labelled(state: AgentState) -> Iterator[Metric]:
    for name, text, reasons, key in _BY_REASON:
        family = CounterMetricFamily(name, text, labels=["reason"])
        counts = getattr(state, key)
        for reason in dict.fromkeys((*reasons, *counts)):
            family.add_metric([reason], counts.get(reason, 0))
        yield family
    for name, text, label, taken in (
        ("loads", "Loads of experts that engines told.", "source", state.expert_loads),
        ("loads_refused", "Loads not taken, by cause.", "reason", state.expert_loads_refused),
    ):
        told = CounterMetricFamily(f"lanterne_agent_expert_{name}", text, labels=[label])
        for value, count in sorted(taken.items()):
            told.add_metric([value], count)
        yield told
    requests = CounterMetricFamily(
        "lanterne_agent_kubernetes_requests",
        "Questions to the API server, the kubelet and its pod-resources socket.",
        labels=["side", "result"],
    )
    for (side, result), count in sorted(state.kubernetes_requests.items()):
        requests.add_metric([side, result], count)
    yield requests
    success = GaugeMetricFamily(
        "lanterne_agent_source_success", "1 where the last reading succeeded.", labels=["source"]
    )
    for source in dict.fromkeys((*SOURCES, *state.source_success)):
        success.add_metric([source], float(state.source_success.get(source, False)))
    yield success
    libraries = GaugeMetricFamily(
        "lanterne_agent_libraries", "Library files found in processes.", labels=["kind", "state"]
    )
    known = [(kind, status) for kind in LIBRARY_KINDS for status in LIBRARY_STATES]
    for pair in dict.fromkeys((*known, *state.libraries)):
        libraries.add_metric(list(pair), state.libraries.get(pair, 0))
    yield libraries


def _reload(told: Reloaded | None) -> Iterator[Metric]:
    if told is not None:
        yield GaugeMetricFamily(
            "lanterne_agent_config_reload_success",
            "1 where the configuration was last read (at the start, or on SIGHUP) without error.",
            value=float(told.success),
        )
        yield GaugeMetricFamily(
            "lanterne_agent_config_reload_timestamp_seconds",
            "When the configuration was last read without error, UNIX time.",
            value=told.succeeded_at,
        )


def _probe_cost(state: AgentState) -> Iterator[Metric]:
    """Absent where the kernel does not count runs: nothing is known then, zero would be a lie."""
    if state.probe_runs is not None:
        yield CounterMetricFamily(
            "lanterne_agent_probe_runs", "Runs of the probes' programs.", value=state.probe_runs
        )
    if state.probe_run_seconds is not None:
        yield CounterMetricFamily(
            "lanterne_agent_probe_run_seconds",
            "Time spent in the probes' programs, the trap not included.",
            value=state.probe_run_seconds,
        )


def _spool(spool: SpoolState) -> Iterator[Metric]:
    """Absent where there is none."""
    for name, text, value in (
        ("success", "1 while batches can be kept on disk.", float(spool.success)),
        (
            "unclean_start",
            "1 where the run before was killed: its open window is lost.",
            float(spool.unclean),
        ),
        ("batches", "Batches on disk that no collector has acknowledged.", spool.batches),
        ("bytes", "Bytes of the segments on disk.", spool.bytes),
    ):
        yield GaugeMetricFamily(f"lanterne_agent_spool_{name}", text, value=value)
    for name, text, value in (
        ("written", "Batches written to disk.", spool.written),
        ("restored", "Batches that earlier runs of the agent left.", spool.restored),
    ):
        yield CounterMetricFamily(f"lanterne_agent_spool_{name}", text, value=value)
    errors = CounterMetricFamily(
        "lanterne_agent_spool_errors",
        "Times that the disk could not be counted on: batches stayed in memory.",
        labels=["reason"],
    )
    for reason, count in spool.errors.items():
        errors.add_metric([reason], count)
    yield errors


def _gpus(state: AgentState) -> Iterator[Metric]:
    labels = ["node", "gpu"]
    for name, text, key in _GPU:
        family = GaugeMetricFamily(name, text, labels=labels)
        for gpu in state.gpus:
            value = getattr(gpu, key)
            if value is not None:
                family.add_metric([state.node, str(gpu.index)], value)
        yield family
    energy = CounterMetricFamily(
        "lanterne_gpu_energy_joules", "Energy since the driver was loaded.", labels=labels
    )
    reasons = GaugeMetricFamily(
        "lanterne_gpu_throttle_info",
        "Constant 1 while a reason lowers the clocks.",
        labels=[*labels, "reason"],
    )
    for gpu in state.gpus:
        if gpu.energy_joules is not None:
            energy.add_metric([state.node, str(gpu.index)], gpu.energy_joules)
        for reason in gpu.throttle_reasons:
            reasons.add_metric([state.node, str(gpu.index), reason], 1)
    yield energy
    yield reasons


def _host(state: AgentState) -> Iterator[Metric]:
    labels = ["node", "pid"]
    for table, kind in ((_HOST, GaugeMetricFamily), (_HOST_COUNTERS, CounterMetricFamily)):
        for name, text, key in table:
            family = kind(name, text, labels=labels)
            for pid, reading in state.host.items():
                value = getattr(reading, key)
                if value is not None:
                    family.add_metric([state.node, str(pid)], value)
            yield family


class Exporter:
    """Serves the page in its own thread until closed."""

    def __init__(
        self,
        listen: str,
        state: Callable[[], AgentState],
        problem: Callable[[], str] = lambda: "",
        stalled: Callable[[], str] = lambda: "",
        guard: Guard | None = None,
    ):
        """`listen` is HOST:PORT, host may be empty. Raises OSError where it is taken.
        problem, stalled: what /readyz and /healthz say, "" where all is well.
        guard: TLS and passwords, None for neither.
        """
        guard = guard or Guard("")
        host, _, port = listen.rpartition(":")
        registry = CollectorRegistry()
        registry.register(AgentCollector(state, guard.refused))
        pages = HealthPages(make_wsgi_app(registry), problem, stalled)
        self._server = PageServer(host.strip("[]") or "0.0.0.0", int(port), pages, guard)
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.close()
