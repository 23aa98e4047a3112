"""Who may import whom: the contracts of pyproject.toml, and that they can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("agent", "collector", "probes", "proto", "service")


def lint(cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(path)) if path else dict(os.environ)
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("agent/errors.py", "import lanterne.collector.errors", "share only lanterne.proto and"),
        ("probes/layout.py", "import lanterne.agent.errors", "the probes know nothing of ours"),
        ("agent/errors.py", "import lanterne.agent.config", "in the agent a stage"),
        ("collector/errors.py", "import lanterne.collector.main", "in the collector a stage"),
        ("agent/errors.py", "import bcc", "bcc only"),
        ("agent/errors.py", "import pynvml", "pynvml only"),
        ("collector/errors.py", "import grpc", "grpc only"),
        ("agent/errors.py", "import prometheus_client", "prometheus_client only"),
        ("agent/errors.py", "import capstone", "capstone only"),
        ("agent/windows.py", "import time", "no IO"),
        ("service/errors.py", "import lanterne.service.web_config", "in what both are made of"),
        ("service/errors.py", "import lanterne.agent.errors", "in service nothing of ours"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, file: str, line: str, broken: str) -> None:
    site = tmp_path / "site"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, site / "lanterne" / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = site / "lanterne" / file
    target.write_text(target.read_text() + f"\n{line}\n")
    done = lint(tmp_path, site)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [row for row in done.stdout.splitlines() if " BROKEN" in row]
    assert any(broken in row for row in failed), done.stdout
