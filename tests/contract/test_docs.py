"""The documentation against the tree: links, anchors, commands, settings, the agent's metrics.

After a wanted change of the agent's metrics, run with LANTERNE_WRITE_GOLDEN=1.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
from prometheus_client.core import Metric

from lanterne.agent import config as agent_config
from lanterne.agent import export
from lanterne.agent.keeper import SpoolState
from lanterne.collector import config as collector_config
from lanterne.service.reload import Reloaded

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/runbooks/*.md", "helm/**/*.md")
    for path in ROOT.glob(pattern)
)
AGENT_METRICS = ROOT / "docs" / "metrics-agent.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]\[]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_pages() -> None:
    assert {"README.md", "docs/index.md", "docs/install.md", "docs/operate.md"} <= {
        name(page) for page in PAGES
    }


@cache
def anchors(path: Path) -> frozenset[str]:
    """As GitHub makes them of headings."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", path.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return frozenset(
        slug if not number else f"{slug}-{number}"
        for slug, most in found.items()
        for number in range(most + 1)
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or not to.is_relative_to(ROOT):
            broken.append(target)
        elif anchor and to.suffix == ".md" and anchor not in anchors(to):
            broken.append(f"{target} (has {', '.join(sorted(anchors(to)))})")
    assert not broken


def test_every_page_is_reached_from_the_index() -> None:
    docs = ROOT / "docs"
    reached, todo = set(), [docs / "index.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if not target.startswith("https:"):
                todo.append((page.parent / target.partition("#")[0]).resolve())
    assert set(docs.rglob("*.md")) - set((docs / "examples").rglob("*")) <= reached
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text())


# ---- commands


def shown() -> Iterator[tuple[str, str]]:
    """(page, command line) of fenced blocks and of code in the text."""
    for page in PAGES:
        text = page.read_text()
        for language, block in FENCE.findall(text):
            if language in ("sh", "bash", "console", "yaml", "dockerfile", ""):
                for line in block.replace("\\\n", " ").splitlines():
                    yield name(page), line.removeprefix("$ ")
        for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
            yield name(page), code


def commands(program: str) -> set[tuple[str, str]]:
    """(page, what follows the program's name) where it is run, comments left out."""
    begins = re.compile(rf"^(?:sudo |\S+=\S+ )*{program}((?: .*)?)$")
    found = set()
    for page, line in shown():
        for part in re.split(r"&&|\|\||;|\| ", line.partition("  #")[0]):
            match = begins.match(part.strip())
            if match:
                found.add((page, match.group(1).strip()))
    return found


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (page, word)
        for page, rest in commands("make")
        if not rest.startswith("-")
        for word in rest.split()
        if re.fullmatch(r"[a-z][a-z-]*", word)
    }
    assert len(named) > 8
    assert not {(page, word) for page, word in named if word not in targets}


@cache
def help_of(*words: str) -> str:
    script = Path(sys.executable).with_name(words[0])
    done = subprocess.run(
        [script, *words[1:], "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


@pytest.mark.parametrize(
    ("program", "subcommands"),
    [
        ("lanterne-agent", ("run", "doctor")),
        (
            "lanterne-collector",
            ("run", "top", "record", "replay", "compare", "diagnose", "plan"),
        ),
    ],
)
def test_commands_and_flags_exist(program: str, subcommands: tuple[str, ...]) -> None:
    found = commands(program)
    assert len(found) > 5
    for page, rest in sorted(found):
        words = rest.split()
        command = next(iter(words), "")
        if command in subcommands:
            text = help_of(program, command)
        else:
            assert not re.fullmatch(r"[a-z]+", command), f"{page}: no command {rest!r}"
            default = ("run",) if program == "lanterne-collector" else ()
            text = help_of(program, *default)
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            known = flag in re.findall(r"--[a-z][a-z-]*", text)
            assert known or flag in ("--help", "--version"), f"{page}: {program} {rest}: {flag}"


# ---- settings


def test_settings_and_variables_exist() -> None:
    keys, variables = set(), set()
    for config, prefix in (
        (agent_config.AgentConfig, agent_config.ENV_PREFIX),
        (collector_config.CollectorConfig, collector_config.ENV_PREFIX),
    ):
        for section in msgspec.structs.fields(config):
            for key in section.type.__struct_fields__:
                keys.add(f"{section.name}.{key}")
                variables.add(f"{prefix}{section.name}_{key}".upper())
        variables.add(f"{prefix}CONFIG")
    sections = {key.partition(".")[0] for key in keys}
    wrong = []
    for page, code in shown():
        if page.startswith("helm/") or page == "CHANGELOG.md":
            continue
        if re.fullmatch(r"[a-z]+\.[a-z_]+", code) and code.partition(".")[0] in sections:
            file = code.endswith((".py", ".md", ".toml", ".c", ".h", ".proto"))
            if code not in keys and not file:
                wrong.append((page, code))
        wrong += [
            (page, variable)
            for variable in re.findall(r"LANTERNE_(?:AGENT|COLLECTOR)_[A-Z_]+[A-Z]", code)
            if variable not in variables and "<" not in code
        ]
    assert not wrong


# ---- the agent's metrics


def every_metric() -> Iterator[Metric]:
    """A page on which nothing is absent."""
    state = export.AgentState(
        probe_runs=1,
        probe_run_seconds=1.0,
        reload=Reloaded(True, 1.0),
        spool=SpoolState(True, 0, 0, 0, 0),
    )
    yield from export.AgentCollector(lambda: state).collect()


def table() -> str:
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for metric in sorted(every_metric(), key=lambda m: m.name):
        suffix = "_total" if metric.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # type: ignore[attr-defined]
        text = metric.documentation
        lines.append(f"| `{metric.name}{suffix}` | {metric.type} | {labels} | {text} |")
    return "\n".join(lines) + "\n"


def test_the_agents_metrics_are_documented() -> None:
    page = AGENT_METRICS.read_text()
    head, _, tail = page.partition("<!-- table -->\n")
    _, _, tail = tail.partition("<!-- end -->")
    want = f"{head}<!-- table -->\n{table()}<!-- end -->{tail}"
    if os.environ.get("LANTERNE_WRITE_GOLDEN") == "1":
        AGENT_METRICS.write_text(want)
    assert AGENT_METRICS.read_text() == want


def test_every_metric_that_a_page_names_exists() -> None:
    from lanterne.collector.metrics import CATALOG

    known = set(CATALOG)
    for metric in every_metric():
        known.add(metric.name + ("_total" if metric.type == "counter" else ""))
    suffixes = ("", "_bucket", "_sum", "_count")
    known = {n + s for n, s in itertools.product(known, suffixes)}
    wrong = set()
    for page, code in shown():
        if page.startswith("helm/"):
            continue
        # A recording rule has colons; "lanterne_x_" or "…_x" stands for several.
        for found in re.findall(r"(?<![\w:/.-])lanterne_[a-z_]*[a-z](?![\w:*])", code):
            if found.startswith(("lanterne_agent", "lanterne_collector", "lanterne_node")) and (
                found not in known
            ):
                wrong.add((page, found))
    assert not wrong
