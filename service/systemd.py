"""What the service manager is told, and lines as its journal wants them; without it, nothing.

The protocol is sd_notify(3): datagrams of KEY=value lines to the socket that $NOTIFY_SOCKET names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, MutableMapping

SEND_SECONDS = 1.0
STALLED_SECONDS = 60.0  # without progress; the unit's WatchdogSec
PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))  # syslog(3); else debug


class Notifier:
    """Takes its variables out of `env`: processes started later are not the service."""

    def __init__(self, env: MutableMapping[str, str] = os.environ) -> None:
        address = env.pop("NOTIFY_SOCKET", "")
        watchdog, pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        self._every = 0.0
        if watchdog.isdigit() and pid in ("", str(os.getpid())):
            self._every = int(watchdog) / 2e6  # sd_watchdog_enabled(3): at half of the time
        self._due = 0.0
        self._progress = time.monotonic()
        self._status = ""
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str = "") -> None:
        self._progress = time.monotonic()
        self._send("READY=1", *self._told(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent when it has changed."""
        if text != self._status:
            self._send(*self._told(text))

    def alive(self) -> None:
        """Call it where the work goes on, as often as you like: the watchdog bites otherwise."""
        self._progress = now = time.monotonic()
        if self._every and now >= self._due:
            self._due = now + self._every
            self._send("WATCHDOG=1")

    def stalled(self) -> str:
        """For /healthz, without a manager too: "" while `alive` is called, else since when not."""
        idle = time.monotonic() - self._progress
        return f"no progress for {idle:.0f} s" if idle > STALLED_SECONDS else ""

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _told(self, status: str) -> tuple[str, ...]:
        self._status = status
        return (f"STATUS={' '.join(status.split())}",) if status else ()

    def _send(self, *lines: str) -> None:
        if not lines or self._address[:1] not in ("/", "\0"):
            return
        # A manager that does not listen is no reason to stop working.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.settimeout(SEND_SECONDS)
            s.sendto("\n".join(lines).encode(), self._address)


class _Prioritised(logging.Formatter):
    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        number = next((n for level, n in PRIORITIES if record.levelno >= level), 7)
        # Each line is an entry of its own.
        return "\n".join(f"<{number}>{line}" for line in self._inner.format(record).split("\n"))


def mark_priorities(root: logging.Logger, env: MutableMapping[str, str] = os.environ) -> None:
    """Lines of the root logger's handlers begin with <priority> where stderr is the journal."""
    if not _is_journal(env.get("JOURNAL_STREAM", "")):
        return
    for handler in root.handlers:
        inner = handler.formatter or logging.Formatter()
        if not isinstance(inner, _Prioritised):
            handler.setFormatter(_Prioritised(inner))


def _is_journal(stream: str) -> bool:
    """`stream`: $JOURNAL_STREAM, DEVICE:INODE of what systemd connected."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"
