"""Where each process belongs: pod and container, Slurm job, unit, GPU, and its workload's name.

Joins what /proc/PID/cgroup, the job's environment, Kubernetes and NVML say. Read once a process and
again now and then, since a launcher may move a process after it was met; what could not be learned
is "". Nothing here waits for the network.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lanterne.agent import cgroup, workload
from lanterne.agent.pod_list import Pod
from lanterne.agent.process import Processes, content

REREAD_SECONDS = 5.0
KEPT_SECONDS = 60.0  # after a process was last asked for: its communicators are told for a while
MAX_PROCESSES = 8192
_NUMBER = re.compile(r"[0-9]{1,10}")

Key = tuple[int, int]  # pid, start ticks


class PodSource(Protocol):
    """agent.kubernetes.Kubernetes."""

    def want(self, uids: Iterable[str]) -> None: ...
    def pod(self, uid: str) -> Pod | None: ...
    def devices(self, namespace: str, pod: str, container: str) -> tuple[str, ...]: ...
    @property
    def version(self) -> int: ...


class GpuNames(Protocol):
    """agent.nvml.GpuReading."""

    @property
    def uuid(self) -> str: ...
    @property
    def bus_id(self) -> str: ...
    @property
    def mig(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Place:
    """The fields of the wire's Process message of that name, and what a communicator takes."""

    pod: str = ""
    namespace: str = ""
    container: str = ""
    owner_kind: str = ""
    owner: str = ""
    slurm_job: str = ""
    slurm_step: str = ""
    unit: str = ""
    mig: str = ""  # UUID, where the container has this one instance only
    gpu_bus_id: str = ""  # where the container has this one GPU, or instances of it, only
    workload: str = ""


NOWHERE = Place()


@dataclass(slots=True)
class _Entry:
    environ: Mapping[str, str]
    ids: cgroup.Ids
    read_at: float
    asked_at: float
    made_of: object = None
    place: Place = NOWHERE


class Places:
    """Not thread-safe; `clock` in seconds."""

    def __init__(
        self,
        proc: Path,
        variables: Sequence[str],
        kubernetes: PodSource | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._processes = Processes(proc)
        self._variables = tuple(variables)
        self._kubernetes = kubernetes
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}

    def read(
        self,
        pids: Iterable[int],
        gpus: Sequence[GpuNames],
        started: Mapping[int, int] | None = None,
    ) -> dict[Key, Place]:
        """Of these processes, and of those that were asked for within the last minute.

        started: start ticks by pid, of those that somebody has just read.
        """
        now = self._clock()
        started = started or {}
        for pid in pids:
            ticks = started.get(pid) or self._processes.start_ticks(pid)
            if ticks is not None:
                self._look(pid, ticks, now)
        for key in [k for k, e in self._entries.items() if now - e.asked_at > KEPT_SECONDS]:
            del self._entries[key]
        known = self._kubernetes
        if known is not None:
            known.want({e.ids.pod for e in self._entries.values() if e.ids.pod})
        buses = _buses(gpus)
        state = (known.version if known is not None else 0, buses)
        for entry in self._entries.values():
            if entry.made_of != (entry.ids, state):
                entry.made_of = (entry.ids, state)
                entry.place = self._place(entry, buses)
        return {key: entry.place for key, entry in self._entries.items()}

    def _look(self, pid: int, ticks: int, now: float) -> None:
        entry = self._entries.get((pid, ticks))
        if entry is not None:
            entry.asked_at = now
            if now - entry.read_at < REREAD_SECONDS:
                return
            entry.read_at = now
        elif len(self._entries) >= MAX_PROCESSES:
            return
        ids = cgroup.parse(self._cgroup(pid))
        environ = self._processes.environ(pid) if entry is None else entry.environ
        if self._processes.start_ticks(pid) != ticks:
            return  # it ended, and what was read may be somebody else's
        if entry is None:
            self._entries[pid, ticks] = _Entry(environ, ids, now, now)
        else:
            entry.ids = ids

    def _cgroup(self, pid: int) -> bytes:
        return content(f"{self._proc}/{pid}/cgroup", cgroup.MAX_BYTES) or b""

    def _place(self, entry: _Entry, buses: Mapping[str, str]) -> Place:
        ids, environ = entry.ids, entry.environ
        pod = self._kubernetes.pod(ids.pod) if self._kubernetes and ids.pod else None
        container = pod.containers.get(ids.container, "") if pod else ""
        mig = bus_id = ""
        if self._kubernetes and pod and container:
            told = self._kubernetes.devices(pod.namespace, pod.name, container)
            mig = told[0] if len(told) == 1 and told[0].startswith("MIG-") else ""
            of = {buses.get(uuid, "") for uuid in told}
            bus_id = of.pop() if len(of) == 1 else ""
        # A job that no cgroup plugin of Slurm's keeps: its own word.
        told_job = environ.get("SLURM_JOB_ID", "")
        job = ids.slurm_job or (told_job if _NUMBER.fullmatch(told_job) else "")
        return Place(
            pod=pod.name if pod else "",
            namespace=pod.namespace if pod else "",
            container=container,
            owner_kind=pod.owner_kind if pod else "",
            owner=pod.owner if pod else "",
            slurm_job=job,
            slurm_step=ids.slurm_step,
            unit=ids.unit,
            mig=mig,
            gpu_bus_id=bus_id,
            workload=workload.choose(
                environ,
                self._variables,
                namespace=pod.namespace if pod else "",
                owner=pod.owner if pod else "",
                slurm_job=job,
                unit=ids.unit,
            ),
        )


def _buses(gpus: Sequence[GpuNames]) -> dict[str, str]:
    """UUID of a GPU or MIG instance -> bus id of the GPU."""
    return {uuid: gpu.bus_id for gpu in gpus if gpu.bus_id for uuid in (gpu.uuid, *gpu.mig) if uuid}
