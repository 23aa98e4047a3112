"""lanterne-collector as a process: its command line, its pages, and how it starts and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.feeder import SLOW, Feeder
from tests.stack import fetch, try_fetch, wait_for

SCRIPT = str(Path(sys.executable).with_name("lanterne-collector"))
ENV = {k: v for k, v in os.environ.items() if not k.startswith("LANTERNE_COLLECTOR_")}
ENV["LANTERNE_COLLECTOR_STATE_PATH"] = ""  # not this machine's own


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=ENV | env,
    )


class Running:
    """A collector on free ports."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.ports_file = folder / "ports.json"
        self.log = folder / "collector.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    SCRIPT,
                    "run",
                    "--ingest-address=127.0.0.1:0",
                    "--http-address=127.0.0.1:0",
                    f"--ports-file={self.ports_file}",
                    *arguments,
                ],
                stderr=log,
                env=ENV,
                start_new_session=True,
            )
        self.ports: dict[str, int] = wait_for(self._ports, 30, "the ports file")
        self.url = f"http://127.0.0.1:{self.ports['http']}"

    def _ports(self) -> Any:
        assert self.process.poll() is None, self.log.read_text()
        return json.loads(self.ports_file.read_text()) if self.ports_file.exists() else None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path)
    yield found
    found.stop()


def test_help_tells_a_newcomer_what_to_do() -> None:
    done = command("--help")
    assert done.returncode == 0
    for part in ("top", "0.0.0.0:4319", "/metrics", "lanterne-agent", "TOML"):
        assert part in done.stdout
    *lines, sample = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert Path(sample).is_file()
    assert "--ports-file" in command("run", "--help").stdout
    assert "--interval" in command("top", "--help").stdout
    for arguments in (["--version"], ["run", "--version"]):
        assert command(*arguments).stdout.startswith("lanterne-collector 0.")


def test_settings_are_checked_without_starting(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[http]\nthreads = 2\n")
    done = command("--config", str(path), "--check-config")
    assert (done.returncode, done.stdout) == (0, f"{path} is valid\n")
    path.write_text("[http]\nthreads = 200\n")
    for arguments, env in (
        (["--config", str(path)], {}),
        ([], {"LANTERNE_COLLECTOR_CONFIG": str(path)}),
    ):
        done = command(*arguments, **env)
        assert done.returncode == 2
        assert done.stderr == (
            f"lanterne-collector: {path}: http.threads = 200 is not allowed; it must be "
            "a whole number from 1 to 64\n"
        )
    assert command("--no-such-flag").returncode == 2
    assert command("top", "--interval", "0").returncode == 2
    assert command("top", "--address", "ftp://x").returncode == 2


@pytest.mark.parametrize("flag", ["--http-address", "--ingest-address"])
def test_a_port_in_use_ends_with_the_address_and_the_remedy(running: Running, flag: str) -> None:
    taken = running.ports["http" if flag == "--http-address" else "ingest"]
    other = "--ingest-address" if flag == "--http-address" else "--http-address"
    done = command(flag, f"127.0.0.1:{taken}", other, "127.0.0.1:0")
    assert done.returncode == 1
    assert f"127.0.0.1:{taken}" in done.stderr
    assert flag in done.stderr
    assert "Traceback" not in done.stderr


def test_a_ports_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    wanted = tmp_path / "no" / "ports.json"
    free = ["--ingest-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    done = command(*free, f"--ports-file={wanted}")
    assert done.returncode == 1
    assert f"--ports-file {wanted}: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_idle_collector_is_ready_and_says_that_no_agent_reports(running: Running) -> None:
    wait_for(lambda: try_fetch(f"{running.url}/readyz"), 20, "readiness")
    assert json.loads(fetch(f"{running.url}/readyz"))["ready"] is True
    shown = json.loads(fetch(f"{running.url}/api/v1/stragglers"))
    assert shown["messages"][0]["kind"] == "empty"
    assert "lanterne_collector_info" in fetch(f"{running.url}/metrics")
    log = running.log.read_text()
    assert f"127.0.0.1:{running.ports['ingest']}" in log
    assert f"{running.url}/metrics" in log


def test_fed_it_names_the_slow_rank_everywhere_and_stops_in_order(running: Running) -> None:
    def named() -> Any:
        rows = json.loads(fetch(f"{running.url}/api/v1/stragglers?named=1"))["rows"]
        return rows or None

    with Feeder(f"127.0.0.1:{running.ports['ingest']}", history=5) as feeder:
        (row,) = wait_for(named, 60, "a named rank")
        assert (row["rank"], row["workload"], row["evidence"]) == (SLOW, "fed", "blocking")
        assert row["waiting"] == 7
        done = command("top", "--once", "--address", running.url)
        assert done.returncode == 0
        assert f"rank {SLOW} (fed0" in done.stdout
        assert "holds up" in done.stdout
        assert feeder.acks
        assert {ack.status for ack in feeder.acks} == {1}
        before = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - before < 20
    log = running.log.read_text()
    assert "Traceback" not in log
    order = [log.index(part) for part in ("no longer listening", "analysis ended", "stopped")]
    assert order == sorted(order)
    assert not running.ports_file.exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_ends_it_cleanly(running: Running, how: signal.Signals) -> None:
    assert running.stop(how) == 0
    assert "Traceback" not in running.log.read_text()
