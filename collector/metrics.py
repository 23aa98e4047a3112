"""Every metric that the collector exports: one row of data each.

`series_jobs.py` and `series_nodes.py` fill them; docs/metrics.md explains them, and a test compares
the two. Names end in their base unit, counters in `_total`; no label is called job, instance, type,
stage or cluster, since those belong to Prometheus and to the scrape configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    name: str  # as exposed, with _total
    kind: Kind
    labels: tuple[str, ...]
    help: str


class Exemplar(NamedTuple):
    """One observation behind a bucket, with what leads to it; shown in OpenMetrics only."""

    labels: dict[str, str]  # at most 128 characters, names and values together
    value: float
    at: float  # UNIX seconds


class Point(NamedTuple):
    """One sample. Points of one rank share one labels mapping: the text writer relies on it."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: Exemplar | None = None


class Family(NamedTuple):
    metric: Metric
    points: list[Point]


RANK = ("workload", "comm", "rank", "node", "gpu")
COMM = ("workload", "comm")

CATALOG: dict[str, Metric] = {}


def _add(kind: Kind, name: str, labels: tuple[str, ...], text: str) -> None:
    CATALOG[name] = Metric(name, kind, labels, text)


# fmt: off
# Collectives and expert-parallel exchange. Rank is never a label of a histogram.
_add("histogram", "lanterne_collective_duration_seconds", (*COMM, "op", "source"),
     "Time from a rank's arrival at a collective to its end, waiting included.")
_add("histogram", "lanterne_collective_wait_seconds", (*COMM, "op", "source"),
     "Part of the collective duration that a rank spent waiting for later ranks.")
_add("histogram", "lanterne_moe_dispatch_duration_seconds", ("workload", "source"),
     "Duration of the all-to-all that sends tokens to their experts.")
_add("histogram", "lanterne_moe_combine_duration_seconds", ("workload", "source"),
     "Duration of the all-to-all that brings expert results back.")
_add("gauge", "lanterne_moe_rank_tokens_max", COMM,
     "Tokens that the busiest expert-parallel rank received in the last span.")
_add("gauge", "lanterne_moe_rank_tokens_mean", COMM,
     "Tokens that an expert-parallel rank received in the last span, mean over ranks.")
_add("counter", "lanterne_collective_calls_total", (*COMM, "op", "source"),
     "Calls of an operation, every rank's counted; source none: only their order is known.")
_add("counter", "lanterne_collective_call_errors_total", (*COMM, "op", "source"),
     "Those of them that returned an error.")
_add("counter", "lanterne_collective_bytes_total", (*COMM, "op", "source"),
     "Bytes that the ranks sent in them, or the size of their buffers for reductions.")
_add("counter", "lanterne_alltoall_bytes_total", (*COMM, "rank", "domain"),
     "Bytes a rank sent in all-to-all operations, by where the receiver is.")

# Ranks.
_add("counter", "lanterne_rank_wait_seconds_total", (*RANK, "source"),
     "Time a rank waited in collectives for later ranks.")
_add("counter", "lanterne_rank_blame_seconds_total", (*RANK, "source"),
     "Time that would come back to the job if this rank alone were never last.")
_add("counter", "lanterne_rank_comm_seconds_total", RANK,
     "Time a rank spent transferring in collectives, waiting removed.")
_add("counter", "lanterne_rank_compute_seconds_total", RANK,
     "Time a rank spent on its own between collectives.")
_add("gauge", "lanterne_rank_straggler_ratio", RANK,
     "Own time between collectives over the median of its peers; 1 is as fast as they are.")
_add("gauge", "lanterne_rank_straggler", (*RANK, "class"),
     "1 where the others wait for this rank, with the class of the fault; absent where unjudged.")
_add("counter", "lanterne_rank_stage_seconds_total",
     ("workload", "rank", "node", "gpu", "kernel_stage"),
     "Time a rank's GPU ran kernels of a stage of the layer, waiting in collectives included.")
_add("gauge", "lanterne_bubble_ratio", ("workload", "rank"),
     "Share of the time in which a rank's GPU neither computed nor transferred, waiting included.")
_add("gauge", "lanterne_moe_comm_compute_ratio", ("workload", "rank"),
     "Transfer of dispatch and combine, waiting removed, over the time of the expert GEMMs.")
_add("gauge", "lanterne_rank_recoverable_ratio", RANK,
     "Share of the time that would come back if this rank alone were fixed; 0 where not named.")
_add("gauge", "lanterne_workload_recoverable_ratio", ("workload",),
     "Share of the step that would come back with every rank at the median of its role.")
_add("gauge", "lanterne_rank_missing", RANK,
     "1 where the others stand in an operation that this rank has not come to.")
_add("gauge", "lanterne_rank_info", (*RANK, "namespace", "pod", "container", "owner"),
     "Constant 1: the pod of a rank's process, where it lives in one.")

# Communicators.
_add("gauge", "lanterne_communicator_info", (*COMM, "library", "role", "source"),
     "Constant 1; source is the best evidence of waiting that the communicator has.")
_add("gauge", "lanterne_communicator_ranks", COMM,
     "Ranks that the communicators of this name have.")
_add("gauge", "lanterne_communicator_ranks_seen", COMM,
     "Ranks of these communicators that reported.")
_add("gauge", "lanterne_communicator_complete_ratio", COMM,
     "Share of recent operations in which every rank was seen.")
_add("gauge", "lanterne_communicator_hung_seconds", COMM,
     "Time since anything happened where ranks stand in an operation; 0 where it goes on.")
_add("gauge", "lanterne_communicator_waits_absent", (*COMM, "reason"),
     "1 where the waits cannot be known, and why; 0 with reason none where they are known.")

# Steps of a program with expert layers.
_add("gauge", "lanterne_moe_step_seconds", (*COMM, "part", "source"),
     "Median time that each part of the usual step takes, mean over ranks.")
_add("gauge", "lanterne_moe_step_operations", COMM,
     "Operations of the communicator in its usual step.")

# Experts, where an engine tells; of the last window that had load.
_LAYER = ("workload", "layer")
_add("gauge", "lanterne_expert_load_skew_ratio", _LAYER,
     "Load of the busiest expert over the mean; 1 is even.")
_add("gauge", "lanterne_expert_load_gini_ratio", _LAYER,
     "Gini coefficient of the load of the experts; 0 is even.")
_add("gauge", "lanterne_expert_load_excess_gini_ratio", _LAYER,
     "The same beyond what uniform routing gives by chance.")
_add("gauge", "lanterne_expert_balancedness_ratio", _LAYER,
     "Mean load of the ranks over that of the busiest; 1 is even. Absent without placement.")
_add("gauge", "lanterne_expert_overflow_ratio", _LAYER,
     "Share of assignments above 1.25 times an even load, rounded up; not drops.")
_add("gauge", "lanterne_expert_zero_load_ratio", _LAYER, "Share of experts that got nothing.")
_add("gauge", "lanterne_expert_local_hit_ratio", _LAYER,
     "Share of assignments that stayed on their rank. Absent where sources do not tell theirs.")
_add("gauge", "lanterne_expert_assignments", _LAYER,
     "Assignments of tokens to experts in that window.")
_add("gauge", "lanterne_expert_low_confidence", _LAYER,
     "1 where there were fewer than 30 assignments an expert: skew is mostly chance then.")
_add("gauge", "lanterne_expert_layers_left_out", (),
     "Layers beyond what this page may show; the JSON view has them.")

# What engines tell of themselves; the worst of the workload's engines.
_PERCENTILE = ("workload", "percentile")
_add("gauge", "lanterne_engine_ttft_seconds", _PERCENTILE, "Time to the first token.")
_add("gauge", "lanterne_engine_tpot_seconds", _PERCENTILE,
     "Time per output token after the first, mean of each request.")
_add("gauge", "lanterne_engine_inter_token_seconds", _PERCENTILE,
     "Time between two output tokens.")
_add("gauge", "lanterne_engine_request_latency_seconds", _PERCENTILE,
     "Time of a whole request.")
_add("gauge", "lanterne_engine_balancedness_ratio", ("workload",),
     "Mean over largest load of the ranks, as the engine itself reports it.")

# Advice on experts: kinds are a fixed few, one series each and workload.
_add("gauge", "lanterne_advice_gain_ratio", ("workload", "advice"),
     "Share of the busiest GPU's time that the advice is expected to save on the next window.")
_add("gauge", "lanterne_advice_info", ("workload", "advice"),
     "1 for each piece of advice there now is; advice nothing: leave the experts as they are.")

# GPUs, as NVML reads them: context, never evidence of waiting.
_GPU = ("node", "gpu")
_add("gauge", "lanterne_gpu_info", (*_GPU, "uuid", "bus_id", "name"), "Constant 1.")
_add("gauge", "lanterne_gpu_utilization_ratio", _GPU,
     "Share of time with a kernel running; a kernel that spins while waiting counts as running.")
_add("gauge", "lanterne_gpu_memory_used_bytes", _GPU, "GPU memory in use.")
_add("gauge", "lanterne_gpu_memory_size_bytes", _GPU, "GPU memory there is.")
_add("gauge", "lanterne_gpu_temperature_celsius", _GPU, "GPU temperature.")
_add("gauge", "lanterne_gpu_power_watts", _GPU, "GPU power draw.")
_add("counter", "lanterne_gpu_energy_joules_total", _GPU, "Energy used since the driver loaded.")
_add("gauge", "lanterne_gpu_sm_clock_hertz", _GPU, "Clock of the GPU's multiprocessors.")
_add("gauge", "lanterne_gpu_sm_clock_max_hertz", _GPU, "Highest clock the GPU allows.")
_add("gauge", "lanterne_gpu_throttle_info", (*_GPU, "reason"),
     "1 for each reason for which the GPU now holds its clock down.")

# What the agents report of themselves.
_add("gauge", "lanterne_node_info", ("node", "agent_version"), "Constant 1.")
_add("gauge", "lanterne_node_connected", ("node",), "1 while the node's agent holds its stream.")
_add("counter", "lanterne_node_events_read_total", ("node",),
     "Events the node's agent read from its kernel ring.")
_add("counter", "lanterne_node_events_lost_total", ("node", "reason"),
     "Events the node's agent knows it lost, by cause.")
_add("counter", "lanterne_node_batches_dropped_total", ("node",),
     "Windows the node's agent dropped because its queue to the collector was full.")
_add("gauge", "lanterne_node_communicators_unresolved", ("node",),
     "Communicators whose identity the node's agent could not learn.")
_add("counter", "lanterne_node_operations_unresolved_total", ("node",),
     "Operations on such communicators; they are in no other metric.")
_add("counter", "lanterne_node_blind_graph_launches_total", ("node",),
     "CUDA graph launches whose collectives cannot be seen from the host.")
_add("counter", "lanterne_node_steps_total", ("node",),
     "Steps (one synchronise call or graph launch to the next) of processes with communicators.")
_add("counter", "lanterne_node_blind_steps_total", ("node",),
     "Of them, steps whose collectives ran in CUDA graphs where nobody sees them.")
_add("gauge", "lanterne_node_processes_untold", ("node",),
     "Processes that use CUDA and are left out because the node has more than the bound.")
_add("gauge", "lanterne_node_source_success", ("node", "source"),
     "1 where a source of the node's agent (uprobes, nvml, host) works.")
_add("gauge", "lanterne_node_libraries_failed", ("node",),
     "Libraries on the node that could not be probed.")

# The collector itself.
_add("gauge", "lanterne_collector_info", ("version",), "Constant 1.")
_add("gauge", "lanterne_collector_last_window_timestamp_seconds", ("node",),
     "End of the newest window received from the node, UNIX time.")
_add("gauge", "lanterne_collector_clock_offset_seconds", ("node",),
     "Node clock compared with the collector's.")
_add("gauge", "lanterne_collector_clock_error_seconds", ("node",),
     "Bound on the error of that comparison; shorter enqueue waits are suppressed.")
_add("gauge", "lanterne_collector_snapshot_timestamp_seconds", (),
     "When the figures of this page were taken, UNIX time; absent before the first.")
_add("gauge", "lanterne_collector_ranks", (), "Ranks (of all communicators) in the snapshot.")
_add("gauge", "lanterne_collector_communicators", (), "Communicators in the snapshot.")
_add("gauge", "lanterne_collector_communicators_met_running", ("state",),
     "Communicators older than an agent of theirs, by whether their ranks' numbers are aligned.")
_add("gauge", "lanterne_collector_queue_depth", (), "Batches that wait to be analysed.")
_add("counter", "lanterne_collector_batches_total", ("status",),
     "Batches received, by how they were answered.")
_add("counter", "lanterne_collector_batches_refused_total", ("reason",),
     "Batches refused as invalid, by reason.")
_add("counter", "lanterne_collector_streams_refused_total", ("reason",),
     "Agents turned away, by reason: certificate, token, or a node's name that is not theirs.")
_add("counter", "lanterne_collector_http_refused_total", ("reason",),
     "HTTP clients turned away, by reason (docs/operate.md).")
_add("counter", "lanterne_collector_frames_total", (),
     "Frames received, those without a batch included.")
_add("counter", "lanterne_collector_rows_total", ("status",),
     "Operations of ranks received, and those that could not be aligned, by cause.")
_add("counter", "lanterne_collector_dropped_total", ("reason",),
     "What else the collector's bounds made it leave out, by cause.")
_add("counter", "lanterne_collector_recorded_frames_total", (),
     "Frames written to the recording; absent where none is made.")
_add("counter", "lanterne_collector_recorded_bytes_total", (),
     "Bytes written to the recording, compressed.")
_add("gauge", "lanterne_collector_alignment_cells", (),
     "Operations of ranks for which alignment holds room.")
_add("counter", "lanterne_collector_state_errors_total", ("reason",),
     "State that could not be taken up after a start, or kept for the next one.")
_add("gauge", "lanterne_collector_state_timestamp_seconds", (),
     "When the state was last kept, UNIX time; absent where none is.")
_add("gauge", "lanterne_collector_config_reload_success", (),
     "1 where the configuration was last read (at the start, or on SIGHUP) without error.")
_add("gauge", "lanterne_collector_config_reload_timestamp_seconds", (),
     "When the configuration was last read without error, UNIX time.")
_add("counter", "lanterne_collector_otlp_exports_total", ("status",),
     "Exports to the OTLP endpoint, sent or failed; absent where none is configured.")
_add("counter", "lanterne_collector_engine_errors_total", (),
     "Batches or snapshots that failed in the analysis: each is a defect worth reporting.")
# fmt: on
