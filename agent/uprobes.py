"""The kernel side in one piece: programs, attached libraries, the two rings, and BPF's counters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lanterne.agent import attach, kernel, ring
from lanterne.agent.cuda import Use
from lanterne.agent.steps import Steps
from lanterne.probes.layout import COMM_EVENT, DEVICE, RECORD
from lanterne.probes.parcagpu import KERNEL

log = logging.getLogger(__name__)

LOST_PREFIX = "lost_"


class ProbeSettings(Protocol):
    """Of agent.config's section [probes]."""

    @property
    def ring_bytes(self) -> int: ...
    @property
    def comm_ring_bytes(self) -> int: ...
    @property
    def device_ring_bytes(self) -> int: ...
    @property
    def kernel_ring_bytes(self) -> int: ...
    @property
    def interpreter(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def include(self) -> tuple[str, ...]: ...
    @property
    def exclude(self) -> tuple[str, ...]: ...
    @property
    def look_into(self) -> tuple[str, ...]: ...


class Uprobes:
    """Owns everything it opens; raises AgentError or OSError where it cannot work."""

    def __init__(self, settings: ProbeSettings, proc: Path) -> None:
        self._proc = proc
        self.programs = kernel.load(
            ring_bytes=settings.ring_bytes,
            comm_ring_bytes=settings.comm_ring_bytes,
            device_ring_bytes=settings.device_ring_bytes,
            kernel_ring_bytes=settings.kernel_ring_bytes,
            interpreter=settings.interpreter,
            method=settings.method,
        )
        self.attacher = attach.Attacher(
            self.programs,
            proc=proc,
            include=settings.include,
            exclude=settings.exclude,
            look_into=settings.look_into,
        )
        self.records = ring.Ring(self.programs.ring_fd, self.programs.ring_bytes, RECORD)
        self.comm_events = ring.Ring(
            self.programs.comm_ring_fd, self.programs.comm_ring_bytes, COMM_EVENT
        )
        self.device = ring.Ring(
            self.programs.device_ring_fd, self.programs.device_ring_bytes, DEVICE
        )
        self.kernels = ring.Ring(
            self.programs.kernel_ring_fd, self.programs.kernel_ring_bytes, KERNEL
        )
        self.capacity = self.programs.ring_bytes // (RECORD.itemsize + 8)
        self.counters: dict[str, int] = {}
        self.cuda: dict[int, Use] = {}
        self.steps = Steps()

    def libraries_of(self, pid: int) -> list[Any]:
        """Of one process, what identification needs to know of its libraries."""
        process = self.attacher.processes.get(pid)
        if process is None:
            return []
        known = self.attacher.libraries
        return [known[key] for key in process.libraries if key in known]

    def plugins_since(self) -> int:
        """CLOCK_MONOTONIC ns since when every profiler plugin is probed; 0: none is."""
        return self._since("profiler")

    def kernels_since(self) -> int:
        """Likewise of parcagpu and libcuda, by which it is checked."""
        told, checked = self._since("parcagpu"), self._since("cuda")
        return max(told, checked) if told and checked else 0

    def kernel_name(self, key: int) -> str | None:
        return self.programs.kernel_name(key)

    def told(self, tgids: Iterable[int]) -> dict[int, np.void]:
        """parcagpu.TOLD rows of processes that parcagpu has told of."""
        return self.programs.told(tgids)

    def _since(self, kind: str) -> int:
        libraries = self.attacher.libraries.values()
        return max((one.since_ns for one in libraries if one.kind == kind), default=0)

    @property
    def news(self) -> bool:
        """Whether there is something to read about communicators."""
        return self.comm_events.waiting > 0

    @property
    def filled(self) -> float:
        """Share of the fullest ring that waits to be read; unlike a drain it costs nothing."""
        programs = self.programs
        return max(
            self.records.waiting / programs.ring_bytes,
            self.device.waiting / programs.device_ring_bytes,
            self.kernels.waiting / programs.kernel_ring_bytes,
        )

    def read_kernel(self) -> None:
        """The counters as of now; raises AgentError or OSError."""
        self.counters = self.programs.counters()
        self.cuda = self.programs.cuda(self._proc)

    def count_steps(self, holders: Mapping[int, bool], told: Collection[int]) -> None:
        """After `read_kernel`; the arguments are those of `Steps.update`."""
        self.steps.update(self.cuda, self.programs.cuda_ended(), holders, told)

    def steps_of(self) -> dict[int, tuple[int, int]]:
        """pid -> (steps, blind steps)."""
        return {pid: self.steps.of(pid) for pid in self.cuda}

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
        for part in (self.records, self.comm_events, self.device, self.kernels, self.programs):
            part.close()
