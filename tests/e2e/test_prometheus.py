"""A real Prometheus scrapes a real collector, fed over real gRPC, and names the slow rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.feeder import SLOW, Feeder
from tests.prometheus_server import Prometheus, require
from tests.stack import Stack, wait_for


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    require()
    with Stack(tmp_path, []) as stack:
        stack.start_collector()
        server = Prometheus(tmp_path, f"127.0.0.1:{stack.http_port}")
        try:
            with Feeder(f"127.0.0.1:{stack.grpc_port}", history=5):
                yield server
        finally:
            server.stop()


def test_prometheus_names_the_straggler(prometheus: Prometheus) -> None:
    named = wait_for(
        lambda: prometheus.query("lanterne_rank_straggler == 1"), 60, "a straggler in Prometheus"
    )
    (row,) = named
    assert row["metric"]["rank"] == str(SLOW)
    assert row["metric"]["workload"] == "fed"
    assert row["metric"]["node"] == "fed0"
    assert row["metric"]["class"] != "none"

    # 8 of every 20 ms: the share of its time that everybody but the straggler waits. A quotient of
    # counters, not a rate: they step once a window, so what a short rate shows depends on how many
    # steps the range happened to catch.
    parts = ("wait", "comm", "compute")
    time = " + ".join(f"sum by (rank) (lanterne_rank_{part}_seconds_total)" for part in parts)
    share = f"sum by (rank) (lanterne_rank_wait_seconds_total) / ({time})"
    shares = wait_for(lambda: prometheus.query(share), 60, "wait shares")
    by_rank = {s["metric"]["rank"]: float(s["value"][1]) for s in shares}
    assert set(by_rank) == {str(r) for r in range(8)}
    assert by_rank[str(SLOW)] < 0.02
    assert all(0.3 < share < 0.5 for r, share in by_rank.items() if r != str(SLOW)), by_rank
    waits = wait_for(
        lambda: prometheus.query("rate(lanterne_rank_wait_seconds_total[10s]) > 0"), 60, "waits"
    )
    assert str(SLOW) not in {w["metric"]["rank"] for w in waits}
    assert {w["metric"]["source"] for w in waits} == {"blocking"}

    blame = "topk(1, rate(lanterne_rank_blame_seconds_total[10s]) > 0)"
    worst = wait_for(lambda: prometheus.query(blame), 60, "blame rates")
    assert [w["metric"]["rank"] for w in worst] == [str(SLOW)]

    (target,) = prometheus.api("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    rules = [r for g in prometheus.api("rules")["groups"] for r in g["rules"]]
    assert len(rules) >= 12
    evaluated = wait_for(
        lambda: (
            {r["health"] for g in prometheus.api("rules")["groups"] for r in g["rules"]}
            - {"unknown"}
        ),
        60,
        "evaluated rules",
    )
    assert evaluated == {"ok"}
