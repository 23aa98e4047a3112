"""The Grafana dashboards: as described, well formed, and naming only what exists."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client.core import Metric

from helm.dashboards.files import DASHBOARDS, FOLDER, files
from helm.dashboards.grafana import SCHEMA_VERSION
from lanterne.agent.export import AgentCollector, AgentState
from lanterne.agent.keeper import SpoolState
from lanterne.collector.http import App
from lanterne.collector.metrics import CATALOG

NAMES = sorted(files())
UNITS = {
    "short", "none", "s", "percentunit", "ops", "Bps", "bytes", "hertz", "watt", "celsius",
}  # fmt: skip
DURING = {"datasource", "collector"}  # variables of every dashboard


@pytest.fixture(params=NAMES)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / request.param).read_text())
    return value


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in board["panels"] if p["type"] != "row"]


def test_the_files_are_what_the_descriptions_give() -> None:
    found = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert found == files(), "run: python -m helm.dashboards"


def test_dashboards_are_distinct_and_current(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] == SCHEMA_VERSION
    assert board["uid"] in {d.uid for d in DASHBOARDS}
    assert len(board["uid"]) <= 40
    assert "id" not in board, "Grafana gives it"
    ids = [p["id"] for p in board["panels"]]
    assert sorted(ids) == list(range(1, len(ids) + 1))


def test_no_two_panels_overlap_and_all_are_within_the_grid(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_has_a_title_a_unit_and_the_chosen_datasource(board: dict[str, Any]) -> None:
    titles = [p["title"] for p in panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["targets"], panel["title"]
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [t["refId"] for t in panel["targets"]]
        assert len(set(refs)) == len(refs)


def variables(board: dict[str, Any]) -> set[str]:
    names = [v["name"] for v in board["templating"]["list"]]
    assert len(set(names)) == len(names)
    return set(names)


def test_every_variable_that_is_used_exists(board: dict[str, Any]) -> None:
    known = variables(board)
    assert known >= DURING
    for text in re.findall(r'"(?:[^"\\]|\\.)*"', json.dumps(board)):
        for name in re.findall(r"\$\{?(\w+)", text):
            assert name in known or name.startswith("__"), (name, text)
    queries = [v for v in board["templating"]["list"] if v["type"] == "query"]
    seen = {"datasource"}
    for variable in queries:  # one may depend only on those before it
        assert set(re.findall(r"\$(\w+)", variable["definition"])) <= seen
        seen.add(variable["name"])


def _labels() -> dict[str, set[str]]:
    """Labels by metric, as a query names it."""
    found = {m.name: set(m.labels) for m in CATALOG.values()}
    spool = SpoolState(True, 0, 0, 0, 0)
    state = AgentState(probe_runs=1, probe_run_seconds=1.0, spool=spool)
    agent: list[Metric] = list(AgentCollector(lambda: state).collect())
    for family in agent:
        name = family.name + ("_total" if family.type == "counter" else "")
        found.setdefault(name, set())
    return found


def test_queries_name_only_metrics_and_labels_that_exist(board: dict[str, Any]) -> None:
    known = _labels()
    every = set().union(*known.values())
    texts = [t["expr"] for p in panels(board) for t in p["targets"]]
    texts += [v["definition"] for v in board["templating"]["list"] if v["type"] == "query"]
    for text in texts:
        used = re.findall(r"\b(lanterne_\w+)(?:\{([^}]*)\})?", text)
        assert used or "ALERTS" in text, text
        for name, selector in used:
            metric = re.sub(r"_(bucket|sum|count)$", "", name)
            assert metric in known, name
            labels = set(re.findall(r"(\w+)\s*[=!]", selector))
            allowed = known[metric] or every | {"pid"}
            assert labels <= allowed, (name, labels)
        for group in re.findall(r"by \(([^)]*)\)", text):
            assert set(group.replace(" ", "").split(",")) <= every | {"le", "instance"}, text


def test_links_lead_to_dashboards_and_pages_that_exist(board: dict[str, Any]) -> None:
    boards = {uid: variables(json.loads(text)) for uid, text in _by_uid().items()}
    pages = set(App(latest=lambda: None, metrics=lambda _: ("", b""), ready=dict)._routes)
    links = [link["url"] for p in panels(board) for link in p["fieldConfig"]["defaults"]["links"]]
    links += [link["url"] for link in board["links"]]
    assert any(link.startswith("/d/") for link in links)
    for link in links:
        url = urlsplit(link.replace("${collector}", "http://collector"))
        asked = set(parse_qs(url.query))
        if url.netloc:
            assert url.path in pages, link
            assert asked <= {"workload", "comm"}
        else:
            uid = url.path.removeprefix("/d/")
            assert uid in boards, link
            assert {name.removeprefix("var-") for name in asked} <= boards[uid], link


def _by_uid() -> dict[str, str]:
    return {json.loads(text)["uid"]: text for text in files().values()}


def test_the_way_from_the_fleet_to_a_rank() -> None:
    """Each level links to the next, and back through the links on top."""
    boards = {uid: json.loads(text) for uid, text in _by_uid().items()}
    for above, below in (("lanterne-fleet", "lanterne-job"), ("lanterne-job", "lanterne-rank"),
                         ("lanterne-fleet", "lanterne-rank")):  # fmt: skip
        urls = json.dumps([p["fieldConfig"]["defaults"]["links"] for p in panels(boards[above])])
        assert f"/d/{below}?" in urls, (above, below)
    for uid, value in boards.items():
        assert {link["url"] for link in value["links"]} == {f"/d/{u}" for u in boards if u != uid}
