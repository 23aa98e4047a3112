"""The probes' own counters of a running agent, held open so that they can be read after its death.

The counters live in a BPF map. Whoever holds a descriptor of the map keeps it; the programs go with
the agent, so that after a kill the numbers are final: what the kernel had taken note of by then.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from pathlib import Path
from types import TracebackType

import numpy as np

from lanterne.agent import bpf
from lanterne.probes.layout import COUNTERS
from tests.proc import each

PIDFD_GETFD = 438  # the same number on every architecture
PERCPU_ARRAY, ENTRIES = 6, 32  # probes/bpf/state.bpf.c: counters

_libc = ctypes.CDLL(None, use_errno=True)


class KernelCounts:
    """Of one agent run. A context manager, or `close` it."""

    def __init__(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        try:
            self._fd: int = _libc.syscall(PIDFD_GETFD, pidfd, _counters_fd(pid), 0)
        finally:
            os.close(pidfd)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        last = Path("/sys/devices/system/cpu/possible").read_text().strip().split("-")[-1]
        self._cpus = int(last.rpartition(",")[2]) + 1

    def read(self) -> dict[str, int]:
        """layout.COUNTERS, summed over CPUs."""
        found = {}
        for index, name in enumerate(COUNTERS):
            value = bpf.lookup(self._fd, struct.pack("<I", index), 8 * self._cpus)
            found[name] = int(np.frombuffer(value or b"", np.uint64).sum())
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> KernelCounts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _counters_fd(pid: int) -> int:
    wanted = {"map_type": PERCPU_ARRAY, "max_entries": ENTRIES, "value_size": 8}
    for fd, info in each(Path(f"/proc/{pid}/fdinfo")):
        fields = dict(re.findall(r"^(\w+):\s*(\d+)$", info, re.MULTILINE))
        if all(fields.get(name) == str(value) for name, value in wanted.items()):
            return int(fd)
    raise LookupError(f"process {pid} holds no map like the probes' counters: is it an agent?")
