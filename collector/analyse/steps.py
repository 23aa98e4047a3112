"""Steps of an expert-parallel program: where the time of each goes. Pure numpy.

Times are means over the ranks of one communicator, so that they add up:
span = dispatch + combine + other_transfer + wait + expert + other_compute + elsewhere + idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops, period

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

PARTS = ("dispatch", "expert", "combine", "wait", "other_transfer", "other_compute", "elsewhere",
         "idle")  # fmt: skip


@dataclass(frozen=True)
class Operations:
    """Columns of [n] operations of one communicator, or of one rank over its communicators, oldest
    first; seconds, NaN unknown."""

    symbol: I64  # kind of operation: one number for each (operation, role), and communicator
    role: I64  # ops.DISPATCH, ops.COMBINE or 0
    arrival: F64  # mean over ranks, each on its own clock
    duration: F64  # mean over ranks, waiting included
    wait: F64  # mean over ranks
    own: F64  # mean over ranks of the own time since each one's previous operation
    own_most: F64  # of the rank that took longest
    slowest: I64  # that rank; -1 unknown
    size: F64  # bytes, sum over ranks
    broken: Bool  # an operation before this one is not known
    assignments: F64 | None = None  # of each dispatch, where the engine tells; None: not known
    group: I64 | None = None  # communicator of each; None: all of one


@dataclass(frozen=True)
class Steps:
    """[s] complete steps, oldest first; seconds, means over ranks. See the module for the sum."""

    start: F64
    span: F64
    operations: I64
    dispatch: F64  # transfer of dispatches, without waiting
    expert: F64  # own time between a dispatch and its combine
    combine: F64
    wait: F64
    other_transfer: F64  # of this communicator
    other_compute: F64  # own time outside the experts
    elsewhere: F64  # operations of other communicators and their waiting; below 0: they overlap
    idle: F64  # pause before the step beyond the shortest such pause: not known to be work
    expert_most: F64  # expert time of the rank that took longest in each layer
    slowest: I64  # the rank that was that most often; -1 unknown
    size: F64  # bytes dispatched
    assignments: F64  # NaN: not known

    def __len__(self) -> int:
        return len(self.start)


def split(table: Operations) -> tuple[int, Steps]:
    """-> (operations in the usual step, the complete steps); 0 and none where nothing repeats."""
    n = len(table.symbol)
    gap = np.full(n, np.nan)
    gap[1:] = table.arrival[1:] - (table.arrival[:-1] + table.duration[:-1])
    gap[table.broken] = np.nan
    found = period.find_period(table.symbol)
    pause = np.where(_in_experts(table), np.nan, gap)  # no step begins inside a layer
    begin = period.starts(table.symbol, found, pause)
    if found == 0 or len(begin) < 2:
        return found, _none()
    return found, _records(table, gap, begin)


def _records(t: Operations, gap: F64, begin: I64) -> Steps:
    """Steps from each of `begin` to the next; the last is not known to be complete."""
    first, last = int(begin[0]), int(begin[-1])
    part = slice(first, last)
    at = begin[:-1] - first

    def summed(values: F64 | Bool, where: Bool | None = None) -> F64:
        rows = np.asarray(values[part], np.float64)
        chosen = rows if where is None else np.where(where[part], rows, 0.0)
        total: F64 = np.add.reduceat(chosen, at)
        return total

    dispatch, combine = t.role == ops.DISPATCH, t.role == ops.COMBINE
    inner = np.ones(len(gap), bool)
    inner[begin] = False  # the pause before a step's first operation
    transfer = t.duration - t.wait
    own = np.minimum(t.own, np.maximum(gap, 0.0))  # never more than passed
    pause = gap[begin[:-1]]
    least = np.nanmin(pause) if np.isfinite(pause).any() else np.nan
    idle = np.where(np.isnan(pause), np.nan, pause - least)
    owned = np.where(inner, own, np.minimum(own, least))
    passed = np.where(inner, gap, np.where(np.isnan(gap), np.nan, least))
    of_expert = _in_experts(t) & inner
    steps = Steps(
        start=t.arrival[begin[:-1]] - np.where(np.isnan(pause), 0.0, pause),
        span=np.diff(t.arrival[begin]) + pause - gap[begin[1:]],
        operations=np.diff(begin).astype(np.int64),
        dispatch=summed(transfer, dispatch),
        expert=summed(owned, of_expert),
        combine=summed(transfer, combine),
        wait=summed(t.wait),
        other_transfer=summed(transfer, ~dispatch & ~combine),
        other_compute=summed(owned, ~of_expert),
        elsewhere=summed(passed - owned),
        idle=idle,
        expert_most=summed(t.own_most, of_expert),
        slowest=_slowest(t, of_expert, begin),
        size=summed(t.size, dispatch),
        assignments=np.full(len(at), np.nan)
        if t.assignments is None
        else summed(t.assignments, dispatch),
    )
    whole = summed(t.broken | np.isnan(gap)) == 0
    return Steps(**{n: getattr(steps, n)[whole] for n in Steps.__dataclass_fields__})


def _in_experts(t: Operations) -> Bool:
    """Combines right after their dispatch, and what other communicators do in between (experts that
    are tensor parallel): what passes before these is expert execution."""
    if t.group is None:
        at = np.arange(len(t.role))
    else:
        at = np.flatnonzero(np.isin(t.group, t.group[t.role != 0]))
    role = t.role[at]
    ends = np.flatnonzero((role[1:] == ops.COMBINE) & (role[:-1] == ops.DISPATCH)) + 1
    change = np.zeros(len(t.role) + 1, np.int64)
    np.add.at(change, at[ends - 1] + 1, 1)  # after the dispatch
    np.add.at(change, at[ends] + 1, -1)  # up to the combine
    found: Bool = np.cumsum(change[:-1]) > 0
    return found


def until(steps: Steps, end: float) -> Steps:
    """Those that are over by then."""
    over = steps.start + steps.span <= end
    return Steps(**{n: getattr(steps, n)[over] for n in Steps.__dataclass_fields__})


def _slowest(t: Operations, of_expert: Bool, begin: I64) -> I64:
    """The rank that most often took longest; -1 where there is none."""
    found = np.full(len(begin) - 1, -1, np.int64)
    for step, (low, high) in enumerate(zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True)):
        ranks = t.slowest[low:high][of_expert[low:high]]
        ranks = ranks[ranks >= 0]
        if len(ranks):
            found[step] = np.bincount(ranks).argmax()
    return found


def _none() -> Steps:
    whole = np.zeros(0, np.int64)
    columns: dict[str, Any] = dict.fromkeys(Steps.__dataclass_fields__, np.zeros(0))
    return Steps(**columns | {"operations": whole, "slowest": whole})


def usual(steps: Steps) -> Bool:
    """[s] which steps are of the most common kind: as many operations, and bytes within a factor
    of two. A prefill among decodes is not."""
    if not len(steps):
        return np.zeros(0, bool)
    size = np.log2(np.maximum(np.nan_to_num(steps.size), 1.0)).round().astype(np.int64)
    pairs = np.stack([steps.operations, size], axis=1)
    _, code, count = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    found: Bool = code.reshape(-1) == int(count.argmax())
    return found


def medians(steps: Steps, which: Bool) -> dict[str, float]:
    """Of each part and of the span, over the chosen steps; what is known of none is absent."""
    found: dict[str, float] = {}
    for name in ("span", *PARTS, "expert_most", "assignments"):
        values: F64 = getattr(steps, name)[which]
        values = values[~np.isnan(values)]
        if len(values):
            found[name] = float(np.median(values))
    return found
