"""The kernel side in one piece: programs, attached libraries, the two rings, and BPF's counters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lanterne.agent import attach, kernel, ring
from lanterne.probes.layout import COMM_EVENT, DEVICE, RECORD

log = logging.getLogger(__name__)

LOST_PREFIX = "lost_"


class ProbeSettings(Protocol):
    """Of agent.config's section [probes]."""

    @property
    def ring_bytes(self) -> int: ...
    @property
    def comm_ring_bytes(self) -> int: ...
    @property
    def interpreter(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def include(self) -> tuple[str, ...]: ...
    @property
    def exclude(self) -> tuple[str, ...]: ...


class Uprobes:
    """Owns everything it opens; raises AgentError or OSError where it cannot work."""

    def __init__(self, settings: ProbeSettings, proc: Path) -> None:
        self._proc = proc
        self.programs = kernel.load(
            ring_bytes=settings.ring_bytes,
            comm_ring_bytes=settings.comm_ring_bytes,
            interpreter=settings.interpreter,
            method=settings.method,
        )
        self.attacher = attach.Attacher(
            self.programs, proc=proc, include=settings.include, exclude=settings.exclude
        )
        self.records = ring.Ring(self.programs.ring_fd, self.programs.ring_bytes, RECORD)
        self.comm_events = ring.Ring(
            self.programs.comm_ring_fd, self.programs.comm_ring_bytes, COMM_EVENT
        )
        self.device = ring.Ring(
            self.programs.device_ring_fd, self.programs.device_ring_bytes, DEVICE
        )
        self.capacity = self.programs.ring_bytes // (RECORD.itemsize + 8)
        self.counters: dict[str, int] = {}
        self.cuda: dict[int, np.void] = {}
        self.blind_launches = 0  # of graphs, by processes that have collectives in graphs
        self._blind: dict[int, int] = {}

    def libraries_of(self, pid: int) -> list[Any]:
        """Of one process, what identification needs to know of its libraries."""
        process = self.attacher.processes.get(pid)
        if process is None:
            return []
        known = self.attacher.libraries
        return [known[key] for key in process.libraries if key in known]

    def plugins_since(self) -> int:
        """CLOCK_MONOTONIC ns since when every profiler plugin is probed; 0: none is."""
        libraries = self.attacher.libraries.values()
        return max((one.since_ns for one in libraries if one.kind == "profiler"), default=0)

    @property
    def news(self) -> bool:
        """Whether there is something to read about communicators."""
        ring = self.comm_events
        return ring.submitted > ring.read + ring.discarded

    @property
    def filled(self) -> float:
        """Share of the fuller ring that waits to be read; costs next to nothing, unlike a drain."""
        ring, device = self.records, self.device
        waiting = (ring.submitted - ring.read - ring.discarded) / self.capacity
        room = self.programs.device_ring_bytes // (DEVICE.itemsize + 8)
        return max(waiting, (device.submitted - device.read - device.discarded) / room)

    def read_kernel(self) -> None:
        """The counters as of now; raises AgentError or OSError."""
        self.counters = self.programs.counters()
        self.cuda = self.programs.cuda(self._proc)
        for pid, row in self.cuda.items():
            if int(row["captured_ops"]):
                launches, before = int(row["graph_launches"]), self._blind.get(pid, 0)
                self.blind_launches += launches - before if launches >= before else launches
                self._blind[pid] = launches
        for pid in self._blind.keys() - self.cuda.keys():
            del self._blind[pid]

    def lost(self) -> dict[str, int]:
        """Records by cause of loss."""
        return {
            name.removeprefix(LOST_PREFIX): value
            for name, value in self.counters.items()
            if name.startswith(LOST_PREFIX)
        }

    def run_stats(self) -> tuple[int, int] | None:
        """(runs, nanoseconds) of our programs, where the kernel counts them."""
        return self.programs.run_stats(self._proc)

    def close(self) -> None:
        if not self.attacher.close():
            log.warning("some probes are left for the kernel to remove when this process ends")
        for part in (self.records, self.comm_events, self.device, self.programs):
            part.close()
