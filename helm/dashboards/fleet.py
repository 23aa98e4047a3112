"""All jobs: what is slow, what hangs, what cannot be seen; from here to a job or a rank."""

from __future__ import annotations

from helm.dashboards.describe import (
    Dashboard,
    Link,
    Panel,
    Query,
    Row,
    Variable,
    stat,
)

JOB = Link(
    "This job",
    "/d/lanterne-job?var-datasource=${datasource}&var-workload=${__data.fields.workload}"
    "&var-collector=${collector}&${__url_time_range}",
)
SERIES_JOB = Link(
    "This job",
    "/d/lanterne-job?var-datasource=${datasource}&var-workload=${__field.labels.workload}"
    "&var-collector=${collector}&${__url_time_range}",
)
RANK = Link(
    "This rank",
    "/d/lanterne-rank?var-datasource=${datasource}&var-workload=${__data.fields.workload}"
    "&var-comm=${__data.fields.comm}&var-rank=${__data.fields.rank}&var-collector=${collector}"
    "&${__url_time_range}",
)
JSON = Link(
    "JSON view",
    "${collector}/api/v1/communicators?workload=${__data.fields.workload}"
    "&comm=${__data.fields.comm}",
    new_tab=True,
)
W = 'workload=~"$workload"'


NOW = Row(
    "Now",
    (
        stat(
            "Stragglers",
            "short",
            f"sum(max by (workload, comm, rank, node, gpu) (lanterne_rank_straggler{{{W}}}))",
            "Ranks that others wait for.",
            bad=1,
        ),
        stat(
            "Hanging communicators",
            "short",
            f"count(lanterne_communicator_hung_seconds{{{W}}} > 0) or vector(0)",
            "Ranks stand in an operation, and nothing happens.",
            bad=1,
        ),
        stat(
            "Blind communicators",
            "short",
            f"sum(max by (workload, comm) (lanterne_communicator_waits_absent{{{W}, "
            'reason!~"one_rank|idle|not_symmetric|only_first"}))',
            "Their waits cannot be known, so nobody of them is named.",
            warn=1,
        ),
        stat(
            "Jobs",
            "short",
            f"count(count by (workload) (lanterne_communicator_info{{{W}}}))",
            "Seen now.",
        ),
        stat(
            "Ranks",
            "short",
            f"sum(lanterne_communicator_ranks_seen{{{W}}})",
            "Of all communicators.",
        ),
        stat(
            "Nodes without agent",
            "short",
            "sum(1 - lanterne_node_connected)",
            "Nodes that have reported before and hold no stream now.",
            bad=1,
        ),
    ),
)

JOBS = Row(
    "Jobs",
    (
        Panel(
            "Job by job",
            "table",
            "percentunit",
            (
                Query(
                    f"avg by (workload) (rate(lanterne_rank_wait_seconds_total{{{W}}}[5m]))",
                    instant=True,
                ),
                Query(
                    f"max by (workload) (lanterne_workload_recoverable_ratio{{{W}}})", instant=True
                ),
                Query(
                    "sum by (workload) (max by (workload, comm, rank, node, gpu) "
                    f"(lanterne_rank_straggler{{{W}}}))",
                    instant=True,
                ),
                Query(
                    f"max by (workload) (lanterne_communicator_hung_seconds{{{W}}})", instant=True
                ),
            ),
            "Wait: mean share of the ranks' time. Recoverable: what would come back with every "
            "rank at the median of its role.",
            links=(JOB,),
            titles=(
                ("Value #A", "wait"),
                ("Value #B", "recoverable"),
                ("Value #C", "stragglers"),
                ("Value #D", "hung for"),
            ),
            units=(("stragglers", "short"), ("hung for", "s")),
        ),
        Panel(
            "Share of time that ranks wait",
            "timeseries",
            "percentunit",
            (
                Query(
                    "avg by (workload) (rate(lanterne_rank_wait_seconds_total"
                    f"{{{W}}}[$__rate_interval]))",
                    "{{workload}}",
                ),
            ),
            "Mean over the ranks of each job.",
            links=(SERIES_JOB,),
            low=0,
        ),
        Panel(
            "Worst ranks",
            "table",
            "percentunit",
            (
                Query(
                    "topk(15, sum by (workload, comm, rank, node, gpu) "
                    f"(rate(lanterne_rank_blame_seconds_total{{{W}}}[5m])) > 0)",
                    instant=True,
                ),
            ),
            "Blame: the share of the time that would come back if this rank alone were never last.",
            links=(RANK, JSON),
            titles=(("Value", "blame"),),
        ),
        Panel(
            "Named ranks",
            "table",
            "short",
            (Query(f"lanterne_rank_straggler{{{W}}} == 1", instant=True),),
            "Verdicts, with the class of the fault.",
            links=(RANK, JSON),
            hidden=("Value",),
        ),
    ),
)

CONTEXT = Row(
    "What fires, and what is unseen",
    (
        Panel(
            "Alerts",
            "table",
            "short",
            (Query('ALERTS{alertname=~"Lanterne.+", alertstate="firing"}', instant=True),),
            "Of helm/lanterne/rules. Each has a page in docs/runbooks.",
            hidden=("Value", "alertstate"),
        ),
        Panel(
            "Why waits are unknown",
            "table",
            "short",
            (
                Query(
                    f'lanterne_communicator_waits_absent{{{W}, reason!="none"}} == 1', instant=True
                ),
            ),
            "The reasons are explained in docs/metrics.md.",
            links=(JOB, JSON),
            hidden=("Value",),
        ),
    ),
)

FLEET = Dashboard(
    "lanterne-fleet",
    "Lanterne / Fleet",
    "All jobs: who is waited for, what hangs, what cannot be seen.",
    (Variable("workload", "lanterne_communicator_info"),),
    (NOW, JOBS, CONTEXT),
    links=("lanterne-job", "lanterne-rank", "lanterne-health"),
)
