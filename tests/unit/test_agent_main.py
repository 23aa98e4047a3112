"""The command line, and what an agent without probes does by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from lanterne.agent import main as cli
from lanterne.agent import memory
from tests.stack import free_port

AGENT = [sys.executable, "-m", "lanterne.agent.main"]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AGENT, *arguments],
        text=True,
        capture_output=True,
        env=dict(os.environ) | env,
        check=False,
        timeout=60,
    )


def test_help_names_the_two_commands_and_what_is_needed() -> None:
    result = run("--help")
    assert result.returncode == 0
    for word in ("doctor", "run", "--collector", "--check-config", "5.15", "root"):
        assert word in result.stdout, word


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "lanterne-agent")


def test_a_valid_configuration_is_said_to_be_so(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("[window]\nseconds = 2\n")
    result = run("--config", str(file), "--check-config")
    assert (result.returncode, result.stdout) == (0, "configuration is valid\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window", "0"], ["window.seconds", "0.1"]),
        (["run", "--set", "probes.method=x"], ["probes.method", "'auto'"]),
        (["--set", "nonsense"], ["SECTION.KEY=VALUE"]),
        (["--config", "/nonexistent.toml"], ["/nonexistent.toml", "cannot be read"]),
        (["--collector", "nohost"], ["collector.addresses", "HOST:PORT"]),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments, "--check-config")
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def test_the_wrong_half_installed_is_explained() -> None:
    code = (
        "import sys; sys.modules['itanium_demangler'] = None\n"
        "from lanterne.agent.main import run\n"
        "sys.argv = ['lanterne-agent', 'doctor']; run()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert "itanium_demangler is missing" in result.stderr
    assert "pip install 'lanterne[agent]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_flags_work_before_and_after_the_command() -> None:
    for arguments in (["--node", "a", "run"], ["run", "--node", "a"]):
        parsed = cli.parser().parse_args(arguments)
        assert cli.load_config(parsed).node.name == "a"


def test_without_probes_and_collector_it_runs_serves_and_stops() -> None:
    port = free_port()
    process = subprocess.Popen(
        [
            *AGENT, "--metrics", f"127.0.0.1:{port}", "--collector", "127.0.0.1:1",
            "--window", "0.2", "--set", "probes.enabled=false",
            "--set", "collector.shutdown_seconds=0.1",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        page = ""
        deadline = time.monotonic() + 30
        while 'source_success{source="host"} 1.0' not in page and time.monotonic() < deadline:
            time.sleep(0.1)
            assert process.poll() is None
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    page = answer.read().decode()
            except OSError:
                continue
        assert 'source_success{source="host"} 1.0' in page
        assert "lanterne_agent_collector_connected 0.0" in page
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "agent stopped" in log
    assert 'configuration reloaded in_force="no change"' in log
    assert "Traceback" not in log


def test_a_loader_that_cannot_work_leaves_the_rest_alive() -> None:
    process = subprocess.Popen(
        [
            *AGENT, "--metrics", "", "--collector", "127.0.0.1:1", "--window", "0.2",
            "--interpreter", "/nonexistent/python", "--set", "collector.shutdown_seconds=0.1",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "agent started" in line:
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    log = "".join(lines) + rest
    assert process.returncode == 0
    assert "probes cannot be loaded" in log
    assert "doctor" in log
    assert "Traceback" not in log


# -- log, privileges, memory ---------------------------------------------------------------


def in_child(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_log_lines_cannot_be_forged_by_values() -> None:
    text = in_child(
        "import logging; from lanterne.service import log; log.configure('info');"
        "logging.info('library', extra={'path': 'a\\nb error forged', 'kind': 'nccl'})"
    )
    assert text.count("\n") == 1
    assert 'info library path="a\\nb error forged" kind=nccl' in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: there is nothing to drop otherwise")
def test_only_what_attaching_needs_is_kept() -> None:
    text = in_child(
        "from lanterne.agent import privileges as p; kept = p.drop();"
        "assert kept == p.effective(), (kept, p.effective());"
        "print([c for c in range(64) if kept >> c & 1]);"
        "print(open('/proc/self/status').read())"
    )
    kept = [int(n) for n in text.splitlines()[0].strip("[]").split(",")]
    assert set(kept) <= {2, 19, 38, 39, 40}
    assert 19 in kept
    assert "NoNewPrivs:\t1" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: there is nothing to drop otherwise")
def test_nothing_comes_back_by_starting_a_program() -> None:
    text = in_child(
        "import subprocess, sys; from lanterne.agent import privileges as p; p.drop();"
        "print(subprocess.run(['cat', '/proc/self/status'], capture_output=True).stdout.decode())"
    )
    line = next(line for line in text.splitlines() if line.startswith("CapEff"))
    assert int(line.split()[1], 16) & 1 << 21 == 0  # CAP_SYS_ADMIN


SMAPS = """\
1000-3000 r-xp 00000000 fe:00 1   /usr/lib/a.so
Rss:                   8 kB
Anonymous:             0 kB
3000-4000 r--p 00000000 fe:00 1   /usr/lib/a.so
Rss:                   4 kB
Anonymous:             4 kB
4000-5000 rw-p 00000000 fe:00 1   /usr/lib/a.so
Rss:                   4 kB
Anonymous:             0 kB
5000-6000 r--s 00000000 fe:00 1   /dev/shm/x
Rss:                   4 kB
Anonymous:             0 kB
6000-7000 r--p 00000000 00:00 0   [vvar]
Rss:                   4 kB
Anonymous:             0 kB
7000-8000 r--p 00000000 fe:00 1   /usr/lib/b.so
Rss:                   0 kB
Anonymous:             0 kB
"""


def test_only_clean_pages_of_files_are_let_go() -> None:
    assert list(memory._clean_files(SMAPS)) == [(0x1000, 0x3000, 8192)]


def test_a_process_goes_on_after_letting_go() -> None:
    text = in_child(
        "import numpy as np; from lanterne.agent import memory; memory.frugal();"
        "a = np.arange(10**6); print(memory.let_go() > 0, int(a.sum()), np.sort(a)[-1])"
    )
    assert text.split() == ["True", "499999500000", "999999"]
