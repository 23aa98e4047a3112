"""Readings of the processes and GPUs behind a communicator's ranks, over a window.

Readings stay encoded until they are asked for, so only communicators with a suspect are looked at,
and of large ones only some peers. Shares need the reading of a window before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.attribution import Witness
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.throttle import throttled
from lanterne.collector.batch import Head
from lanterne.collector.readings import Gpu

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

PEERS = 63  # of a large communicator, beside the suspects

Processes = Mapping[int, Mapping[str, object]]  # proto Process's fields by pid


class Witnesses:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._then: list[Head] = []  # of each node, as the window before ended
        self._now: list[Head] = []
        self._decoded: dict[tuple[int, bool], Processes] = {}
        self._gpus: dict[int, dict[int, Gpu]] = {}

    def begin(self) -> None:
        """Before the communicators of a closed window are asked for."""
        self._then, self._now = self._now, [node.head for node in self._registry.nodes]
        self._decoded, self._gpus = {}, {}

    def of(self, base: int, ranks: int, suspects: I64, span_ns: float, load: F64 | None) -> Witness:
        """Of a communicator; ranks that are not looked at are NaN."""
        looked = np.unique(np.concatenate([suspects, np.arange(min(ranks, PEERS))]))
        synced, starved, cpu = np.full((3, ranks), math.nan)
        gpus: list[Gpu | None] = [None] * ranks
        for rank in looked.tolist():
            node = int(self._registry.node[base + rank])
            if node < 0:
                continue
            pid = int(self._registry.process_pid[self._registry.process[base + rank]])
            gpus[rank] = self._cards(node).get(int(self._registry.gpu_index[base + rank]))
            synced[rank], starved[rank], cpu[rank] = self._shares(node, pid)
        throttle = [""] * ranks
        for rank in suspects.tolist():
            throttle[rank] = throttled(gpus[rank], gpus[:rank] + gpus[rank + 1 :])
        return Witness(
            synced=synced,
            starved=starved,
            cpu=cpu,
            span_ns=span_ns,
            has_gpu=any(g is not None for g in gpus) or bool(np.nansum(synced) > 0),
            throttle=throttle,
            load=load,
        )

    def _cards(self, node: int) -> dict[int, Gpu]:
        found = self._gpus.get(node)
        if found is None:
            found = self._gpus[node] = {g.index: g for g in self._now[node].gpus}
        return found

    def _processes(self, node: int, *, before: bool) -> Processes:
        found = self._decoded.get((node, before))
        if found is None:
            head = (self._then if before else self._now)[node]
            found = {int(str(p["pid"])): p for p in head.processes}
            self._decoded[node, before] = found
        return found

    def _shares(self, node: int, pid: int) -> Sequence[float]:
        """-> shares of the time since the last window: in synchronise calls, starved, on a CPU."""
        unknown = (math.nan, math.nan, math.nan)
        if node >= len(self._then):
            return unknown
        old, new = self._then[node], self._now[node]
        elapsed = (new.end_ns - old.end_ns) / 1e9
        then = self._processes(node, before=True).get(pid)
        now = self._processes(node, before=False).get(pid)
        if now is None or then is None or elapsed <= 0 or old.epoch != new.epoch:
            return unknown
        if now["pid_start_ticks"] != then["pid_start_ticks"]:
            return unknown
        found = []
        for name, unit in (("sync_ns", 1e9), ("run_queue_seconds", 1.0), ("cpu_seconds", 1.0)):
            a, b = then.get(name), now.get(name)
            known = isinstance(a, int | float) and isinstance(b, int | float) and b >= a
            found.append((b - a) / unit / elapsed if known else math.nan)  # type: ignore[operator]
        return found
