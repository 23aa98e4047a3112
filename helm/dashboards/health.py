"""Lanterne itself: what it sees and does not see, its agents and its collector."""

from __future__ import annotations

from helm.dashboards.describe import (
    Dashboard,
    Link,
    Panel,
    Query,
    Row,
    Variable,
    line,
    stat,
)

NODES = Link("Nodes", "${collector}/api/v1/nodes", new_tab=True)
N = 'node=~"$node"'
RATE = "[$__rate_interval]"


SIGHT = Row(
    "What is not seen",
    (
        line(
            "Communicators whose waits are unknown",
            "short",
            (
                'sum by (reason) (lanterne_communicator_waits_absent{reason!="none"})',
                "{{reason}}",
            ),
            about="By reason; they are explained in docs/metrics.md.",
            stacked=True,
            low=0,
        ),
        line(
            "Evidence of waiting",
            "short",
            ("count by (source) (lanterne_communicator_info)", "{{source}}"),
            about="Communicators by the best evidence there is.",
            stacked=True,
            low=0,
        ),
        line(
            "Steps that are blind",
            "percentunit",
            (
                f"sum by (node) (rate(lanterne_node_blind_steps_total{{{N}}}{RATE})) "
                f"/ (sum by (node) (rate(lanterne_node_steps_total{{{N}}}{RATE})) > 0)",
                "{{node}}",
            ),
            about="Their collectives run in CUDA graphs, and no plugin tells of them.",
            low=0,
            high=1,
        ),
        line(
            "Events lost",
            "ops",
            (
                f"sum by (node, reason) (rate(lanterne_node_events_lost_total{{{N}}}{RATE}))",
                "{{node}} {{reason}}",
            ),
            low=0,
        ),
        line(
            "Communicators not identified",
            "short",
            (f"lanterne_node_communicators_unresolved{{{N}}}", "{{node}}"),
            low=0,
        ),
        line(
            "Operations on them",
            "ops",
            (f"rate(lanterne_node_operations_unresolved_total{{{N}}}{RATE})", "{{node}}"),
            about="They are in no other figure.",
            low=0,
        ),
        line(
            "Libraries that cannot be probed",
            "short",
            (f"lanterne_node_libraries_failed{{{N}}}", "{{node}}"),
            about="`lanterne-agent doctor` says which, and why.",
            low=0,
        ),
        line(
            "CUDA processes left out",
            "short",
            (f"lanterne_node_processes_untold{{{N}}}", "{{node}}"),
            about="Beyond the bound.",
            low=0,
        ),
        Panel(
            "Sources of the agents",
            "state-timeline",
            "short",
            (Query(f"lanterne_node_source_success{{{N}}}", "{{node}} {{source}}"),),
            "A host without a GPU driver has no nvml; that is no fault.",
            width=8,
            names=(("0", "does not work", "red"), ("1", "works", "green")),
        ),
    ),
)

AGENTS = Row(
    "Agents",
    (
        Panel(
            "Connected",
            "state-timeline",
            "short",
            (Query(f"lanterne_node_connected{{{N}}}", "{{node}}"),),
            width=8,
            links=(NODES,),
            names=(("0", "no", "red"), ("1", "yes", "green")),
        ),
        line(
            "Age of the newest window",
            "s",
            (f"time() - lanterne_collector_last_window_timestamp_seconds{{{N}}}", "{{node}}"),
            low=0,
            bad=30,
        ),
        line(
            "Events read",
            "ops",
            (f"rate(lanterne_node_events_read_total{{{N}}}{RATE})", "{{node}}"),
            low=0,
        ),
        line(
            "Windows dropped",
            "ops",
            (f"rate(lanterne_node_batches_dropped_total{{{N}}}{RATE})", "{{node}}"),
            about="The queue to the collector was full.",
            low=0,
        ),
        line(
            "Clock error",
            "s",
            (f"lanterne_collector_clock_error_seconds{{{N}}}", "{{node}}"),
            low=0,
            bad=0.001,
        ),
        line(
            "Clock offset",
            "s",
            (f"lanterne_collector_clock_offset_seconds{{{N}}}", "{{node}}"),
            about="Against the collector's clock. Large is no fault: clocks count from boot.",
        ),
        line(
            "Windows that wait in the agent",
            "short",
            ("lanterne_agent_queue_batches", "{{instance}}"),
            about="This and the next two are from the agents' own pages.",
            low=0,
        ),
        line(
            "Windows on the agents' disks",
            "short",
            ("lanterne_agent_spool_batches", "{{instance}}"),
            ("sum by (instance) (lanterne_agent_spool_success) == 0", "{{instance}} cannot write"),
            about="Where a spool is configured. From the agents' own pages.",
            low=0,
        ),
        line(
            "CPU of the probes",
            "percentunit",
            (f"rate(lanterne_agent_probe_run_seconds_total{RATE})", "{{instance}}"),
            about="Only while the kernel counts (kernel.bpf_stats_enabled).",
            low=0,
        ),
        line(
            "Sampling stride",
            "short",
            ("lanterne_agent_stride", "{{instance}}"),
            about="1: every operation. More: the collector asked for fewer.",
            low=0,
        ),
    ),
)

COLLECTOR = Row(
    "Collector",
    (
        stat(
            "Age of its figures",
            "s",
            "time() - lanterne_collector_snapshot_timestamp_seconds",
            "Renewed once a second.",
            warn=10,
            bad=30,
        ),
        stat("Nodes", "short", "sum(lanterne_node_connected)", "That hold a stream now."),
        stat("Ranks", "short", "sum(lanterne_collector_ranks)", "Of all communicators."),
        stat("Communicators", "short", "sum(lanterne_collector_communicators)", "Followed now."),
        stat(
            "Failures",
            "short",
            "sum(increase(lanterne_collector_engine_errors_total[1h]))",
            "Of the analysis in the last hour: defects.",
            bad=1,
        ),
        stat(
            "State errors",
            "short",
            "sum(increase(lanterne_collector_state_errors_total[1h]))",
            "State not taken up or kept, in the last hour.",
            bad=1,
        ),
        line(
            "Batches",
            "ops",
            (f"sum by (status) (rate(lanterne_collector_batches_total{RATE}))", "{{status}}"),
            stacked=True,
            low=0,
        ),
        line(
            "Operations of ranks",
            "ops",
            (f"sum by (status) (rate(lanterne_collector_rows_total{RATE}))", "{{status}}"),
            about="taken, or left out by cause.",
            stacked=True,
            low=0,
        ),
        line(
            "Batches that wait",
            "short",
            ("lanterne_collector_queue_depth", "{{instance}}"),
            low=0,
        ),
        line(
            "Refused",
            "ops",
            (
                f"sum by (reason) (rate(lanterne_collector_batches_refused_total{RATE}))",
                "{{reason}}",
            ),
            low=0,
        ),
        line(
            "Left out by bounds",
            "ops",
            (f"sum by (reason) (rate(lanterne_collector_dropped_total{RATE})) > 0", "{{reason}}"),
            low=0,
        ),
        line(
            "Room for alignment in use",
            "short",
            ("lanterne_collector_alignment_cells", "{{instance}}"),
            low=0,
        ),
        line(
            "Recording",
            "Bps",
            (f"rate(lanterne_collector_recorded_bytes_total{RATE})", "{{instance}}"),
            about="Only where one is made.",
            low=0,
        ),
        line(
            "OTLP exports",
            "ops",
            (f"sum by (status) (rate(lanterne_collector_otlp_exports_total{RATE}))", "{{status}}"),
            about="Only where an endpoint is configured.",
            low=0,
        ),
        Panel(
            "Versions",
            "table",
            "short",
            (
                Query("count by (version) (lanterne_collector_info)", instant=True),
                Query("count by (agent_version) (lanterne_node_info)", instant=True),
            ),
            width=16,
            titles=(("Value #A", "collectors"), ("Value #B", "nodes")),
        ),
    ),
)

HEALTH = Dashboard(
    "lanterne-health",
    "Lanterne / Evidence and health",
    "What Lanterne sees and does not see; its agents and its collector.",
    (Variable("node", "lanterne_node_info"),),
    (SIGHT, AGENTS, COLLECTOR),
    links=("lanterne-fleet", "lanterne-job", "lanterne-rank"),
)
