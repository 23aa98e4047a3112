"""A real Prometheus scrapes a real collector, fed over real gRPC, and names the slow rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.feeder import SLOW, Feeder
from tests.stack import Stack, free_port, try_fetch, wait_for

RULES = Path(__file__).resolve().parents[2] / "helm" / "lanterne" / "rules" / "lanterne.rules.yaml"


class Prometheus:
    """A server that scrapes `target` every second."""

    def __init__(self, folder: Path, target: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {"job_name": "lanterne", "static_configs": [{"targets": [target]}]}
                    ],
                }
            )
        )
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def api(self, path: str) -> Any:
        text = try_fetch(f"{self.url}/api/v1/{path}")
        return json.loads(text)["data"] if text else None

    def query(self, promql: str) -> list[dict[str, Any]]:
        data = self.api("query?query=" + urllib.parse.quote(promql))
        found: list[dict[str, Any]] = data["result"] if data else []
        return found


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        reason = "prometheus is not installed (Debian: apt-get install prometheus)"
        if os.environ.get("LANTERNE_REQUIRE_KERNEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
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
