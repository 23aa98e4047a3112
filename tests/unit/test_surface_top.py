"""`top` against a real HTTP server: once, piped, in a terminal of 80 by 24, with none there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rich.console import Console

from lanterne.collector.export import Exposition
from lanterne.collector.http import App
from lanterne.collector.http_server import HttpServer
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.top import FetchError, base_url, fetch, top
from tests.fixtures.snapshots import blind, large, snapshot


@dataclass
class Site:
    latest: Snapshot | None = None
    address: str = ""


def serve(site: Site, port: int = 0) -> HttpServer:
    page = Exposition(lambda: site.latest, lambda: Runtime("0.1.0", 0, 0))
    app = App(latest=lambda: site.latest, metrics=page.page, ready=dict)
    server = HttpServer(app, "127.0.0.1", port, timeout=2)
    site.address = f"127.0.0.1:{server.port}"
    server.start()
    return server


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site(snapshot(taken_at=time.time()))
    server = serve(found)
    yield found
    server.stop()


@pytest.fixture
def nowhere() -> str:
    found = Site()
    serve(found).stop()
    return found.address


def once(address: str) -> tuple[int, str]:
    console = Console(width=80, color_system=None)
    with console.capture() as out:
        status = top(address, once=True, interval=1, console=console)
    return status, out.get()


def test_once_prints_the_table(site: Site) -> None:
    status, text = once(site.address)
    assert status == 0
    assert "holds up ep-8 of demo: slow_compute" in text
    assert max(map(len, text.splitlines())) <= 80


def test_addresses_may_be_urls(site: Site) -> None:
    assert fetch(f"http://{site.address}/").rows[0].rank == 5
    assert base_url("https://collector:9478/") == "https://collector:9478"
    with pytest.raises(FetchError, match="file:///etc"):
        base_url("file:///etc")


def test_a_blind_job_is_explained(site: Site) -> None:
    site.latest = blind("no device times are reported")
    assert "Waits unknown for demo/ep-8: no device times are reported" in once(site.address)[1]


def test_a_collector_that_is_down_gives_the_remedy(nowhere: str) -> None:
    status, text = once(nowhere)
    assert status == 1
    flat = " ".join(text.split())
    assert f"No collector answers at http://{nowhere}" in flat
    assert "--address HOST:PORT" in flat


def test_a_collector_that_just_starts_says_so(site: Site) -> None:
    site.latest = None
    status, text = once(site.address)
    assert status == 1
    assert "no snapshot yet" in " ".join(text.split())


def test_something_else_at_that_address_is_told(site: Site) -> None:
    with pytest.raises(FetchError, match="answered 404"):
        fetch(f"{site.address}/elsewhere")
    with pytest.raises(FetchError, match="no Lanterne collector of this version"):
        fetch(f"{site.address}/metrics?")


CODE = "import sys; from lanterne.collector.top import top; sys.exit(top(sys.argv[1], once=False, interval=0.1))"  # noqa: E501


class Terminal:
    """A child in a pseudo-terminal of 80 by 24."""

    def __init__(self, address: str) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, address],
            stdin=child, stdout=child, stderr=child,
            env=env | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(child)
        self.seen = ""

    def until(self, text: str) -> str:
        """All output up to `text`, without colours."""
        end = time.monotonic() + 30
        plain = ""
        while time.monotonic() < end:
            plain = re.sub(r"\x1b\[[0-9;]*m", "", self.seen)
            if text in plain:
                return plain
            self.read()
        raise AssertionError(f"{text!r} not in {plain[-3000:]!r}")

    def read(self) -> bool:
        try:
            data = os.read(self.fd, 65_536)
        except OSError:  # EIO: the child has gone
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def interrupt(self) -> int:
        os.write(self.fd, b"\x03")
        while self.read():
            pass
        os.close(self.fd)
        return self.process.wait(20)


def test_the_live_table_in_a_terminal_and_ctrl_c(site: Site) -> None:
    site.latest = large(64)
    terminal = Terminal(site.address)
    plain = terminal.until("EVIDENCE")
    assert "holds up ep-64 of demo" in " ".join(plain.split())
    site.latest = blind("no device times")
    terminal.until("no device times")
    assert terminal.interrupt() == 0
    assert "\x1b[?1049h" in terminal.seen  # the terminal's other screen, and back
    assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h")
    assert "\x1b[?25h" in terminal.seen[terminal.seen.rindex("no device") :]  # cursor shown again
    assert "Traceback" not in terminal.seen


def test_live_it_waits_for_a_collector_that_is_down(nowhere: str) -> None:
    terminal = Terminal(nowhere)
    terminal.until("Trying again")
    found = Site(snapshot(taken_at=time.time()))
    server = serve(found, int(nowhere.rpartition(":")[2]))
    try:
        terminal.until("slow_compute")
    finally:
        server.stop()
    assert terminal.interrupt() == 0


def test_into_a_pipe_it_prints_plain_text_and_stops_on_a_signal(site: Site) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", CODE, site.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(30)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors == ""
    text = "".join(lines)
    assert text.count("holds up ep-8") >= 2
    assert "\x1b" not in text
