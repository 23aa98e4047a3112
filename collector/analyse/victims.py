"""Blame over all communicators of a workload: whom the job waits for, and what is to gain.

Within a communicator blame follows own time, so a rank that another group held up is charged only
for what it added itself (`blame`). Over a job the charges of many groups run side by side: eight
tensor groups with a late rank each are not eight times the step. A process's charges are therefore
added up, and where those of a workload come to more than its time, all are scaled down to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lanterne.collector.snapshot import Blamed, JobView

if TYPE_CHECKING:
    from lanterne.collector.analyse.engine import Engine
    from lanterne.collector.analyse.figures import Figures

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MOST_BLAMED = 16  # of a workload
LEAST_SHARE = 0.001


def shares(process: I64, job: I64, blame_ns: F64, span_ns: F64) -> tuple[I64, I64, F64]:
    """-> processes, the job of each, and the share of its job's time that it is to blame for.

    process, job, blame_ns: one entry for each (communicator, rank); NaN blame is unknown. span_ns:
    [job] observed time. The shares of a job sum to at most 1.
    """
    known = np.isfinite(blame_ns)
    process, job, blame_ns = process[known], job[known], blame_ns[known]
    of, who, total = _summed(job, process, blame_ns)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(span_ns[of] > 0, total / span_ns[of], 0.0)
    whole = np.bincount(of, share, minlength=len(span_ns))
    scaled: F64 = share / np.maximum(whole, 1.0)[of]
    return who, of, scaled


def _summed(job: I64, process: I64, values: F64) -> tuple[I64, I64, F64]:
    """-> job, process and sum of each pair."""
    pairs, at = np.unique(job << 32 | process, return_inverse=True)
    total: F64 = np.bincount(at, values, minlength=len(pairs)).astype(np.float64)
    return pairs >> 32, pairs & 0xFFFFFFFF, total


def jobs(engine: Engine, f: Figures) -> tuple[JobView, ...]:
    """One view for each workload that has a communicator with evidence."""
    names = sorted({slot.workload for _, slot in f.live})
    number = {name: i for i, name in enumerate(names)}
    of_comm = np.array([number[slot.workload] for _, slot in f.live], dtype=np.int64)
    span = np.zeros(len(names))
    seen = f.evidence > 0
    np.maximum.at(span, of_comm[seen], f.span[seen])
    process = engine.registry.process[f.member].astype(np.int64)
    blame = f.blame_share * f.span[f.comm]
    who, job, share = shares(process, of_comm[f.comm], blame, span)
    gain = _recoverable(engine, f, process, of_comm, len(names))
    order = np.argsort(process, kind="stable")
    rows_of = _RowsOf(order, process[order])
    views = []
    for i, name in enumerate(names):
        if not span[i]:
            continue
        mine = np.flatnonzero((job == i) & (share >= LEAST_SHARE))
        mine = mine[np.argsort(-share[mine], kind="stable")][:MOST_BLAMED]
        blamed = tuple(_blamed(engine, f, rows_of, int(who[m]), float(share[m])) for m in mine)
        views.append(JobView(workload=name, recoverable_share=float(gain[i]), blame=blamed))
    return tuple(views)


def _recoverable(engine: Engine, f: Figures, process: I64, of_comm: I64, n: int) -> F64:
    """[job] share of the time that comes back with every rank at its role's median.

    What a process's communicators would give back comes one after the other, so it adds up; what
    groups side by side would give back does not: the largest counts. Where a pipeline's next stage
    would then be what the step waits for, less comes back than this.
    """
    found = np.full(n, math.nan)
    by_slot = np.array([engine.causes.recoverable.get(number, math.nan) for number, _ in f.live])
    value = by_slot[f.comm]
    known = np.isfinite(value)
    if not known.any():
        return found
    of, _, total = _summed(of_comm[f.comm][known], process[known], value[known])
    most = np.zeros(n)
    np.maximum.at(most, of, total)
    some = np.unique(of)
    found[some] = np.minimum(most[some], 1.0)
    return found


@dataclass(frozen=True)
class _RowsOf:
    """Rows of a process, from all rows in order of their processes."""

    order: I64
    process: I64

    def __call__(self, which: int) -> I64:
        low, high = np.searchsorted(self.process, [which, which + 1])
        return self.order[low:high]


def _blamed(engine: Engine, f: Figures, rows_of: _RowsOf, which: int, share: float) -> Blamed:
    """A process is shown as its rank in the largest of its communicators."""
    rows = rows_of(which)
    sizes = np.array([f.live[c][1].ranks for c in f.comm[rows]])
    row = int(rows[sizes.argmax()])
    registry = engine.registry
    return Blamed(
        comm=int(f.comm[row]),
        rank=int(f.rank[row]),
        node=int(registry.node[f.member[row]]),
        pid=int(registry.process_pid[which]),
        share=share,
    )
