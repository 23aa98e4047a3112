"""What can be read about another process: start time, environment, memory. `proc` is a parameter.

Everything read here was written by somebody else: sizes are bounded, texts made printable. A
process may end between two reads, so every function returns None (or nothing) instead of raising.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MAX_ENVIRON_BYTES = 1 << 18
MAX_FILE_BYTES = 1 << 16
MAX_TEXT = 128


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters; control characters and what is not text become '?'."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def content(path: str, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """At most so much of a file; None where it cannot be read: ended, forbidden, or (PSI switched
    off) EOPNOTSUPP. Some are read every second of every process: opened as such, and by a plain
    name, they cost a third of what pathlib takes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):  # a name with a NUL in it
        return None
    parts: list[bytes] = []
    room = limit
    try:
        while room > 0 and (part := os.read(fd, min(room, 1 << 20))):
            parts.append(part)
            room -= len(part)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts)


class Processes:
    """Reads below one root, /proc unless a test says otherwise."""

    def __init__(self, proc: Path = Path("/proc")):
        self._proc = str(proc)

    def start_ticks(self, pid: int) -> int | None:
        """Field 22 of stat: with the pid it names a process for good."""
        fields = self._stat(pid)
        return int(fields[19]) if fields else None

    def session(self, pid: int) -> int:
        fields = self._stat(pid)
        return int(fields[3]) if fields else 0

    def _stat(self, pid: int) -> list[str] | None:
        data = content(f"{self._proc}/{pid}/stat")
        if data is None:
            return None
        text = data.decode("utf-8", "replace")
        fields = text.rpartition(")")[2].split()  # the command may contain anything, even ')'
        if len(fields) < 20 or not (fields[19].isdigit() and fields[3].lstrip("-").isdigit()):
            return None
        return fields

    def environ(self, pid: int) -> Mapping[str, str]:
        """The environment at exec; what a process sets for itself later is not there."""
        data = content(f"{self._proc}/{pid}/environ", MAX_ENVIRON_BYTES)
        if data is None:
            return {}
        found: dict[str, str] = {}
        for entry in data.split(b"\0"):
            name, equals, value = entry.partition(b"=")
            if equals and len(name) <= MAX_TEXT:
                found.setdefault(
                    name.decode("ascii", "replace"),
                    printable(value[: 4 * MAX_TEXT].decode("utf-8", "replace")),
                )
        return found

    def memory(self, pid: int, address: int, size: int) -> bytes | None:
        """`size` bytes at `address`, or None where that is not readable."""
        try:
            fd = os.open(f"{self._proc}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = os.pread(fd, size, address)
        except (OSError, OverflowError):  # unmapped; or an address no file offset can express
            return None
        finally:
            os.close(fd)
        return data if len(data) == size else None
