"""OpenMetrics: who gets it, what differs from the text format, and the examples behind buckets."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lanterne.collector.analyse import totals
from lanterne.collector.analyse.longest import HOLD_NS, Longest
from lanterne.collector.export import SnapshotCollector, families, wants_openmetrics, write
from lanterne.collector.json_view import communicators_json
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Histogram, LongWait, Snapshot
from tests.fixtures.snapshots import NOW, communicator, joined, ranks, snapshot

RUNTIME = Runtime(version="0.1.0", queue_depth=0, engine_errors=0)
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", False),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; Version="1.0.0"; charset=utf-8', True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much,text/plain", False),
        (";;,=;q", False),
    ],
)
def test_who_gets_openmetrics(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


def waited(seconds: float, at: float = NOW - 2.5) -> Snapshot:
    bins = np.zeros(48, dtype=np.int64)
    bins[23] = 7
    histogram = Histogram(bins, 0.5, LongWait(seconds, 4711, 0, 5, at))
    return snapshot(communicators=(communicator(waits={("all_to_all", "blocking"): histogram}),))


def exemplars(shot: Snapshot) -> dict[str, tuple[dict[str, str], float, float]]:
    """By bucket, as the OpenMetrics parser reads them."""
    text = write(families(shot, RUNTIME), openmetrics=True).decode()
    return {
        sample.labels["le"]: (
            sample.exemplar.labels,
            sample.exemplar.value,
            float(sample.exemplar.timestamp),
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_the_longest_wait_stands_at_the_bucket_that_holds_it() -> None:
    labels = {
        "comm_hash": "0xf00d000000000001",
        "seq": "4711",
        "waiting_rank": "0",
        "last_rank": "5",
    }
    ((edge, found),) = exemplars(waited(0.009)).items()
    assert found == (labels, 0.009, NOW - 2.5)
    assert float(edge) == 2**24 / 1e9  # bin 23, 8.4 to 16.8 ms
    assert sum(len(k) + len(v) for k, v in labels.items()) <= 128
    assert list(exemplars(waited(1e-8))) == ["1.024e-06"]
    assert list(exemplars(waited(100.0))) == ["+Inf"]


def test_of_communicators_of_one_name_the_newest_is_shown() -> None:
    first, second = waited(0.5, NOW - 9), waited(0.25, NOW - 1)
    pair = snapshot(communicators=first.communicators + second.communicators)
    ((_, value, at),) = exemplars(pair).values()
    assert (value, at) == (0.25, NOW - 1)


def test_the_page_is_what_prometheus_client_writes_and_the_text_format_has_no_exemplars() -> None:
    shot = waited(0.009)
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(lambda: shot, lambda: RUNTIME))
    page = write(families(shot, RUNTIME), openmetrics=True)
    assert page == generate_latest(registry)
    plain = write(families(shot, RUNTIME)).decode()
    assert " # {" not in plain
    assert not plain.endswith("# EOF\n")


def test_openmetrics_names_counters_once_and_has_no_created_samples() -> None:
    text = write(families(waited(0.009), RUNTIME), openmetrics=True).decode()
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    assert "_total_total" not in text
    assert "_created" not in text
    declared = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert declared["lanterne_rank_wait_seconds"] == "counter"
    assert not [name for name, kind in declared.items() if name.endswith("_total")]
    parsed = {f.name: f.type for f in text_string_to_metric_families(text)}
    assert parsed == declared


def found(longest: Longest, slot: int = 3) -> LongWait:
    ((_, value),) = longest.of(slot, lambda at: at / 1e9).items()
    return value


def told(longest: Longest, wait: list[list[float]], at: int, seq: int = 10) -> None:
    """Operations of one kind in slot 3; wait [rank][operation] ns."""
    table = np.array(wait, np.float32)
    count = table.shape[1]
    one = np.ones(1, np.int64)
    longest.add(
        totals.key(3 * one, 8 * one, 0 * one, 2 * one),
        np.zeros(count, np.int64),
        np.nansum(table, axis=0, dtype=np.float64),
        table,
        seq + np.arange(count),
        np.full(count, 2),
        np.full(count, at),
    )


def test_the_operation_with_the_most_waiting_is_kept_for_a_while() -> None:
    longest = Longest()
    told(longest, [[5e6, 8e6], [4e6, 9e6], [0, np.nan]], 10**9)
    assert found(longest) == LongWait(pytest.approx(0.009), 11, 1, 2, 1.0)
    told(longest, [[1e6], [2e6], [0]], 2 * 10**9, seq=20)
    assert found(longest).seq == 11
    told(longest, [[1e6], [1e7], [0]], 3 * 10**9, seq=30)
    assert found(longest).seq == 30
    told(longest, [[1e6], [2e6], [0]], 3 * 10**9 + HOLD_NS + 1, seq=40)
    assert found(longest).seq == 40
    assert longest.of(4, float) == {}
    longest.forget(3)
    assert longest.of(3, float) == {}


def test_nothing_is_kept_where_nobody_waited() -> None:
    longest = Longest()
    told(longest, [[0.0], [0.0]], 10**9)
    told(longest, [[np.nan], [np.nan]], 10**9)
    assert longest.of(3, float) == {}


def test_the_json_view_of_one_communicator() -> None:
    shot = snapshot(
        communicators=(
            communicator("dp-2", 2, comm_hash=7),
            waited(0.009).communicators[0],
        ),
        ranks=joined(ranks(2, slow=None), ranks(8, comm=1)),
    )

    def asked(comm_hash: str = "", workload: str = "", name: str = "") -> dict[str, object]:
        page = communicators_json(shot, comm_hash=comm_hash, workload=workload, name=name)
        value: dict[str, object] = json.loads(page)
        return value

    one = asked(comm_hash="0xf00d000000000001")
    (comm,) = one["communicators"]  # type: ignore[misc]
    assert comm["name"] == "ep-8"
    assert comm["waits"][0]["longest"]["seq"] == 4711
    table = one["ranks"]
    assert table["rank"] == list(range(8))  # type: ignore[index]
    assert table["comm"] == [0] * 8  # type: ignore[index]
    assert table["node"] == ["node0"] * 8  # type: ignore[index]
    assert table["why"][5] == "its GPU computes longer"  # type: ignore[index]
    assert asked(workload="demo", name="dp-2")["ranks"]["rank"] == [0, 1]  # type: ignore[index]
    assert len(asked(workload="demo")["communicators"]) == 2  # type: ignore[arg-type]
    assert asked(comm_hash="0x1")["communicators"] == []
