"""One training step of pipeline and data parallelism as a graph of operations.

The graph of one step is that of every step and every data-parallel replica, so it is made once; the
times live in arrays [operation, step, replica] beside it. Stages of one model chunk each (no
interleaved schedule).

    params-all-gather ─► forward-compute 0 ─► … computes in the order seen … ─► last compute
    forward-compute k ─► forward-send k  ═ starts together with ═ forward-recv k of the next stage
    forward-recv k ─► forward-compute k          (backward likewise, to the stage before)
    last compute ─► gc ─► layernorm-grads-all-reduce
                 ─► embedding-grads-all-reduce (first and last stage)
                 ─► grads-reduce-scatter ─► optimizer-clip-main-grad ─► optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

COMPUTE = ("forward-compute", "backward-compute")
PIPELINE = ("forward-send", "forward-recv", "backward-send", "backward-recv")
TAIL = ("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter",
        "optimizer-clip-main-grad", "optimizer")  # fmt: skip
GATHER = "params-all-gather"
OPERATIONS = (*COMPUTE, *PIPELINE, *TAIL, GATHER)
# Their time is transfer, and waiting for the peers: everything that is not work of one rank alone.
TRANSFERS = (*PIPELINE, GATHER, *TAIL[1:5])
ACROSS = (GATHER, "grads-reduce-scatter", "optimizer-clip-main-grad")  # all replicas start together


@dataclass(frozen=True)
class Operation:
    kind: str  # one of OPERATIONS
    stage: int
    number: int  # among those of this kind on the stage in a step, in the order of their start


@dataclass(frozen=True)
class Graph:
    """`groups` in an order in which each comes after all that its members wait for."""

    operations: tuple[Operation, ...]
    groups: tuple[tuple[int, ...], ...]  # operations that start together; most are alone
    across: tuple[bool, ...]  # [group] whether those of all replicas start together too
    after: tuple[tuple[int, ...], ...]  # [operation] what must have ended before it


def build(operations: Sequence[Operation], start: F64) -> Graph:
    """The graph of one step; `start` [operation]: when each began, which orders the computes.

    Raises ValueError naming what does not fit.
    """
    index = {op: i for i, op in enumerate(operations)}
    after: list[list[int]] = [[] for _ in operations]
    for stage in sorted({op.stage for op in operations}):
        _order_stage(index, after, start, stage)
    groups = _groups(index)
    order = _in_order(groups, after)
    return Graph(
        tuple(operations),
        tuple(groups[g] for g in order),
        tuple(operations[groups[g][0]].kind in ACROSS for g in order),
        tuple(tuple(a) for a in after),
    )


def _order_stage(
    index: Mapping[Operation, int], after: list[list[int]], start: F64, stage: int
) -> None:
    """What follows what on one rank."""
    here = [op for op in index if op.stage == stage]
    of = {
        kind: sorted((op for op in here if op.kind == kind), key=lambda op: op.number)
        for kind in OPERATIONS
    }
    computes = sorted(
        (op for op in here if op.kind in COMPUTE), key=lambda op: (start[index[op]], op.kind)
    )
    if not computes:
        raise ValueError(f"stage {stage} has no forward-compute and no backward-compute")
    _chain(index, after, computes)
    for kind in PIPELINE:
        _chain(index, after, of[kind])
        direction, _, action = kind.partition("-")
        work = of[f"{direction}-compute"]
        if of[kind] and len(of[kind]) != len(work):
            raise ValueError(
                f"stage {stage} has {len(of[kind])} {kind} for {len(work)} {direction}-compute: "
                "only schedules with one model chunk a stage are known"
            )
        for number, transfer in enumerate(of[kind]):
            if action == "send":
                after[index[transfer]].append(index[work[number]])
            else:
                after[index[work[number]]].append(index[transfer])
                if number:  # posted once the work before it is done
                    after[index[transfer]].append(index[work[number - 1]])
    for gather in of[GATHER]:
        after[index[of["forward-compute"][0]]].append(index[gather])
    _chain(index, after, [computes[-1], *(op for kind in TAIL for op in of[kind])])


def _chain(
    index: Mapping[Operation, int], after: list[list[int]], chain: Sequence[Operation]
) -> None:
    for before, op in pairwise(chain):
        after[index[op]].append(index[before])


def _groups(index: Mapping[Operation, int]) -> list[tuple[int, ...]]:
    """Sends with their receives, and what several stages do together."""
    joined: dict[tuple[str, int, int], list[int]] = {}
    for op, i in index.items():
        kind, place = op.kind, op.stage
        if kind in PIPELINE:
            direction, _, action = kind.partition("-")
            kind = direction
            if action == "recv":  # named after the stage that sends
                place += -1 if direction == "forward" else 1
        elif kind in ("embedding-grads-all-reduce", "optimizer-clip-main-grad"):
            place = 0
        joined.setdefault((kind, place, op.number), []).append(i)
    for (kind, place, number), members in joined.items():
        if kind in ("forward", "backward") and len(members) != 2:
            raise ValueError(
                f"{kind}-send {number} of stage {place} has no receive at the other stage, "
                "or the receive has no send"
            )
    return [tuple(members) for members in joined.values()]


def _in_order(groups: Sequence[tuple[int, ...]], after: Sequence[Sequence[int]]) -> list[int]:
    """Kahn's algorithm over groups. Raises ValueError where they wait for each other."""
    group_of = {i: g for g, members in enumerate(groups) for i in members}
    before = [{group_of[a] for i in members for a in after[i]} for members in groups]
    then: list[list[int]] = [[] for _ in groups]
    for g, needed in enumerate(before):
        for b in needed:
            then[b].append(g)
    left = [len(needed) for needed in before]
    ready = [g for g, n in enumerate(left) if n == 0]
    for g in ready:  # grows while it is walked
        for t in then[g]:
            left[t] -= 1
            if left[t] == 0:
                ready.append(t)
    if len(ready) != len(groups):
        raise ValueError("operations of the step wait for each other in a circle")
    return ready
