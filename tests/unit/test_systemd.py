"""What both programs tell the service manager, on real datagram sockets."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lanterne.collector.config import CollectorConfig
from lanterne.collector.main import Collector
from lanterne.service import systemd

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """-> what $NOTIFY_SOCKET says, and the manager's end."""
    path, abstract = str(tmp_path / "notify"), f"lanterne-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(path if request.param == "path" else "\0" + abstract)
        end.settimeout(10)
        yield (path if request.param == "path" else "@" + abstract), end


def received(end: socket.socket) -> list[str]:
    return end.recv(4096).decode().split("\n")


def nothing_more(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        end.recv(4096)
    except BlockingIOError:
        return True
    return False


def test_the_life_of_a_service(manager: tuple[str, socket.socket]) -> None:
    address, end = manager
    env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = systemd.Notifier(env)
    assert env == {}  # children are not the service
    notifier.ready("two\nlines\x00")
    assert received(end) == ["READY=1", "STATUS=two lines\x00"]
    notifier.status("working")
    assert received(end) == ["STATUS=working"]
    notifier.status("working")
    notifier.alive()
    assert received(end) == ["WATCHDOG=1"]
    notifier.alive()  # half of a minute has not passed
    with notifier.reloading():
        lines = received(end)
        assert lines[0] == "RELOADING=1"
        assert lines[1].removeprefix("MONOTONIC_USEC=").isdigit()
    assert received(end) == ["READY=1"]
    notifier.stopping()
    assert received(end) == ["STOPPING=1"]
    assert nothing_more(end)


def test_a_watchdog_of_another_process_is_not_fed(manager: tuple[str, socket.socket]) -> None:
    address, end = manager
    for pid, usec in (("1", "1000000"), ("", ""), (str(os.getpid()), "often")):
        notifier = systemd.Notifier(
            {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
        )
        notifier.alive()
    assert nothing_more(end)


def test_a_stall_is_told_without_a_manager_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(systemd, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notifier = systemd.Notifier({})
    now[0] += 60
    assert notifier.stalled() == ""
    now[0] += 1
    assert notifier.stalled() == "no progress for 61 s"
    notifier.alive()
    assert notifier.stalled() == ""


def test_without_a_manager_nothing_happens(tmp_path: Path) -> None:
    for env in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        notifier = systemd.Notifier({**env, "WATCHDOG_USEC": "1"})
        notifier.ready("x")
        notifier.alive()
        notifier.stopping()


def test_the_collectors_watchdog_is_fed_by_the_analysis(
    manager: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, end = manager
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    collector = Collector(CollectorConfig())
    with monkeypatch.context() as broken:
        broken.setattr(collector._engine, "snapshot", lambda *_, **__: 1 / 0)
        collector._loop._take()
    assert collector._loop.errors == 1
    assert nothing_more(end)
    collector._loop._take()
    end.setblocking(True)
    assert received(end) == ["WATCHDOG=1"]
    assert received(end) == ["STATUS=0 nodes, 0 communicators"]


JOURNAL = """
import logging, os, sys
from lanterne.service import systemd
status = os.fstat(2)
stream = f"{{status.st_dev}}:{{status.st_ino + {off}}}"
logging.basicConfig(format="%(levelname)s %(message)s", level="DEBUG")
for _ in range(2):  # a second time changes nothing
    systemd.mark_priorities(logging.getLogger(), {{"JOURNAL_STREAM": stream}})
log = logging.getLogger()
log.debug("a"), log.info("b"), log.warning("c"), log.error("d\\nsecond"), log.critical("e")
"""


def test_lines_for_the_journal_carry_their_priority() -> None:
    def shown(off: int) -> list[str]:
        program = JOURNAL.format(off=off)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stderr.splitlines()

    assert shown(0) == ["<7>DEBUG a", "<6>INFO b", "<4>WARNING c", "<3>ERROR d", "<3>second",
                        "<3>CRITICAL e"]  # fmt: skip
    assert shown(1) == ["DEBUG a", "INFO b", "WARNING c", "ERROR d", "second", "CRITICAL e"]


def test_a_closed_stderr_is_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    systemd.mark_priorities(logging.Logger("none"), {"JOURNAL_STREAM": "1:2"})
