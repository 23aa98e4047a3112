"""What a training step would take if some operations took as long as their peers'.

The method is that of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025): times are replayed through the graph of the step (`schedule`), once as they were and
once with each kind's time replaced by what is usual, over all ranks and steps: the mean for work,
the median for transfers. Of a transfer only the part after the last of its group began counts.
Arrays are [operation, step, replica] in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.schedule import TRANSFERS, Graph

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class WhatIf:
    """The times of one trace, ready to be replayed."""

    graph: Graph
    times: F64  # as they were, without waiting
    usual: F64  # the same shape
    now: float  # mean time of a step, replayed as it was
    ideal: float  # replayed with usual times everywhere

    @property
    def slowdown(self) -> float:
        return self.now / self.ideal

    def without(self, mask: Bools, instead: F64 | None = None) -> float:
        """Mean time of a step if the operations of `mask` had taken `instead` (None: usual)."""
        times = np.where(mask, self.usual if instead is None else instead, self.times)
        return float(step_seconds(self.graph, times).mean())

    def only(self, mask: Bools) -> float:
        """Mean time of a step if all but the operations of `mask` had taken what is usual."""
        times = np.where(mask, self.times, self.usual)
        return float(step_seconds(self.graph, times).mean())

    def recoverable(self, mask: Bools, instead: F64 | None = None) -> float:
        """Share of the step that would come back."""
        return 1.0 - self.without(mask, instead) / self.now


def analyse(graph: Graph, start: F64, duration: F64) -> WhatIf:
    times = own_times(graph, start, duration)
    usual = usual_times(graph, times)
    return WhatIf(
        graph,
        times,
        usual,
        float(step_seconds(graph, times).mean()),
        float(step_seconds(graph, usual).mean()),
    )


def own_times(graph: Graph, start: F64, duration: F64) -> F64:
    """Durations; of operations that start together only what follows the last start."""
    own = duration.copy()
    for members, across in zip(graph.groups, graph.across, strict=True):
        if len(members) == 1 and not across:
            continue
        these = list(members)
        last = start[these].max(axis=0)
        if across:
            last = np.broadcast_to(last.max(axis=-1, keepdims=True), last.shape)
        # Clocks of two nodes differ by more than a short transfer takes.
        own[these] = np.maximum(start[these] + duration[these] - last, 0.0)
    return own


def usual_times(graph: Graph, times: F64) -> F64:
    """Each kind's mean (transfers: median) over all stages, steps and replicas."""
    usual = np.empty_like(times)
    kinds = np.array([op.kind for op in graph.operations])
    for kind in np.unique(kinds).tolist():
        these = kinds == kind
        middle = np.median if kind in TRANSFERS else np.mean
        usual[these] = middle(times[these])
    return usual


def step_seconds(graph: Graph, times: F64) -> F64:
    """[step] from the first start to the last end, everything started as soon as it can be."""
    end = np.zeros_like(times)
    for members, across in zip(graph.groups, graph.across, strict=True):
        waits = [a for i in members for a in graph.after[i]]
        start = end[waits].max(axis=0) if waits else np.zeros(times.shape[1:])
        if across:
            start = np.broadcast_to(start.max(axis=-1, keepdims=True), start.shape)
        for i in members:
            end[i] = start + times[i]
    seconds: F64 = end.max(axis=(0, 2))
    return seconds
