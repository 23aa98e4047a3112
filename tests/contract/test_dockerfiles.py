"""The Dockerfiles: what they copy is there, and they agree with the chart and the programs."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIDES = pytest.mark.parametrize("side", ["agent", "collector"])


@cache
def instructions(side: str) -> tuple[tuple[str, str], ...]:
    """(instruction, arguments) with continued lines joined, without comments."""
    text = "\n".join(
        line
        for line in (ROOT / side / "Dockerfile").read_text().splitlines()
        if not line.startswith("#")
    )
    joined = re.sub(r"\\\n\s*", "", text)
    pairs = [line.partition(" ")[::2] for line in joined.splitlines() if line.strip()]
    return tuple((name, rest) for name, rest in pairs)


def last(side: str, name: str) -> str:
    return [rest for have, rest in instructions(side) if have == name][-1]


def ignored(path: str) -> bool:
    """By .dockerignore's rules: the last pattern that matches decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted = pattern.removeprefix("!")
        anywhere = wanted.startswith("**/")
        names = [path, path.split("/")[0]] if not anywhere else path.split("/")
        if any(fnmatch.fnmatch(name, wanted.removeprefix("**/")) for name in names):
            result = not pattern.startswith("!")
    return result


@SIDES
def test_two_stages_and_only_known_instructions(side: str) -> None:
    names = [name for name, _ in instructions(side)]
    assert set(names) <= {
        "ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT",
    }  # fmt: skip
    stages = [rest for name, rest in instructions(side) if name == "FROM"]
    assert [stage.split() for stage in stages] == [["${BASE}", "AS", "build"], ["${BASE}"]]
    # A tag that names a release: the agent's bcc and Python come with it.
    assert re.fullmatch(r"BASE=docker\.io/library/debian:\w+-slim", last(side, "ARG"))


@SIDES
def test_what_is_copied_exists_and_is_enough(side: str) -> None:
    copied = []
    for name, rest in instructions(side):
        if name == "COPY" and not rest.startswith("--from"):
            copied += rest.split()[:-1]
    for path in copied:
        assert (ROOT / path).exists()
        assert not ignored(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {*project["tool"]["setuptools"]["package-dir"].values(), "pyproject.toml"}
    needed |= {project["project"]["readme"]}
    assert needed <= set(copied)
    for path in ("tests", ".git", "agent/__pycache__/main.pyc", "probes/nccl_profiler/x.so"):
        assert ignored(path)


@SIDES
def test_it_runs_the_program_as_the_chart_expects(side: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (program,) = json.loads(last(side, "ENTRYPOINT"))
    assert program == f"lanterne-{side}"
    assert program in project["project"]["scripts"]
    user = last(side, "USER").partition(":")[0]
    folder = ROOT / "helm/lanterne/templates"
    kind = "agent-daemonset" if side == "agent" else "collector-statefulset"
    (chart_user,) = re.findall(r"runAsUser: (\d+)", (folder / f"{kind}.yaml").read_text())
    assert user == chart_user
    values = (ROOT / "helm/lanterne/values.yaml").read_text()
    ports = re.findall(r"(?:metrics|ingest|http): (\d+)", values)
    assert set(last(side, "EXPOSE").split()) <= set(ports)
    assert f"repository: lanterne/{side}" in values
