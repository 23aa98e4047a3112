"""Every query of every dashboard, asked of a real Prometheus that scrapes a fed collector.

The agent's page is served by the agent's own exporter, without probes. Prometheus asks for
OpenMetrics by itself, so both programs' pages are read in that format, exemplars included.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from helm.dashboards.files import FOLDER, files
from lanterne.agent.export import AgentState, Exporter
from lanterne.agent.host import ProcessReading
from lanterne.agent.keeper import SpoolState
from tests.fixtures.fed_moe import enrich
from tests.fixtures.feeder import SLOW, Feeder
from tests.prometheus_server import Prometheus, require
from tests.stack import Stack, fetch, wait_for

# For these the fed job has nothing to show, and why. They must be valid all the same.
NO_DATA = {
    "lanterne_collector_recorded_bytes_total": "no recording is made",
    "lanterne_collector_otlp_exports_total": "no endpoint is configured",
    "sum by (instance) (lanterne_agent_spool_success) == 0": "the spool is well",
    "lanterne_collector_batches_refused_total": "no batch is refused",
    "sum by (reason) (rate(lanterne_collector_dropped_total": "no bound is exceeded",
}
CHOICES = {
    "workload": "fed", "comm": "ep", "rank": str(SLOW), "node": "fed0", "gpu": str(SLOW),
    "__rate_interval": "30s",
}  # fmt: skip


@dataclass
class Site:
    prometheus: Prometheus
    stack: Stack
    agent_url: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require()
    folder = tmp_path_factory.mktemp("dashboards")
    began = time.monotonic()

    def state() -> AgentState:
        return AgentState(
            node="fed0",
            version="0.1.0",
            probe_runs=1,
            probe_run_seconds=time.monotonic() - began,
            spool=SpoolState(True, 3, 4096, 3, 0),
            host={4000: PRESSED},
        )

    agent = Exporter("127.0.0.1:0", state)
    quick = {"advice": {"seconds": 5.0}, "analysis": {"window_seconds": 2.0}}
    with Stack(folder, [], collector=quick) as stack:
        stack.start_collector()
        targets = (f"127.0.0.1:{stack.http_port}", f"127.0.0.1:{agent.port}")
        server = Prometheus(folder, *targets)
        try:
            with Feeder(f"127.0.0.1:{stack.grpc_port}", history=5, more=enrich):
                yield Site(server, stack, f"http://{targets[1]}/metrics")
        finally:
            server.stop()
            agent.close()


PRESSED = ProcessReading(4000, 1, "train", cpu_pressure_ratio=0.1, memory_pressure_ratio=0.2)


def chosen(text: str) -> str:
    """With the choices above; where several may be chosen, all."""
    text = text.replace('=~"$comm"', '=~".*"')
    return re.sub(r"\$\{?(\w+)\}?", lambda m: CHOICES[m[1]], text)


def queries() -> list[str]:
    boards = [json.loads((FOLDER / name).read_text()) for name in files()]
    found = [t["expr"] for b in boards for p in b["panels"] for t in p.get("targets", ())]
    found += [a["expr"] for b in boards for a in b["annotations"]["list"]]
    return sorted({chosen(text) for text in found})


def series_of_variables() -> list[tuple[str, str]]:
    """(selector, label) of the variables."""
    boards = [json.loads((FOLDER / name).read_text()) for name in files()]
    texts = {
        v["definition"] for b in boards for v in b["templating"]["list"] if v["type"] == "query"
    }
    pairs = [re.fullmatch(r"label_values\((.*), (\w+)\)", text) for text in sorted(texts)]
    return [(chosen(m[1]), m[2]) for m in pairs if m is not None]


def test_every_query_returns_data(site: Site) -> None:
    asked = queries()
    assert len(asked) > 80
    excused = {text for text in asked if any(part in text for part in NO_DATA)}
    for part in NO_DATA:
        assert any(part in text for text in excused), f"{part}: no longer asked"
    left = [text for text in asked if text not in excused]

    def all_answered() -> bool:
        left[:] = [text for text in left if not site.prometheus.query(text)]
        return not left

    try:
        wait_for(all_answered, 90, "data for every query", every=1.0)
    except TimeoutError:
        pytest.fail("no data for:\n" + "\n".join(left))
    for text in sorted(excused):
        assert site.prometheus.query(text) == [], f"has data after all: {text}"
        assert site.prometheus.api("query?query=" + quote(text)) is not None, text


def test_every_variable_has_choices(site: Site) -> None:
    for selector, label in series_of_variables():
        found = wait_for(lambda s=selector: site.prometheus.query(s), 60, selector)
        assert {row["metric"].get(label) for row in found} - {None}, (selector, label)
        value = CHOICES[label]
        assert any(row["metric"].get(label) == value for row in found), (selector, label)


def test_both_programs_speak_openmetrics_to_prometheus(site: Site) -> None:
    """It asks for it by itself; exemplars come through in no other format."""
    wait_for(lambda: site.prometheus.query("lanterne_agent_info"), 60, "the agent's page")
    targets = site.prometheus.api("targets")["activeTargets"]
    assert len(targets) == 2
    wait_for(
        lambda: all(t["health"] == "up" for t in site.prometheus.api("targets")["activeTargets"]),
        60,
        "both targets scraped",
    )
    kinds = {
        row["metric"]: row["type"]
        for row in site.prometheus.api("targets/metadata?match_target={job=%22lanterne%22}")
    }
    # In OpenMetrics a counter's family has no _total; in the text format it has.
    assert kinds["lanterne_agent_events_read"] == "counter"
    assert kinds["lanterne_rank_wait_seconds"] == "counter"
    assert not [name for name in kinds if name.endswith("_total")]
    for name in ("lanterne_agent_events_read_total", "lanterne_rank_wait_seconds_total"):
        assert site.prometheus.query(name), name
        assert not site.prometheus.query(name.replace("_total", "_created"))


def test_an_exemplar_leads_to_the_communicator(site: Site) -> None:
    def exemplars() -> list[dict[str, Any]]:
        now = time.time()
        data = site.prometheus.api(
            "query_exemplars?query=lanterne_collective_wait_seconds_bucket"
            f"&start={now - 300:.0f}&end={now + 60:.0f}"
        )
        return [e for row in data or [] for e in row["exemplars"]]

    found = wait_for(exemplars, 60, "exemplars in Prometheus")[-1]
    assert found["labels"]["last_rank"] == str(SLOW)
    assert found["labels"]["waiting_rank"] != str(SLOW)
    comm_hash = found["labels"]["comm_hash"]
    page = fetch(f"{site.stack.collector_url}/api/v1/communicators?comm_hash={comm_hash}")
    (comm,) = json.loads(page)["communicators"]
    assert (comm["workload"], comm["name"]) == ("fed", "ep")
    assert float(found["value"]) == pytest.approx(0.008)
