"""GPU time of each process by stage of a layer, and what share of the time it does nothing useful.

Waits are not in the kernels' columns: a collective's kernel spins until the last rank has come.
They are known from the alignment, as a share of the process's time in collectives on device
evidence. That share is taken off the time in which it ran nothing but collectives. How a wait is
spread where collectives run beside compute is not known, so then there is no bubble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.window import Window
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.snapshot import STAGES, StageView

if TYPE_CHECKING:
    from lanterne.collector.analyse.figures import Figures

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
NS = 1e9

CODES = 10
EXPERT_GEMM, DISPATCH, COMBINE, COLLECTIVE, COMPUTE, ALL = 4, 5, 6, 7, 8, 9
COUNT, SUM, UNION, SPAN = range(4)
MAX_DEVICES = 64  # of one process
HIDDEN = 0.02  # of the time: collectives that run beside compute, at most
AGREES = (0.8, 1.25)  # collectives as aligned over the same as their kernels


@dataclass
class Sums:
    """Of one process and device: [stage, (count, sum, union, span)], ns."""

    total: I64 = field(default_factory=lambda: np.zeros((CODES, 4), np.int64))
    current: I64 = field(default_factory=lambda: np.zeros((CODES, 4), np.int64))
    closed: I64 = field(default_factory=lambda: np.zeros((CODES, 4), np.int64))
    whole: list[bool] = field(default_factory=lambda: [True, True])  # closed, current


class Stages:
    """By process number of the registry; bounded by it."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Sums]] = {}
        # Per process: ns of waits and of transfers, totals at the ends of the last two windows.
        self._marks: dict[int, tuple[tuple[float, float], tuple[float, float]]] = {}
        self.unknown = 0  # rows of processes that hold no communicator that is known

    def add(self, batch: DecodedBatch, registry: Registry) -> None:
        stages = batch.stages
        if not len(stages):
            return
        pid, device = stages.words.astype(np.int64)
        stage, whole = stages.small
        ticks = stages.large[0]
        keys = np.stack([pid, ticks, device], axis=1)
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        for i, (of, since, number) in enumerate(distinct.tolist()):
            rows = np.flatnonzero(inverse == i)
            process = registry.process_number(batch.node, of, since)
            devices = self._of.setdefault(process, {}) if process >= 0 else {}
            if process < 0 or (number not in devices and len(devices) >= MAX_DEVICES):
                self.unknown += len(rows)
                continue
            sums = devices.setdefault(number, Sums())
            values = stages.large[1:, rows].T
            for into in (sums.total, sums.current):
                np.add.at(into, stage[rows], values)
            sums.whole[1] &= bool(whole[rows].all())

    def forget(self, processes: list[int]) -> None:
        """Numbers that are used for other processes now."""
        for process in processes:
            self._of.pop(process, None)
            self._marks.pop(process, None)

    def close(self, window: Window, registry: Registry) -> None:
        """A window has ended."""
        if not self._of:
            return
        now = _collectives(window, registry, np.array(list(self._of), np.int64))
        for process, devices in self._of.items():
            for sums in devices.values():
                sums.closed, sums.current = sums.current, np.zeros((CODES, 4), np.int64)
                sums.whole = [sums.whole[1], True]
            # A first window begins where the process was first told of, which is not known here.
            before = self._marks.get(process, (now[process], now[process]))
            self._marks[process] = (before[1], now[process])

    def views(self, f: Figures, window: Window, registry: Registry) -> tuple[StageView, ...]:
        if not self._of:
            return ()
        processes = np.array(list(self._of), np.int64)
        now = _collectives(window, registry, processes)
        largest = _largest(f, registry, set(processes.tolist()))
        found = []
        for process in sorted(self._of):
            row = largest.get(process)
            if row is None:
                continue
            marks = self._marks.get(process, (now[process], now[process]))
            wait, transfer = (b - a for a, b in zip(marks[0], now[process], strict=True))
            devices = self._of[process]
            for device, sums in sorted(devices.items()):
                alone = len(devices) == 1
                found.append(_view(f, registry, row, process, device, sums, alone, wait, transfer))
        return tuple(found)


def _collectives(
    window: Window, registry: Registry, processes: I64
) -> dict[int, tuple[float, float]]:
    """ns that each process has waited in collectives and has transferred, on durations."""
    used = registry.members_used
    of = registry.process[:used].astype(np.int64)
    mine = np.flatnonzero(np.isin(of, processes))
    size = int(processes.max()) + 1
    waits = window.wait_total[ops.DEVICE, mine]
    wait = np.bincount(of[mine], waits, size)
    transfer = np.bincount(of[mine], np.nan_to_num(window.comm_total[mine]), size)
    return {p: (float(wait[p]), float(transfer[p])) for p in processes.tolist()}


def _largest(f: Figures, registry: Registry, processes: set[int]) -> dict[int, int]:
    """Of each process: row of the figures that is its rank in its largest communicator."""
    of = registry.process[f.member]
    sizes = np.array([slot.ranks for _, slot in f.live], np.int64)[f.comm] if len(f.live) else of
    found: dict[int, int] = {}
    for row in np.flatnonzero(np.isin(of, np.array(list(processes)))).tolist():
        process = int(of[row])
        if process not in found or sizes[row] > sizes[found[process]]:
            found[process] = row
    return found


def _view(
    f: Figures, registry: Registry, row: int, process: int, device: int, sums: Sums, alone: bool,
    wait: float, transfer: float,
) -> StageView:  # fmt: skip
    member = int(f.member[row])
    # Which of several GPUs a number of the process means is not known.
    gpu = int(registry.gpu_index[member]) if alone else -1
    recent = sums.closed + sums.current
    whole = all(sums.whole) and bool(recent[ALL, COUNT])
    bubble, ratio = measures(recent, wait, transfer) if whole else (math.nan, math.nan)
    shown = [(code, name) for code, name in enumerate(STAGES) if sums.total[code, COUNT]]
    total = sums.total
    return StageView(
        workload=f.live[int(f.comm[row])][1].workload,
        rank=int(f.rank[row]),
        node=int(registry.node[member]),
        pid=int(registry.process_pid[process]),
        device=device,
        gpu=str(gpu) if gpu >= 0 else "",
        whole=whole,
        count={name: int(total[code, COUNT]) for code, name in shown},
        sum_seconds={name: float(total[code, SUM]) / NS for code, name in shown},
        busy_seconds={name: float(total[code, UNION]) / NS for code, name in shown},
        span_seconds=float(total[ALL, SPAN]) / NS,
        bubble=bubble,
        comm_compute=ratio,
    )


def measures(sums: I64, wait: float, transfer: float) -> tuple[float, float]:
    """-> (bubble, comm/comp) of [stage, (count, sum, union, span)]; NaN where it cannot be known.

    wait, transfer: ns in collectives, by alignment, about the same span."""
    span, busy = float(sums[ALL, SPAN]), float(sums[ALL, UNION])
    compute = float(sums[COMPUTE, UNION])
    together = float(sums[[DISPATCH, COMBINE, COLLECTIVE], SUM].sum())
    share = 0.0
    if together:
        aligned = (wait + transfer) / together
        share = wait / (wait + transfer) if AGREES[0] <= aligned <= AGREES[1] else math.nan
    exposed = busy - compute
    hidden = together - exposed
    useful = compute + exposed * (1 - share)
    bubble = math.nan
    if span > 0 and hidden <= HIDDEN * span:
        bubble = min(max(1 - useful / span, 0.0), 1.0) if not math.isnan(useful) else math.nan
    experts = float(sums[EXPERT_GEMM, SUM])
    exchange = float(sums[[DISPATCH, COMBINE], SUM].sum())
    ratio = exchange * (1 - share) / experts if experts and exchange else math.nan
    return bubble, ratio
