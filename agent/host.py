"""Host context of a rank's process: CPU, run queue, memory, pressure, whether it may run at all.

Reading (IO) and parsing (pure) are apart. What a kernel, a cgroup version or a missing permission
does not give is None; a process that has ended is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import psutil

from lanterne.agent.process import Processes, content, printable

COMMAND_LIMIT = 64
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
NANOSECONDS = 1_000_000_000

Content = Callable[[str], bytes | None]


@dataclass(frozen=True)
class ProcessReading:
    """The fields of the wire's Process message that the host gives; None: could not be read."""

    pid: int
    start_ticks: int
    command: str
    cpu_seconds: float | None = None
    run_queue_seconds: float | None = None
    rss_bytes: int | None = None
    memory_pressure_ratio: float | None = None
    cpu_pressure_ratio: float | None = None
    stopped: bool | None = None  # a signal, a debugger or a frozen cgroup holds it


def parse_run_queue_seconds(schedstat: bytes) -> float | None:
    """Second field of /proc/PID/schedstat, ns waited for a CPU; None where schedstats are off."""
    fields = schedstat.split()
    if len(fields) < 2 or not fields[1].isdigit():
        return None
    return int(fields[1]) / NANOSECONDS


def parse_pressure(text: bytes) -> float | None:
    """`some avg10` of a PSI file as a ratio: the share of the last 10 s in which a task waited."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [b"some"]:
            for word in words[1:]:
                if word.startswith(b"avg10="):
                    try:
                        return float(word[6:]) / 100
                    except ValueError:
                        return None
    return None


def parse_cgroup(text: bytes) -> PurePosixPath | None:
    """The version 2 path of /proc/PID/cgroup, without its leading slash.

    None in a version 1 hierarchy, and for a path above the reader's own cgroup namespace ("..").
    """
    for line in text.splitlines():
        if line.startswith(b"0::/"):
            path = PurePosixPath(line[4:].decode(errors="surrogateescape"))
            return None if ".." in path.parts else path
    return None


def parse_frozen(text: bytes) -> bool:
    """cgroup.events, which also tells of a freeze of a group above. Frozen tasks look asleep."""
    return b"frozen 1" in text.splitlines()


class HostReader:
    """Reads processes below `proc`; `cgroups` is where the version 2 hierarchy is mounted."""

    def __init__(
        self, proc: Path = Path("/proc"), *, cgroups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._processes = Processes(proc)
        # psutil's one way to look at a /proc mounted elsewhere is process-wide.
        psutil.PROCFS_PATH = str(proc)

    def read(self, pids: Iterable[int]) -> dict[int, ProcessReading]:
        """Readings by pid. A cgroup's file that ranks share is read once."""
        shared = cache(content)
        readings = {}
        for pid in pids:
            reading = self._process(pid, shared)
            if reading is not None:
                readings[pid] = reading
        return readings

    def _process(self, pid: int, shared: Content) -> ProcessReading | None:
        folder = f"{self._proc}/{pid}"
        start_ticks = self._processes.start_ticks(pid)
        if start_ticks is None:
            return None
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                command = process.name()
                times = process.cpu_times()
                memory = process.memory_info()
                stopped = process.status() in STOPPED
        except (psutil.Error, OSError):
            return None  # ended between two reads
        # The main thread's: it is the one that enqueues, and the sum over threads would shrink
        # whenever one ends.
        schedstat = content(f"{folder}/schedstat")
        cgroup = parse_cgroup(content(f"{folder}/cgroup") or b"")
        return ProcessReading(
            pid=pid,
            start_ticks=start_ticks,
            command=printable(command, COMMAND_LIMIT),
            cpu_seconds=times.user + times.system,
            run_queue_seconds=parse_run_queue_seconds(schedstat or b""),
            rss_bytes=memory.rss,
            memory_pressure_ratio=self._pressure(cgroup, "memory", shared),
            cpu_pressure_ratio=self._pressure(cgroup, "cpu", shared),
            stopped=stopped or self._frozen(cgroup, shared),
        )

    def _pressure(
        self, cgroup: PurePosixPath | None, resource: str, shared: Content
    ) -> float | None:
        """Of the process's own cgroup, else of the host, else None (kernels without PSI)."""
        files = [f"{self._proc}/pressure/{resource}"]
        # The root cgroup has no pressure files of its own: the host's stand for it.
        if cgroup is not None and cgroup.parts:
            files.insert(0, f"{self._cgroups}/{cgroup}/{resource}.pressure")
        for file in files:
            ratio = parse_pressure(shared(file) or b"")
            if ratio is not None:
                return ratio
        return None

    def _frozen(self, cgroup: PurePosixPath | None, shared: Content) -> bool:
        if cgroup is None or not cgroup.parts:
            return False
        return parse_frozen(shared(f"{self._cgroups}/{cgroup}/cgroup.events") or b"")
