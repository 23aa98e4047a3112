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
from lanterne.collector.snapshot import AdviceView, HangView, JobView, Place, Snapshot
from lanterne.service.reload import Reloaded
from tests.fixtures.snapshots import (
    NOW,
    blind,
    communicator,
    engine,
    experts,
    joined,
    missing,
    node,
    ranks,
    serving,
    snapshot,
    stage,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "fixtures" / "collector_metrics.txt"
DOCS = ROOT / "docs" / "metrics.md"


def known() -> Snapshot:
    """Two communicators, one of which is blind, on two nodes."""
    unseen = blind().communicators[0]
    pair = (
        communicator(serving=serving()),
        communicator(
            "dp-2",
            2,
            hang=HangView(31.0, "all_reduce", 17, (1,), (), (0,)),
            **_blindness(unseen.absent_reason),
        ),
    )
    return snapshot(
        nodes=(node(), node("node1", events_lost={"ring_full": 7})),
        communicators=pair,
        ranks=joined(ranks(), missing(ranks(2, evidence="none", comm=1), 1)),
        jobs=(JobView("demo", 0.34, ()),),
        experts=(experts(),),
        advice=(
            AdviceView("demo", "hot_set", "Add replicas.", 0.12),
            AdviceView("demo", "bias", "Move the bias.", float("nan")),
        ),
        stages=(stage(), stage(1, bubble=float("nan"), comm_compute=float("nan"))),
        places={(0, 1000): Place("train-worker-0", "ml", "trainer", "PyTorchJob", "train")},
        engines=(engine(**_ENGINE), engine("127.0.0.1:30001", ttft_p95=0.5, balancedness=0.6)),
    )


_ENGINE = {
    f"{what}_{percentile}": 0.01 * n
    for n, what in enumerate(("ttft", "tpot", "inter_token", "latency"), 1)
    for percentile in ("p50", "p95", "p99")
} | {"balancedness": 0.75}


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
    return write(
        families(
            known(),
            Runtime(
                "0.1.0",
                0,
                0,
                {"corrupt": 0},
                NOW,
                reload=Reloaded(True, NOW),
                http_refused={"password": 2},
                otlp={"failed": 1, "sent": 12},
            ),
        )
    ).decode()


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
