"""What the project promises as a whole: commands, packaging, generated code, licences, defaults."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (
    "telemetry_pb2.py",
    "telemetry_pb2.pyi",
    "telemetry_pb2_grpc.py",
    "pod_resources_pb2.py",
    "pod_resources_pb2.pyi",
)
COMMANDS = ("lanterne-agent", "lanterne-collector")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def script(name: str) -> Path:
    return Path(sys.executable).with_name(name)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_version(command: str) -> None:
    shown = run(script(command), "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.lower().startswith("usage: " + command)
    assert "--config" in shown.stdout
    version = run(script(command), "--version")
    assert version.returncode == 0, version.stderr
    assert version.stdout.split() == [command, metadata.version("lanterne")]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_says_so_without_a_traceback(command: str) -> None:
    refused = run(script(command), "--no-such-flag")
    assert refused.returncode == 2
    assert "--no-such-flag" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_generated_code_is_what_the_proto_gives(tmp_path: Path) -> None:
    done = run(sys.executable, ROOT / "tests" / "generate_proto.py", "--check", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / "proto" / name).read_text(), (
            f"proto/{name} is not what proto/*.proto give: run `make proto`"
        )


def test_the_runtime_floors_are_those_of_the_generated_code() -> None:
    floors = {
        (parsed := Requirement(text)).name: {spec.version for spec in parsed.specifier}
        for text in project()["project"]["dependencies"]
    }
    grpc = (ROOT / "proto" / "telemetry_pb2_grpc.py").read_text()
    protobuf = (ROOT / "proto" / "telemetry_pb2.py").read_text()
    wanted = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", grpc)
    assert wanted is not None
    assert wanted[1] in floors["grpcio"]
    wanted = re.search(r"# Protobuf Python Version: ([\d.]+)", protobuf)
    assert wanted is not None
    assert wanted[1] in floors["protobuf"]


def test_every_bpf_source_carries_its_licence() -> None:
    sources = [p for p in (ROOT / "probes" / "bpf").rglob("*") if p.suffix in (".c", ".h")]
    assert len(sources) > 1
    for source in sources:
        line = source.read_text().splitlines()[0]
        assert "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause" in line, source


def test_the_licences_are_complete() -> None:
    apache = (ROOT / "LICENSE").read_text()
    assert "Apache License" in apache
    assert "END OF TERMS AND CONDITIONS" in apache
    bpf = (ROOT / "probes" / "bpf" / "LICENSE").read_text()
    assert "Redistributions in binary form must reproduce" in bpf
    assert "GNU GENERAL PUBLIC LICENSE" in bpf


def test_packages_are_listed_and_agree_with_the_folders() -> None:
    listed = set(project()["tool"]["setuptools"]["packages"])
    found = {
        ".".join(("lanterne", *init.parent.relative_to(ROOT).parts))
        for folder in ("agent", "collector", "probes", "proto", "service")
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found


def test_the_installed_distribution_is_this_one() -> None:
    assert metadata.version("lanterne") == project()["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"[{project()['project']['version']}]" in changelog or "[Unreleased]" in changelog


def test_an_agent_finds_a_collector_of_the_same_host_by_default() -> None:
    from lanterne.agent.config import AgentConfig
    from lanterne.collector.config import CollectorConfig

    ports = {address.rpartition(":")[2] for address in AgentConfig().collector.addresses}
    assert ports == {CollectorConfig().ingest.address.rpartition(":")[2]}


def test_every_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in set(re.findall(r"`make ([a-z-]+)", (ROOT / document).read_text())):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"
