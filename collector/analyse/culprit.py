"""Why a training job's steps are longer than they need be: worker, microbatches, stages, transfers.

The variation of the work's time is taken apart: what stays with a worker whatever it works on, what
follows a microbatch through every stage, forward and backward (its sequences are longer), and the
rest. A worker is named only by comparison with the replicas of its own stage. What each cause costs
is not read from its variance but replayed (`whatif`): a cause off the critical path costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.schedule import COMPUTE, TRANSFERS
from lanterne.collector.analyse.whatif import WhatIf

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MIN_RATIO = 1.08  # over the replicas of the same stage, as for verdicts on live jobs
MIN_DEVIATIONS = 3.5
MIN_GAIN = 0.02  # share of the step: below, nothing is worth naming
MIN_STEPS = 0.5  # of the steps in which a named worker is slower than MIN_RATIO
CAUSES = ("none", "slow_worker", "microbatch_imbalance", "stage_imbalance", "communication",
          "unknown")  # fmt: skip


@dataclass(frozen=True)
class Worker:
    stage: int
    replica: int
    ratio: float  # its time of work over that of the same stage's other replicas
    steps: float  # share of the steps in which that is at least MIN_RATIO
    blame_share: float  # of the step, that would come back


@dataclass(frozen=True)
class Finding:
    cause: str  # one of CAUSES
    recoverable_share: float  # of the step, with usual times everywhere
    workers: tuple[Worker, ...]  # slowest first
    gains: Mapping[str, float]  # cause -> share of the step that its removal alone brings back
    variance: Mapping[str, float]  # worker, microbatch, rest: shares that add up to 1


def find(w: WhatIf) -> Finding:
    """Who or what is to blame."""
    work = np.array([op.kind in COMPUTE for op in w.graph.operations])
    log = _residuals(w, work)
    named = _slow_workers(w, work, log)
    effect = _effects(w, work, log)
    variance = _shares(effect, log)
    recoverable = 1.0 - w.ideal / w.now
    gains = _gains(w, work, named, effect)
    best = max(gains, key=lambda cause: gains[cause])
    if recoverable < MIN_GAIN:
        best = "none"
    elif gains[best] < MIN_GAIN:
        best = "unknown"
    return Finding(
        best if best != "slow_worker" or named else "unknown",
        recoverable,
        tuple(_blamed(w, work, named)) if gains["slow_worker"] >= MIN_GAIN else (),
        gains,
        variance,
    )


def _residuals(w: WhatIf, work: Bools) -> F64:
    """[work operation, step, replica]: log of the time over the median of its kind and stage."""
    log: F64 = np.log(np.maximum(w.times[work], 1e-9))
    for rows in _roles(w, work).values():
        log[rows] -= np.median(log[rows])
    return log


def _roles(w: WhatIf, work: Bools) -> dict[tuple[str, int], npt.NDArray[np.intp]]:
    """(kind, stage) -> its rows among the work operations."""
    ops = [op for op, of in zip(w.graph.operations, work.tolist(), strict=True) if of]
    return {
        role: np.flatnonzero([(op.kind, op.stage) == role for op in ops])
        for role in sorted({(op.kind, op.stage) for op in ops})
    }


def _stages(w: WhatIf, work: Bools) -> dict[int, npt.NDArray[np.intp]]:
    stages: dict[int, list[npt.NDArray[np.intp]]] = {}
    for (_, stage), rows in _roles(w, work).items():
        stages.setdefault(stage, []).append(rows)
    return {stage: np.concatenate(rows) for stage, rows in stages.items()}


def _slow_workers(w: WhatIf, work: Bools, log: F64) -> list[Worker]:
    """Slower than the same stage's other replicas, beyond their spread and in most steps."""
    found = []
    replicas = log.shape[2]
    for stage, rows in _stages(w, work).items():
        own = np.median(log[rows], axis=(0, 1))
        own_step = np.median(log[rows], axis=0)
        for r in range(replicas if replicas > 1 else 0):
            others = np.delete(own, r)
            middle = float(np.median(others))
            spread = 1.4826 * float(np.median(np.abs(others - middle)))
            above = float(own[r]) - middle
            ratio = float(np.exp(above))
            steps = own_step[:, r] - np.median(np.delete(own_step, r, axis=1), axis=1)
            often = float(np.mean(steps >= np.log(MIN_RATIO)))
            if (
                ratio >= MIN_RATIO
                and above >= MIN_DEVIATIONS * max(spread, 0.01)
                and often >= MIN_STEPS
            ):
                found.append(Worker(stage, r, ratio, often, 0.0))
    return sorted(found, key=lambda worker: -worker.ratio)


@dataclass(frozen=True)
class _Effects:
    worker: F64  # the shape of the residuals, as the next
    microbatch: F64


def _effects(w: WhatIf, work: Bools, log: F64) -> _Effects:
    """Two-way decomposition of the residuals: the worker's mean, then the microbatch's."""
    worker = np.zeros_like(log)
    for rows in _stages(w, work).values():
        worker[rows] = log[rows].mean(axis=(0, 1), keepdims=True) - log.mean()
    left = log - worker
    number = np.array(
        [op.number for op, of in zip(w.graph.operations, work.tolist(), strict=True) if of]
    )
    microbatch = np.zeros_like(log)
    for n in np.unique(number):
        rows = number == n
        microbatch[rows] = left[rows].mean(axis=0, keepdims=True) - left.mean()
    return _Effects(worker, microbatch)


def _shares(effect: _Effects, log: F64) -> dict[str, float]:
    total = float(((log - log.mean()) ** 2).sum())
    if total <= 0:
        return {}
    worker = float((effect.worker**2).sum()) / total
    microbatch = float((effect.microbatch**2).sum()) / total
    return {
        "worker": worker,
        "microbatch": microbatch,
        "rest": max(0.0, 1.0 - worker - microbatch),
    }


def _gains(w: WhatIf, work: Bools, named: list[Worker], effect: _Effects) -> dict[str, float]:
    transfers = np.array([op.kind in TRANSFERS for op in w.graph.operations])
    everywhere = np.ones(w.times.shape, bool)
    equal = w.times.copy()
    equal[work] = _kept(w, work, w.times[work] / np.exp(effect.microbatch))
    return {
        "slow_worker": _fixed(w, work, named) if named else 0.0,
        "microbatch_imbalance": w.recoverable(everywhere, equal),
        "stage_imbalance": w.recoverable(everywhere, _level(w, work, named)),
        "communication": w.recoverable(transfers[:, None, None] & everywhere),
    }


def _kept(w: WhatIf, work: Bools, changed: F64) -> F64:
    """Scaled so that each kind and stage does as much work in all as it did."""
    before = w.times[work]
    for rows in _roles(w, work).values():
        changed[rows] *= before[rows].mean() / max(float(changed[rows].mean()), 1e-12)
    return changed


def _level(w: WhatIf, work: Bools, named: list[Worker]) -> F64:
    """Times with the same mean in every stage, and all other variation kept."""
    times = w.times.copy()
    times[work] /= _stage_factor(w, work, named)[work][:, None, None]
    return times


def _stage_factor(w: WhatIf, work: Bools, named: list[Worker]) -> F64:
    """[operation] mean time of its kind in its stage over that in all; slow workers apart."""
    operations = w.graph.operations
    factor = np.ones(len(operations))
    means: dict[tuple[str, int], float] = {}
    for kind, stage in _roles(w, work):
        rows = np.array([op.kind == kind and op.stage == stage for op in operations])
        slow = [worker.replica for worker in named if worker.stage == stage]
        part = np.delete(w.times[rows], slow, axis=2)
        means[kind, stage] = float((part if part.size else w.times[rows]).mean())
    for i in np.flatnonzero(work).tolist():
        op = operations[i]
        usual = np.mean([mean for (kind, _), mean in means.items() if kind == op.kind])
        factor[i] = means[op.kind, op.stage] / max(float(usual), 1e-12)
    return factor


def _fixed(w: WhatIf, work: Bools, workers: list[Worker]) -> float:
    """Share of the step that comes back when these workers take what is usual on their stage."""
    mask = np.zeros(w.times.shape, bool)
    stage = np.array([op.stage for op in w.graph.operations])
    for worker in workers:
        mask[stage == worker.stage, :, worker.replica] = True
    usual = w.usual * _stage_factor(w, work, workers)[:, None, None]
    return w.recoverable(mask, usual)


def _blamed(w: WhatIf, work: Bools, named: list[Worker]) -> list[Worker]:
    """What fixing all named together brings back, shared as each alone would slow a usual job."""
    stage = np.array([op.stage for op in w.graph.operations])
    alone = []
    for worker in named:
        mask = np.zeros(w.times.shape, bool)
        mask[stage == worker.stage, :, worker.replica] = True
        alone.append(max(w.only(mask) - w.ideal, 0.0))
    together = max(_fixed(w, work, named), 0.0)
    total = sum(alone)
    return [
        Worker(x.stage, x.replica, x.ratio, x.steps, together * a / total if total else 0.0)
        for x, a in zip(named, alone, strict=True)
    ]
