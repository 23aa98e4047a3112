"""SECURITY.md claims nothing that no test checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from lanterne.agent import privileges

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_test_that_it_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 40
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or name
        not in {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
    ]
    assert missing == []


def test_every_row_of_a_threat_names_a_test_or_says_that_there_is_none() -> None:
    for heading in ("process on the host", "agent", "scraper", "network"):
        section = TEXT.partition(f"## A hostile {heading}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (?!it may|-)(.*) \|$", section.replace("|---|---|", ""), re.M)
        assert len(rows) >= 5, heading
        bare = [row for row in rows if "::test_" not in row]
        assert all("nothing: what a node" in row or "TLS 1.2 or 1.3" in row for row in bare), bare


def test_the_capabilities_are_those_of_the_program() -> None:
    listed = {getattr(privileges, name) for name in re.findall(r"^\| `(CAP_\w+)` \|", TEXT, re.M)}
    assert listed == set(privileges.KEPT_FOR_PERF)


def test_links_within_it_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.*)$", TEXT, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= headings
