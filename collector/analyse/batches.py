"""Steps of many sizes -> the size from which on a larger batch no longer pays. Bounded.

The size of a step is what it dispatched: assignments where the engine tells them, else bytes. Steps
of within half a power of two of each other count as one size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import rules
from lanterne.collector.snapshot import StepView

F64 = npt.NDArray[np.float64]

KEPT = 64  # newest steps of each size
SIZES = 48
LEAST = 8  # steps of a size, before it counts
WORKLOADS = 64


@dataclass(frozen=True)
class Found:
    """Where it stops paying for one workload, and in which unit: "assignments" or "bytes"."""

    limit: rules.BatchLimit
    unit: str
    sizes: int  # that were seen often enough
    largest: float
    smallest: float


class Batches:
    """`add` the steps of every window; ask `of` a workload."""

    def __init__(self) -> None:
        # workload -> unit -> size class -> [k, 4] size, expert, exchange, size a second
        self._seen: dict[str, dict[str, dict[int, F64]]] = {}
        self._newest: dict[str, float] = {}

    def add(self, workload: str, view: StepView) -> None:
        """Take the steps that began after those of the last call."""
        if workload not in self._seen and len(self._seen) >= WORKLOADS:
            return
        start = np.asarray(view.steps["start"], np.float64)
        new = start > self._newest.get(workload, -np.inf)
        if not new.any():
            return
        self._newest[workload] = float(start.max())
        columns = {n: np.asarray(view.steps[n], np.float64)[new] for n in view.steps}
        told = columns["assignments"]
        unit = "assignments" if np.isfinite(told).all() else "bytes"
        size = told if unit == "assignments" else columns["size"]
        exchange = columns["dispatch"] + columns["combine"]
        busy = columns["span"] - np.nan_to_num(columns["idle"])
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = np.stack([size, columns["expert"], exchange, size / busy], axis=1)
        rows = rows[np.isfinite(rows).all(axis=1) & (rows > 0).all(axis=1)]
        classes = self._seen.setdefault(workload, {}).setdefault(unit, {})
        code = np.round(2 * np.log2(rows[:, 0])).astype(np.int64)
        for one in np.unique(code).tolist():
            if one not in classes and len(classes) >= SIZES:
                continue
            kept = classes.get(one, np.zeros((0, 4)))
            classes[one] = np.concatenate([kept, rows[code == one]])[-KEPT:]

    def forget(self, live: set[str]) -> None:
        """Keep only these workloads."""
        for workload in set(self._seen) - live:
            del self._seen[workload]
            self._newest.pop(workload, None)

    def of(self, workload: str) -> Found | None:
        """None before three sizes have been seen often enough."""
        for unit in ("assignments", "bytes"):
            classes = self._seen.get(workload, {}).get(unit, {})
            rows = [np.median(kept, axis=0) for kept in classes.values() if len(kept) >= LEAST]
            if len(rows) >= 3:
                size, expert, exchange, rate = np.array(rows).T
                limit = rules.batch_limit(size, expert, exchange, rate)
                return Found(limit, unit, len(rows), float(size.max()), float(size.min()))
        return None
