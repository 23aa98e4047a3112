"""One job: its ranks over time, expert layers, experts; from here to a rank."""

from __future__ import annotations

from functools import partial

from helm.dashboards.describe import (
    Dashboard,
    Link,
    Panel,
    Query,
    Row,
    Variable,
)
from helm.dashboards.describe import line as third

RANK = Link(
    "This rank",
    "/d/lanterne-rank?var-datasource=${datasource}&var-workload=${workload}"
    "&var-comm=${__field.labels.comm}&var-rank=${__field.labels.rank}&var-collector=${collector}"
    "&${__url_time_range}",
)
JSON = Link(
    "JSON view",
    "${collector}/api/v1/communicators?workload=${workload}&comm=${__field.labels.comm}",
    new_tab=True,
)
W = 'workload="$workload"'
C = f'{W}, comm=~"$comm"'
RATE = "[$__rate_interval]"
line = partial(third, width=12)


RANKS = Row(
    "Ranks",
    (
        Panel(
            "Wait of each rank",
            "status-history",
            "percentunit",
            (
                Query(
                    f"sum by (comm, rank) (rate(lanterne_rank_wait_seconds_total{{{C}}}{RATE}))",
                    "{{comm}} {{rank}}",
                ),
            ),
            "Rank by time. The pale line among dark ones is the rank that the others wait for.",
            width=24,
            height=10,
            links=(RANK, JSON),
            low=0,
            high=1,
            points=60,
        ),
        Panel(
            "Verdict",
            "state-timeline",
            "short",
            (
                Query(
                    f"max by (comm, rank) (lanterne_rank_straggler{{{C}}})",
                    "{{comm}} {{rank}}",
                ),
            ),
            "Gaps: not judged.",
            links=(RANK, JSON),
            names=(("0", "not slow", "green"), ("1", "slow", "red")),
        ),
        line(
            "Own time against the peers",
            "none",
            (f"lanterne_rank_straggler_ratio{{{C}}}", "{{comm}} {{rank}}"),
            about="1 is as fast as the median of the peers.",
            links=(RANK, JSON),
        ),
        line(
            "Blame",
            "percentunit",
            (
                "topk(10, sum by (comm, rank) "
                f"(rate(lanterne_rank_blame_seconds_total{{{C}}}{RATE})))",
                "{{comm}} {{rank}}",
            ),
            about="Share of the time that would come back if this rank alone were never last.",
            links=(RANK, JSON),
            low=0,
        ),
        line(
            "Communication over compute",
            "none",
            (
                f"rate(lanterne_rank_comm_seconds_total{{{C}}}{RATE}) "
                f"/ rate(lanterne_rank_compute_seconds_total{{{C}}}{RATE})",
                "{{comm}} {{rank}}",
            ),
            about="Transfer, waiting removed, over own time between collectives.",
            links=(RANK, JSON),
            low=0,
        ),
        line(
            "Recoverable",
            "percentunit",
            (f"lanterne_workload_recoverable_ratio{{{W}}}", "every rank at its role's median"),
            (f"topk(5, lanterne_rank_recoverable_ratio{{{C}}} > 0)", "{{comm}} {{rank}} alone"),
            about="Share of the step that would come back.",
            low=0,
        ),
        line(
            "Communicators",
            "s",
            (f"lanterne_communicator_hung_seconds{{{C}}}", "{{comm}} stands still for"),
            about="0 where it goes on.",
            links=(JSON,),
            low=0,
        ),
    ),
)

COLLECTIVES = Row(
    "Collectives",
    (
        Panel(
            "Wait, 99th percentile",
            "timeseries",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (comm, op, source, le) "
                    f"(rate(lanterne_collective_wait_seconds_bucket{{{C}}}{RATE})))",
                    "{{comm}} {{op}} ({{source}})",
                    exemplars=True,
                ),
            ),
            "Exemplars are single operations: who waited, for whom, and which one it was.",
            links=(JSON,),
            low=0,
        ),
        Panel(
            "Waits",
            "heatmap",
            "s",
            (
                Query(
                    f"sum by (le) (increase(lanterne_collective_wait_seconds_bucket{{{C}}}{RATE}))",
                    "{{le}}",
                    buckets=True,
                    exemplars=True,
                ),
            ),
            "Observations of all ranks.",
        ),
        line(
            "Duration, 99th percentile",
            "s",
            (
                "histogram_quantile(0.99, sum by (comm, op, source, le) "
                f"(rate(lanterne_collective_duration_seconds_bucket{{{C}}}{RATE})))",
                "{{comm}} {{op}} ({{source}})",
            ),
            about="From a rank's arrival to its end, waiting included.",
            links=(JSON,),
            low=0,
        ),
        line(
            "Calls",
            "ops",
            (
                f"sum by (comm, op) (rate(lanterne_collective_calls_total{{{C}}}{RATE}))",
                "{{comm}} {{op}}",
            ),
            about="Of all ranks, those without times included.",
            low=0,
        ),
        line(
            "All-to-all bytes, by where the receiver is",
            "Bps",
            (
                f"sum by (domain) (rate(lanterne_alltoall_bytes_total{{{C}}}{RATE}))",
                "{{domain}}",
            ),
            stacked=True,
            low=0,
        ),
        line(
            "Calls that returned an error",
            "ops",
            (
                f"sum by (comm, op) (rate(lanterne_collective_call_errors_total{{{C}}}{RATE}))",
                "{{comm}} {{op}}",
            ),
            low=0,
        ),
    ),
)

LAYERS = Row(
    "Dispatch and combine",
    (
        line(
            "Dispatch and combine",
            "s",
            *(
                (
                    f"histogram_quantile({q}, sum by (source, le) "
                    f"(rate(lanterne_moe_{half}_duration_seconds_bucket{{{W}}}{RATE})))",
                    f"{half} p{int(q * 100)} ({{{{source}}}})",
                )
                for half in ("dispatch", "combine")
                for q in (0.5, 0.99)
            ),
            about="The two all-to-alls of an expert layer, waiting included.",
            low=0,
        ),
        line(
            "Parts of the usual step",
            "s",
            (
                f'lanterne_moe_step_seconds{{{C}, part!~"span|expert_most"}}',
                "{{comm}} {{part}}",
            ),
            about="Medians, mean over ranks. Together they are the span.",
            stacked=True,
        ),
        line(
            "Tokens of the ranks",
            "short",
            (f"lanterne_moe_rank_tokens_max{{{C}}}", "{{comm}} busiest"),
            (f"lanterne_moe_rank_tokens_mean{{{C}}}", "{{comm}} mean"),
            low=0,
        ),
        line(
            "Bubble, and communication over expert compute",
            "percentunit",
            (f"max(lanterne_bubble_ratio{{{W}}})", "largest bubble"),
            (f"max(lanterne_moe_comm_compute_ratio{{{W}}})", "largest comm / compute"),
            about="Where the job has loaded parcagpu.",
            low=0,
        ),
    ),
)

EXPERTS = Row(
    "Experts",
    (
        line(
            "Load of ranks: mean over busiest",
            "percentunit",
            (f"bottomk(8, lanterne_expert_balancedness_ratio{{{W}}})", "layer {{layer}}"),
            about="1 is even. The eight worst layers.",
            low=0,
            high=1,
        ),
        line(
            "Load of experts: busiest over mean",
            "none",
            (f"topk(8, lanterne_expert_load_skew_ratio{{{W}}})", "layer {{layer}}"),
            about="1 is even. The eight worst layers.",
            low=0,
        ),
        line(
            "Gini coefficient of the load",
            "none",
            (f"topk(8, lanterne_expert_load_excess_gini_ratio{{{W}}})", "layer {{layer}}"),
            about="Beyond what uniform routing gives by chance.",
            low=0,
        ),
        line(
            "Overflow, and experts without load",
            "percentunit",
            (f"max(lanterne_expert_overflow_ratio{{{W}}})", "largest overflow"),
            (f"max(lanterne_expert_zero_load_ratio{{{W}}})", "largest share without load"),
            about="Overflow: above 1.25 times an even load. Not drops.",
            low=0,
        ),
        Panel(
            "Advice",
            "table",
            "percentunit",
            (Query(f"lanterne_advice_gain_ratio{{{W}}}", instant=True),),
            "Expected gain, as a share of the busiest GPU's time. The text: /api/v1/advice.",
            links=(Link("Advice", "${collector}/api/v1/advice", new_tab=True),),
            titles=(("Value", "gain"),),
        ),
        line(
            "What the engine tells",
            "s",
            (
                f'lanterne_engine_ttft_seconds{{{W}, percentile!="p50"}}',
                "first token {{percentile}}",
            ),
            (f'lanterne_engine_tpot_seconds{{{W}, percentile!="p50"}}', "per token {{percentile}}"),
            low=0,
        ),
    ),
)

EVIDENCE = Row(
    "Evidence",
    (
        Panel(
            "Evidence of waiting",
            "table",
            "short",
            (Query(f"lanterne_communicator_info{{{C}}}", instant=True),),
            "device: times of the GPU. blocking: calls that really wait. enqueue: hosts' order.",
            hidden=("Value",),
        ),
        Panel(
            "Why waits are unknown",
            "table",
            "short",
            (
                Query(
                    f'lanterne_communicator_waits_absent{{{C}, reason!="none"}} == 1', instant=True
                ),
            ),
            "The reasons are explained in docs/metrics.md.",
            hidden=("Value",),
        ),
        line(
            "Operations in which every rank was seen",
            "percentunit",
            (f"lanterne_communicator_complete_ratio{{{C}}}", "{{comm}}"),
            low=0,
            high=1,
        ),
        line(
            "Ranks",
            "short",
            (f"lanterne_communicator_ranks{{{C}}}", "{{comm}} there are"),
            (f"lanterne_communicator_ranks_seen{{{C}}}", "{{comm}} report"),
            low=0,
        ),
    ),
)

JOB = Dashboard(
    "lanterne-job",
    "Lanterne / Job",
    "One job: its ranks over time, expert layers, experts, and what the figures rest on.",
    (
        Variable("workload", "lanterne_communicator_info", several=False),
        Variable("comm", 'lanterne_communicator_info{workload="$workload"}'),
    ),
    (RANKS, COLLECTIVES, LAYERS, EXPERTS, EVIDENCE),
    links=("lanterne-fleet", "lanterne-rank", "lanterne-health"),
)
