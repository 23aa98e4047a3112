"""One rank: its verdict, where its time goes, and its GPU as context."""

from __future__ import annotations

from helm.dashboards.describe import (
    Dashboard,
    Link,
    Panel,
    Query,
    Row,
    Variable,
    line,
)

JSON = Link(
    "JSON view",
    "${collector}/api/v1/communicators?workload=${workload}&comm=${comm}",
    new_tab=True,
)
R = 'workload="$workload", comm="$comm", rank="$rank"'
G = 'node=~"$node", gpu=~"$gpu"'
RATE = "[$__rate_interval]"


VERDICT = Row(
    "Verdict",
    (
        Panel(
            "Slow",
            "stat",
            "short",
            (Query(f"max(lanterne_rank_straggler{{{R}}})"),),
            "No data: not judged.",
            width=4,
            height=4,
            links=(JSON,),
            bad=1,
            names=(("0", "no", "green"), ("1", "yes", "red")),
        ),
        Panel(
            "Own time against the peers",
            "stat",
            "none",
            (Query(f"lanterne_rank_straggler_ratio{{{R}}}"),),
            "1 is as fast as the median of the peers.",
            width=4,
            height=4,
            warn=1.04,
            bad=1.08,
        ),
        Panel(
            "Would come back",
            "stat",
            "percentunit",
            (Query(f"lanterne_rank_recoverable_ratio{{{R}}}"),),
            "Share of the time, if this rank alone were fixed.",
            width=4,
            height=4,
            warn=0.02,
        ),
        Panel(
            "Class",
            "table",
            "short",
            (Query(f"lanterne_rank_straggler{{{R}}}", instant=True),),
            "Classes are explained in docs/attribution.md; the JSON view says why.",
            height=4,
            links=(JSON,),
            hidden=("workload", "comm", "rank"),
            titles=(("Value", "slow"),),
        ),
    ),
)

TIME = Row(
    "Where its time goes",
    (
        line(
            "Waiting, transferring, on its own",
            "percentunit",
            (f"sum(rate(lanterne_rank_wait_seconds_total{{{R}}}{RATE}))", "waits"),
            (f"sum(rate(lanterne_rank_comm_seconds_total{{{R}}}{RATE}))", "transfers"),
            (f"sum(rate(lanterne_rank_compute_seconds_total{{{R}}}{RATE}))", "on its own"),
            about="Shares of its time in this communicator.",
            stacked=True,
            low=0,
        ),
        line(
            "Blame",
            "percentunit",
            (
                f"sum by (source) (rate(lanterne_rank_blame_seconds_total{{{R}}}{RATE}))",
                "{{source}}",
            ),
            about="What would come back if this rank alone were never last.",
            low=0,
        ),
        line(
            "Own time over time, and that of the slowest",
            "none",
            (f"lanterne_rank_straggler_ratio{{{R}}}", "this rank"),
            (
                'max(lanterne_rank_straggler_ratio{workload="$workload", comm="$comm"})',
                "slowest of all",
            ),
        ),
        line(
            "Stages on the GPU",
            "percentunit",
            (
                "sum by (kernel_stage) (rate(lanterne_rank_stage_seconds_total"
                f'{{workload="$workload", {G}}}{RATE}))',
                "{{kernel_stage}}",
            ),
            about="Where the job has loaded parcagpu.",
            width=12,
            stacked=True,
            low=0,
        ),
        line(
            "All-to-all bytes it sends",
            "Bps",
            (
                f"sum by (domain) (rate(lanterne_alltoall_bytes_total{{{R}}}{RATE}))",
                "{{domain}}",
            ),
            about="By where the receiver is.",
            width=12,
            stacked=True,
            low=0,
        ),
    ),
)

GPU = Row(
    "Its GPU, as NVML reads it: context, never evidence of waiting",
    (
        line(
            "SM clock",
            "hertz",
            (f"lanterne_gpu_sm_clock_hertz{{{G}}}", "{{node}} {{gpu}}"),
            (
                'avg by (node) (lanterne_gpu_sm_clock_hertz{node=~"$node"})',
                "{{node}} mean of the node",
            ),
        ),
        line(
            "Power",
            "watt",
            (f"lanterne_gpu_power_watts{{{G}}}", "{{node}} {{gpu}}"),
            (
                'avg by (node) (lanterne_gpu_power_watts{node=~"$node"})',
                "{{node}} mean of the node",
            ),
            low=0,
        ),
        line(
            "Temperature",
            "celsius",
            (f"lanterne_gpu_temperature_celsius{{{G}}}", "{{node}} {{gpu}}"),
            (
                'avg by (node) (lanterne_gpu_temperature_celsius{node=~"$node"})',
                "{{node}} mean of the node",
            ),
        ),
        line(
            "Time with a kernel running",
            "percentunit",
            (f"lanterne_gpu_utilization_ratio{{{G}}}", "{{node}} {{gpu}}"),
            about="A kernel that spins while it waits counts as running.",
            low=0,
            high=1,
        ),
        line(
            "Memory",
            "bytes",
            (f"lanterne_gpu_memory_used_bytes{{{G}}}", "{{node}} {{gpu}} used"),
            (f"lanterne_gpu_memory_size_bytes{{{G}}}", "{{node}} {{gpu}} there is"),
            low=0,
        ),
        Panel(
            "Reasons for a lower clock",
            "state-timeline",
            "short",
            (Query(f"lanterne_gpu_throttle_info{{{G}}}", "{{node}} {{gpu}} {{reason}}"),),
            "None while the clocks are free.",
            width=8,
            names=(("1", "in force", "orange"),),
        ),
        line(
            "Energy",
            "watt",
            (f"rate(lanterne_gpu_energy_joules_total{{{G}}}{RATE})", "{{node}} {{gpu}}"),
            about="Mean power, from the energy counter.",
            width=12,
            low=0,
        ),
        Panel(
            "GPU",
            "table",
            "short",
            (Query(f"lanterne_gpu_info{{{G}}}", instant=True),),
            width=12,
            hidden=("Value",),
        ),
    ),
)

NODE = Row(
    "Its node",
    (
        line(
            "Events lost",
            "ops",
            (
                'sum by (node, reason) (rate(lanterne_node_events_lost_total{node=~"$node"}'
                f"{RATE}))",
                "{{node}} {{reason}}",
            ),
            low=0,
        ),
        line(
            "Pressure",
            "percentunit",
            ('max by (node) (lanterne_process_cpu_pressure_ratio{node=~"$node"})', "{{node}} CPU"),
            (
                'max by (node) (lanterne_process_memory_pressure_ratio{node=~"$node"})',
                "{{node}} memory",
            ),
            about="Worst of the job's processes; from the agents' own pages.",
            low=0,
        ),
        line(
            "Clock error",
            "s",
            ('lanterne_collector_clock_error_seconds{node=~"$node"}', "{{node}}"),
            about="Shorter waits on enqueue evidence are suppressed.",
            low=0,
        ),
    ),
)

_OF = 'lanterne_communicator_info{workload="$workload"}'
_RANK = 'lanterne_rank_compute_seconds_total{workload="$workload", comm="$comm"'
RANK = Dashboard(
    "lanterne-rank",
    "Lanterne / Rank",
    "One rank: its verdict, where its time goes, and its GPU as context.",
    (
        Variable("workload", "lanterne_communicator_info", several=False),
        Variable("comm", _OF, several=False),
        Variable("rank", _RANK + "}", several=False),
        Variable("node", _RANK + ', rank="$rank"}'),
        Variable("gpu", _RANK + ', rank="$rank", node=~"$node"}'),
    ),
    (VERDICT, TIME, GPU, NODE),
    links=("lanterne-fleet", "lanterne-job", "lanterne-health"),
)
