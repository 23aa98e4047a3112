"""The page /metrics of a known snapshot, promtool's opinion of it, and its documentation.

After a wanted change, run this file's tests with LANTERNE_WRITE_GOLDEN=1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lanterne.collector.analyse import reasons
from lanterne.collector.export import families, write
from lanterne.collector.metrics import CATALOG
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot
from tests.fixtures.snapshots import blind, communicator, joined, node, ranks, snapshot

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "fixtures" / "collector_metrics.txt"
DOCS = ROOT / "docs" / "metrics.md"
RULES = ROOT / "helm" / "lanterne" / "rules"


def known() -> Snapshot:
    """Two communicators, one of which is blind, on two nodes."""
    unseen = blind().communicators[0]
    pair = (communicator(), communicator("dp-2", 2, **_blindness(unseen.absent_reason)))
    return snapshot(
        nodes=(node(), node("node1", events_lost={"ring_full": 7})),
        communicators=pair,
        ranks=joined(ranks(), ranks(2, evidence="none", comm=1)),
    )


def _blindness(reason: str) -> dict[str, object]:
    return {
        "evidence": 0,
        "absent_reason": reason,
        "absent_code": "host_ahead",
        "waits": {},
        "dispatch": {},
        "combine": {},
        "complete_share": float("nan"),
    }


def page() -> str:
    return write(families(known(), Runtime("0.1.0", 0, 0))).decode()


def promtool() -> str:
    """The path of the real promtool; skips, or fails where CI must have it."""
    found = shutil.which("promtool")
    if found is None:
        reason = "promtool is not installed (Debian: apt-get install prometheus)"
        if os.environ.get("LANTERNE_REQUIRE_KERNEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def test_the_page_is_the_golden_one() -> None:
    if os.environ.get("LANTERNE_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(page())
    assert page() == GOLDEN.read_text()


def test_the_golden_page_shows_every_metric() -> None:
    names = {
        f.name + ("_total" if f.type == "counter" else "")
        for f in text_string_to_metric_families(GOLDEN.read_text())
    }
    assert names == set(CATALOG)


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [promtool(), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_promtool_accepts_the_golden_page() -> None:
    done = lint(GOLDEN.read_text())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_would_object() -> None:
    assert lint("# TYPE bad_total gauge\nbad_total 1\n").returncode != 0


def test_every_metric_is_documented_with_its_kind_and_labels_and_no_other() -> None:
    rows = re.findall(r"^\| `(lanterne_\w+)` \| (\w+) \| ([^|]*) \|", DOCS.read_text(), re.M)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
                  if not name.startswith("lanterne_agent_")}  # fmt: skip
    assert documented == {m.name: (m.kind, m.labels) for m in CATALOG.values()}


def test_every_reason_for_absent_waits_is_documented() -> None:
    source = Path(reasons.__file__).read_text()
    codes = set(re.findall(r'(?:\(|return )\n?\s*"([a-z_]+)",', source))
    assert {"host_ahead", "idle", "clock_error", "ranks_missing"} <= codes
    text = DOCS.read_text()
    assert {code for code in codes if f"| `{code}` |" not in text} == set()


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


def test_rules_use_only_metrics_that_exist() -> None:
    used = set(re.findall(r"\blanterne_\w+", (RULES / "lanterne.rules.yaml").read_text()))
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert used
    assert used <= set(CATALOG), used - set(CATALOG)


def test_every_alert_is_tested() -> None:
    alerts = re.findall(r"alert: (\w+)", (RULES / "lanterne.rules.yaml").read_text())
    tested = (RULES / "lanterne.rules.test.yaml").read_text()
    for alert in alerts:
        assert f"alertname: {alert}\n" in tested, alert
