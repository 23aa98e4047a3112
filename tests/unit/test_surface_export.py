"""What is exported from a snapshot, value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from lanterne.collector import series_jobs
from lanterne.collector.export import Exposition, SnapshotCollector, families, write
from lanterne.collector.metrics import CATALOG, Family
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import EVIDENCE, Histogram, Snapshot
from tests.fixtures.snapshots import (
    NAN,
    NOW,
    blind,
    communicator,
    gpu,
    joined,
    large,
    node,
    ranks,
    snapshot,
)

openmetrics_page: Callable[[CollectorRegistry], bytes] = generate_openmetrics
RUNTIME = Runtime(version="0.1.0", queue_depth=3, engine_errors=0)
RANK5 = {"workload": "demo", "comm": "ep-8", "rank": "5", "node": "node0", "gpu": "5"}


def samples(shot: Snapshot) -> dict[str, list[tuple[dict[str, str], float]]]:
    """As a Prometheus parser reads the page."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(write(families(shot, RUNTIME)).decode()):
        for s in family.samples:
            found.setdefault(s.name, []).append((dict(s.labels), float(s.value)))
    return found


def one(shot: Snapshot, name: str, **labels: str) -> float:
    rows = [v for have, v in samples(shot).get(name, []) if labels.items() <= have.items()]
    assert len(rows) == 1, (name, labels, rows)
    return rows[0]


def awkward() -> Snapshot:
    """Texts that need escaping, and numbers of every size."""
    comm = communicator('a"b\\c\nd')
    base = ranks()
    big = np.array([0.0, 1e-9, 0.1 + 0.2, 999_999.5, 1e6, 1_234_567.875, 1e16, 3.5e20])
    return snapshot(communicators=(comm,), ranks=replace(base, wait_seconds=big))


@pytest.mark.parametrize(
    "shot", [snapshot(), blind(), large(512), awkward()], ids=["plain", "blind", "large", "awkward"]
)
def test_the_page_is_byte_for_byte_what_prometheus_client_writes(shot: Snapshot) -> None:
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: shot, lambda: RUNTIME))
    assert write(families(shot, RUNTIME)) == generate_latest(registry)
    assert write(families(shot, RUNTIME), openmetrics=True) == openmetrics_page(registry)


def test_rank_counters_carry_their_evidence() -> None:
    shot = snapshot()
    wait = "lanterne_rank_wait_seconds_total"
    assert one(shot, wait, rank="0", source="blocking") == 22.8
    assert one(shot, "lanterne_rank_blame_seconds_total", **RANK5, source="blocking") == 22.0
    assert one(shot, "lanterne_rank_comm_seconds_total", **RANK5) == 3.0
    assert one(shot, "lanterne_rank_compute_seconds_total", **RANK5) == 40.0
    assert one(shot, "lanterne_rank_straggler_ratio", **RANK5) == 1.4545
    assert one(shot, "lanterne_rank_straggler", **RANK5) == 1
    assert samples(shot)["lanterne_rank_straggler"][5][0]["class"] == "slow_compute"
    assert one(shot, "lanterne_rank_straggler", rank="0") == 0
    assert samples(shot)["lanterne_rank_straggler"][0][0]["class"] == "none"


def test_what_is_unknown_is_absent() -> None:
    found = samples(blind())
    for name in (
        "lanterne_rank_wait_seconds_total",
        "lanterne_rank_blame_seconds_total",
        "lanterne_rank_straggler_ratio",
        "lanterne_rank_straggler",
        "lanterne_collective_wait_seconds_count",
        "lanterne_moe_dispatch_duration_seconds_count",
        "lanterne_communicator_complete_ratio",
    ):
        assert name not in found
    labels, value = found["lanterne_communicator_waits_absent"][0]
    assert labels["reason"] == "host_ahead"
    assert value == 1
    assert one(snapshot(), "lanterne_communicator_waits_absent", reason="none") == 0


def test_a_single_unknown_number_leaves_the_other_ranks() -> None:
    base = ranks()
    ratio = base.straggler_ratio.copy()
    ratio[3] = NAN
    found = samples(snapshot(ranks=replace(base, straggler_ratio=ratio)))
    assert len(found["lanterne_rank_straggler_ratio"]) == 7
    assert {have["rank"] for have, _ in found["lanterne_rank_straggler"]} == set("0124567")
    assert len(found["lanterne_rank_wait_seconds_total"]) == 8


def test_a_wait_without_evidence_is_not_exported_even_if_a_number_is_there() -> None:
    shot = snapshot(ranks=replace(ranks(), evidence=np.zeros(8, dtype=np.int64)))
    assert "lanterne_rank_wait_seconds_total" not in samples(shot)


def test_histograms_are_cumulative_with_the_same_bounds_always() -> None:
    bins = np.zeros(48, dtype=np.int64)
    bins[[0, 20, 22, 40]] = [1, 10, 100, 1000]  # under 2 ns, 1-2 ms, 4-8 ms, 18-37 min
    comm = communicator(durations={("all_to_all", "device"): Histogram(bins, 7.5)})
    shot = snapshot(communicators=(comm,))
    rows = samples(shot)["lanterne_collective_duration_seconds_bucket"]
    by_edge = {float(labels["le"]): value for labels, value in rows}
    assert len(by_edge) == 28
    assert list(by_edge.values()) == sorted(by_edge.values())
    assert by_edge[2**10 / 1e9] == 1
    assert by_edge[2**20 / 1e9] == 1
    assert by_edge[2**21 / 1e9] == 11
    assert by_edge[2**22 / 1e9] == 11
    assert by_edge[2**23 / 1e9] == 111
    assert by_edge[2**36 / 1e9] == 111
    assert by_edge[float("inf")] == 1111
    assert one(shot, "lanterne_collective_duration_seconds_count", source="device") == 1111
    assert one(shot, "lanterne_collective_duration_seconds_sum", op="all_to_all") == 7.5
    other = samples(snapshot())["lanterne_collective_duration_seconds_bucket"]
    assert [have["le"] for have, _ in other] == [have["le"] for have, _ in rows]


def test_communicators_of_one_name_are_added_up_and_gauges_show_the_worst() -> None:
    first = replace(ranks(4, slow=1), gpu=("",) * 4)
    second = replace(ranks(4, slow=None, comm=1), gpu=("",) * 4)
    pair = (
        communicator("dp-4", 4),
        communicator("dp-4", 4, ranks_seen=3, complete_share=0.5, comm_hash=2),
    )
    shot = snapshot(communicators=pair, ranks=joined(first, second))
    assert one(shot, "lanterne_rank_wait_seconds_total", rank="0") == 22.8 + 0.6
    assert one(shot, "lanterne_rank_straggler_ratio", rank="1") == 1.4545
    assert one(shot, "lanterne_communicator_ranks", comm="dp-4") == 8
    assert one(shot, "lanterne_communicator_ranks_seen", comm="dp-4") == 7
    assert one(shot, "lanterne_communicator_complete_ratio", comm="dp-4") == 0.5
    assert one(shot, "lanterne_collective_duration_seconds_count", op="all_to_all") == 200
    assert one(shot, "lanterne_moe_dispatch_duration_seconds_count", source="blocking") == 100
    bytes_sent = one(shot, "lanterne_alltoall_bytes_total", rank="0", domain="same_node")
    assert bytes_sent == 2 * 1_048_576


def test_an_unknown_half_of_two_of_one_name_is_left_out_of_the_sum() -> None:
    first = replace(ranks(2, slow=None), gpu=("", ""))
    second = replace(ranks(2, slow=None, evidence="none", comm=1), gpu=("", ""))
    pair = (communicator("dp-2", 2), communicator("dp-2", 2, evidence=0, absent_reason="x"))
    shot = snapshot(communicators=pair, ranks=joined(first, second))
    assert one(shot, "lanterne_rank_compute_seconds_total", rank="0") == 27.5
    nothing = snapshot(communicators=pair, ranks=joined(second, replace(second)))
    assert "lanterne_rank_compute_seconds_total" not in samples(nothing)


def test_bytes_only_of_domains_that_saw_any() -> None:
    found = samples(snapshot())["lanterne_alltoall_bytes_total"]
    assert {have["domain"] for have, _ in found} == {"same_node"}
    assert len(found) == 8
    silent = snapshot(communicators=(communicator(bytes_by_domain=None),))
    assert "lanterne_alltoall_bytes_total" not in samples(silent)


def test_nodes_gpus_and_ingest() -> None:
    nodes = (
        node("a", events_lost={"ring_full": 4}),
        node("b", clock_error_seconds=NAN, clock_offset_seconds=NAN, connected=False),
    )
    gpus = (gpu(5), gpu(6, {"temperature_celsius": 40.0}))
    shot = snapshot(nodes=nodes, gpus=gpus)
    found = samples(shot)
    assert one(shot, "lanterne_collector_last_window_timestamp_seconds", node="a") == NOW - 0.75
    assert one(shot, "lanterne_node_connected", node="b") == 0
    assert one(shot, "lanterne_collector_clock_error_seconds", node="a") == 0.0002
    assert len(found["lanterne_collector_clock_error_seconds"]) == 1
    assert one(shot, "lanterne_node_events_lost_total", node="a", reason="ring_full") == 4
    assert one(shot, "lanterne_node_source_success", node="a", source="nvml") == 0
    assert one(shot, "lanterne_gpu_throttle_info", gpu="5", reason="sw_power_cap") == 1
    assert one(shot, "lanterne_gpu_energy_joules_total", gpu="5") == 1.25e7
    assert len(found["lanterne_gpu_utilization_ratio"]) == 1
    assert len(found["lanterne_gpu_temperature_celsius"]) == 2
    assert one(shot, "lanterne_collector_batches_total", status="accepted") == 60
    assert one(shot, "lanterne_collector_batches_refused_total", reason="schema") == 2
    assert one(shot, "lanterne_collector_rows_total", status="taken") == 960
    assert one(shot, "lanterne_collector_rows_total", status="late") == 0
    assert one(shot, "lanterne_collector_dropped_total", reason="clock_dropped") == 0
    assert one(shot, "lanterne_collector_frames_total") == 70
    assert one(shot, "lanterne_collector_alignment_cells") == 4088
    assert one(shot, "lanterne_collector_queue_depth") == 3
    assert one(shot, "lanterne_collector_ranks") == 8


def test_calls_errors_and_bytes_of_operations() -> None:
    pair = (communicator(), communicator(comm_hash=2, calls={("barrier", "none"): (5, 0, 0)}))
    found = snapshot(communicators=pair, ranks=ranks(0))
    labels = {"workload": "demo", "comm": "ep-8", "op": "all_to_all", "source": "blocking"}
    assert one(found, "lanterne_collective_calls_total", **labels) == 960
    assert one(found, "lanterne_collective_call_errors_total", **labels) == 2
    assert one(found, "lanterne_collective_bytes_total", **labels) == 62_914_560
    assert one(found, "lanterne_collective_calls_total", op="barrier", source="none") == 5


def test_a_reason_without_a_code_is_other() -> None:
    shot = snapshot(communicators=(communicator(absent_reason="text only 1.5"),))
    (row,) = samples(shot)["lanterne_communicator_waits_absent"]
    assert (row[0]["reason"], row[1]) == ("other", 1)


def test_a_finished_job_vanishes() -> None:
    latest: list[Snapshot | None] = [snapshot()]
    page = Exposition(lambda: latest[0], lambda: RUNTIME)
    assert b'workload="demo"' in page.page("")[1]
    latest[0] = snapshot(communicators=(), ranks=ranks(0))
    assert b'workload="demo"' not in page.page("")[1]
    latest[0] = None
    assert b"lanterne_collector_info" in page.page("")[1]


def test_a_page_is_written_once_a_snapshot_but_the_collectors_own_part_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Snapshot] = []
    real = series_jobs.families

    def counted(shot: Snapshot) -> Iterator[Family]:
        written.append(shot)
        return real(shot)

    monkeypatch.setattr(series_jobs, "families", counted)
    latest, runtime = [snapshot()], [RUNTIME]
    page = Exposition(lambda: latest[0], lambda: runtime[0])
    assert page.page("")[1] == page.page("text/plain")[1] == write(families(latest[0], RUNTIME))
    runtime[0] = replace(RUNTIME, engine_errors=9)
    assert b"lanterne_collector_engine_errors_total 9.0\n" in page.page("")[1]
    assert len(written) == 2  # once for the pages, once for the comparison
    kind, body = page.page("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    assert body.count(b"# EOF") == 1
    assert page.page("*/*")[0].startswith("text/plain; version=0.0.4")
    latest[0] = snapshot()
    assert page.page("")[0].startswith("text/plain; version=0.0.4")
    assert len(written) == 4


def test_names_and_labels_keep_the_rules() -> None:
    for metric in CATALOG.values():
        assert not {"job", "instance", "type", "stage", "cluster"} & set(metric.labels), metric
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        if metric.kind == "histogram":
            assert "rank" not in metric.labels


@pytest.mark.parametrize("shot", [snapshot(), large(64), blind()], ids=["one", "large", "blind"])
def test_every_sample_has_the_labels_its_catalog_row_names(shot: Snapshot) -> None:
    seen: set[tuple[str, str]] = set()
    found: list[Family] = list(families(shot, RUNTIME))
    for metric, points in found:
        for name, labels, value, _ in points:
            assert set(labels) - {"le"} == set(metric.labels), metric
            assert value == value, metric
            key = (name, repr(sorted(labels.items())))
            assert key not in seen
            seen.add(key)
    assert len({f.metric.name for f in found}) == len(found)


def test_evidence_names_are_label_values() -> None:
    for source in EVIDENCE[1:]:
        shot = snapshot(ranks=ranks(evidence=source))
        assert one(shot, "lanterne_rank_wait_seconds_total", rank="0", source=source) == 22.8
