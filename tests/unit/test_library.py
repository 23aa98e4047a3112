"""Use as a library: what is public is documented, and the examples run."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

from lanterne.collector import analyse

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "library.md"


def test_everything_public_has_a_docstring_and_a_place_in_the_documentation() -> None:
    text = DOC.read_text()
    for name in analyse.__all__:
        assert inspect.getdoc(getattr(analyse, name)), name
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


def test_what_is_documented_exists() -> None:
    for name in re.findall(r"^\| `(\w+)\(", DOC.read_text(), re.M):
        assert name in analyse.__all__, name


def test_the_code_in_the_documentation_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    skew, excess, balanced = map(float, done.stdout.split())
    assert 1 < skew < 1.5
    assert excess < 0.01
    assert 0.9 < balanced <= 1


def test_the_example_shows_how_older_formulas_mislead() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "examples" / "expert_load.py"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    def row(begin: str) -> list[str]:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(begin)]
        return line[44:].split()

    # Uniform routing of few tokens reads as a disaster, and int() "drops" all of it.
    assert [float(v) > 1e5 for v in row("old: max / (min + 1e-5)")] == [True, False]
    assert row("old: 'dropped', int() capacity")[0] == "100%"
    assert row("overflow, ceil capacity")[1] == "0%"
    # Uniform routing has a Gini above 0.15, and no excess.
    uniform, hot = map(float, row("Gini"))
    assert 0.15 < uniform < hot
    assert [float(v) > 0.05 for v in row("excess Gini")] == [False, True]
    # Replication helps ranks and leaves the logical ratio as it is.
    before, after = row("hottest / coldest expert")
    assert before == after
    before, after = row("balancedness")
    assert float(after) > float(before)
    assert row("all-to-all / FFN")[0] == "1.25"
    rates = [int(v) for v in row("tokens per second")]
    assert rates == sorted(rates)
