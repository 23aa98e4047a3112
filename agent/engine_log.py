"""Balancedness of the EP ranks from the log lines of vLLM and SGLang.

vLLM (--eplb-config '{"log_balancedness": true}'), EP rank 0:
  EPLB step: 7 for model m: avg_tokens=12.50, max_tokens=40, balancedness=0.3125, ...
SGLang: [Expert Balancedness] forward_pass_id=7 current_pass_balancedness=0.31 ...
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from lanterne.agent.expert_wire import Reading

READ_BYTES = 256 << 10  # of one look; what is older is skipped
MAX_LINE = 4096

_VLLM = re.compile(
    rb"EPLB step: \d+ for model (?P<model>\S{1,128}?):? .*?avg_tokens=(?P<avg>[0-9.]+),"
    rb" max_tokens=(?P<max>[0-9.]+), balancedness=(?P<balance>[0-9.]+)"
)
_SGLANG = re.compile(rb"\[Expert Balancedness\] .*?current_pass_balancedness=(?P<balance>[0-9.]+)")


def parse(data: bytes) -> dict[str, float]:
    """Values of an EngineReading from the newest of the lines; {} where none tells."""
    for line in reversed(data.split(b"\n")):
        line = line[:MAX_LINE]
        for pattern in (_VLLM, _SGLANG):
            match = pattern.search(line)
            if match is None:
                continue
            try:
                groups = match.groupdict()
                values = {"balancedness": float(groups["balance"])}
                if "avg" in groups:
                    values |= {"tokens_avg": float(groups["avg"])}
                    values |= {"tokens_max": float(groups["max"])}
            except ValueError:
                continue
            if 0 <= values["balancedness"] <= 1:
                return values
    return {}


class LogTail:
    """New whole lines of a file that grows, and may be rotated or cut short."""

    def __init__(self, path: Path) -> None:
        """What is in the file already is old, and skipped."""
        self._path = path
        self._rest = b""
        self._at, self._inode = 0, -1
        try:
            status = path.stat()
            self._at, self._inode = status.st_size, status.st_ino
        except OSError:
            pass

    def read(self) -> bytes:
        """At most READ_BYTES of whole lines, the newest. Raises OSError."""
        # Never a pipe or device: opening or reading one could hang.
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self._path} is no regular file")
            if status.st_ino != self._inode or status.st_size < self._at:
                self._inode, self._at, self._rest = status.st_ino, 0, b""
            if status.st_size - self._at > READ_BYTES:
                self._at, self._rest = status.st_size - READ_BYTES, b""
            data = os.pread(fd, READ_BYTES, self._at)
        finally:
            os.close(fd)
        self._at += len(data)
        lines, newline, rest = (self._rest + data).rpartition(b"\n")
        self._rest = rest[-MAX_LINE:]
        return lines + newline


class EngineLog:
    """The newest balancedness of one log file."""

    def __init__(self, path: Path, workload: str, engine: str) -> None:
        self._tail = LogTail(path)
        self._path, self._workload, self._engine = path, workload, engine

    def poll(self) -> Reading | None:
        """What was told since the last look. Raises OSError."""
        values = parse(self._tail.read())
        if not values:
            return None
        return Reading(self._workload, self._engine, str(self._path)[:256], values)
