"""Alert and recording rules: promtool's opinion, their tests, and a runbook page for each alert."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lanterne.agent.export import AgentCollector, AgentState
from lanterne.agent.keeper import SpoolState
from lanterne.collector.metrics import CATALOG
from tests.contract.test_metrics_golden import promtool

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "helm" / "lanterne" / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"
SECTIONS = ("## What to look at first", "## What to do", "## What it does not mean")


def rules() -> str:
    return (RULES / "lanterne.rules.yaml").read_text()


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", rules())


def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    for command in (
        ["check", "rules", "lanterne.rules.yaml"],
        ["test", "rules", "lanterne.rules.test.yaml"],
    ):
        done = subprocess.run(
            [promtool(), *command],
            cwd=RULES,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def known_metrics() -> set[str]:
    state = AgentState(spool=SpoolState(True, 0, 0, 0, 0))
    agent = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in AgentCollector(lambda: state).collect()
    }
    return set(CATALOG) | agent


def used_metrics(text: str) -> set[str]:
    """Metrics of ours that rules or pages name; recorded ones (with colons) are left out."""
    names = re.findall(r"(?<![:\w])lanterne_\w+(?![:\w])", text)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_rules_use_only_metrics_that_exist() -> None:
    used = used_metrics(rules())
    assert len(used) > 20
    assert used <= known_metrics(), used - known_metrics()


def test_recorded_names_are_used_as_they_are_recorded() -> None:
    recorded = set(re.findall(r"- record: (\S+)", rules()))
    pages = "".join(page.read_text() for page in RUNBOOKS.glob("*.md"))
    used = set(re.findall(r"\b[a-z_]+:lanterne_\w+:\w+", rules() + pages))
    assert recorded
    assert used == recorded
    for name in recorded:
        level, metric, _ = name.split(":")
        assert f"by ({', '.join(level.split('_'))}" in rules(), name
        assert any(known.startswith(metric) for known in CATALOG), name


def test_every_alert_is_tested_and_recorded_names_too() -> None:
    tested = (RULES / "lanterne.rules.test.yaml").read_text()
    for alert in alerts():
        assert f"alertname: {alert}\n" in tested, alert
    fired = set(re.findall(r"alertname: (\w+)\n\s+eval_time: \S+\n\s+exp_alerts:\n", tested))
    assert fired == set(alerts()), "each fires in at least one test"


@pytest.mark.parametrize("alert", alerts())
def test_every_alert_has_a_severity_and_its_runbook(alert: str) -> None:
    block = rules().split(f"- alert: {alert}\n", 1)[1].split("\n\n", 1)[0]
    assert re.search(r"severity: (critical|warning|info)\n", block)
    assert f"runbook_url: docs/runbooks/{alert}.md" in block
    page = (RUNBOOKS / f"{alert}.md").read_text()
    assert page.startswith(f"# {alert}\n")
    assert [line for line in page.splitlines() if line.startswith("## ")] == list(SECTIONS)
    assert used_metrics(page) <= known_metrics(), used_metrics(page) - known_metrics()


def test_every_runbook_has_its_alert_and_the_list_names_all() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == set(alerts())
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text(), re.M)
    assert listed == [(alert, alert) for alert in alerts()]
