"""Rows of the alignment tables -> waits, blame and own times, whole blocks at a time.

Two passes, because a rank's own time needs the wait of its previous operation, which may lie in
another communicator: `judge` writes waits into the tables, `own_times` reads them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import (
    META_EVIDENCE,
    META_FLAGS,
    META_LAP,
    META_OP,
    META_ROLE,
    PRESENT,
    Tables,
)
from lanterne.collector.analyse import blame, ops, own, waits
from lanterne.collector.analyse import window as w

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Bool = npt.NDArray[np.bool_]

CHUNK_CELLS = 1 << 17


class Clocks:
    """Whose clock each member's times are from, and the nodes' offsets, worked out if needed."""

    def __init__(self, node: npt.NDArray[np.int32], solve: Callable[[], tuple[F64, F64]]) -> None:
        """node: [member] node number, -1 unknown. solve: -> (offset, error) ns by node number, the
        last entry for node -1; error inf where not known.
        """
        self.node = node
        self._solve = solve
        self._solved: tuple[F64, F64] | None = None

    def of(self, node: npt.NDArray[np.int32]) -> tuple[F64, F64]:
        """(offset, error) of nodes, ns."""
        if self._solved is None:
            self._solved = self._solve()
        offset, error = self._solved
        return offset[node], error[node]


@dataclass
class Judged:
    """J rows of communicators of `ranks` ranks. Arrays are [rank, J] or [J]."""

    ranks: int
    rows: I64
    slot: I64
    cells: I64
    present: Bool | None  # None: all
    outcome: npt.NDArray[np.int64]
    op: U8
    role: U8
    evidence: U8
    complete: Bool
    wait: F32  # NaN unless scored
    transfer: F64  # [J] shortest duration; NaN without durations
    last: I64
    margin: F64  # NaN unless scored
    foreign: Bool | None
    size: F32
    arrival: I64
    duration: F32


def judge(tables: Tables, rows: I64, slot: I64, base: I64, ranks: int, clocks: Clocks) -> Judged:
    """Decide what each row can tell, and its waits; rows all belong to tables of `ranks` ranks.

    slot, base: [J] the communicator's slot and first member.
    """
    cells = tables.cells_of(rows, ranks)
    meta = tables.meta[cells]
    there = (meta >> META_LAP == tables.laps_of(rows)) & (meta & PRESENT != 0)
    present = None if there.all() else there
    count = np.full(len(rows), ranks) if present is None else there.sum(axis=0)
    all_of, any_of = _common(meta, present)
    size = tables.size[cells]
    op = (all_of >> META_OP & 255).astype(np.uint8)
    differ = all_of ^ any_of
    role = np.where(differ >> META_ROLE & 3, 0, all_of >> META_ROLE & 3).astype(np.uint8)
    evidence = np.where(differ >> META_EVIDENCE & 3, 0, all_of >> META_EVIDENCE & 3)
    flags = any_of >> META_FLAGS & 7
    other_op = _ops_differ(meta, present, op, differ >> META_OP & 255 != 0)
    misaligned = other_op | _sizes_differ(size, present, op)
    symmetric = ops.SYMMETRIC[op] | ((op == ops.P2P_GROUP) & (role != 0))
    outcome = np.full(len(rows), w.SCORED)
    outcome[evidence == 0] = w.ORDER_ONLY
    outcome[(evidence == 0) & (differ >> META_EVIDENCE & 3 != 0)] = w.MIXED
    outcome[flags & ops.FLAG_CAPTURED != 0] = w.CAPTURED
    outcome[~symmetric] = w.ROOTED
    outcome[flags & ops.FLAG_FIRST != 0] = w.FIRST
    outcome[misaligned] = w.MISALIGNED
    outcome[~waits.covered(count, ranks)] = w.MISSING
    if ranks == 1:
        outcome[:] = w.ALONE
    judged = Judged(
        ranks=ranks,
        rows=rows,
        slot=slot,
        cells=cells,
        present=present,
        outcome=outcome,
        op=op,
        role=role,
        evidence=evidence.astype(np.uint8),
        complete=count >= ranks,
        wait=np.full((ranks, len(rows)), np.nan, np.float32),
        transfer=np.full(len(rows), np.nan),
        last=np.zeros(len(rows), np.int64),
        margin=np.full(len(rows), np.nan),
        foreign=None,
        size=size,
        arrival=tables.arrival[cells],
        duration=tables.duration[cells],
    )
    _by_duration(judged)
    _by_arrival(judged, base, clocks)
    tables.wait[cells] = judged.wait  # own times use it even where the row is not scored
    judged.wait[:, outcome != w.SCORED] = np.nan
    if bool((flags & 1).any()):  # bit 0 of the flags: the previous operation was elsewhere
        judged.foreign = meta[judged.last, np.arange(len(rows))] >> META_FLAGS & 1 != 0
    return judged


def _common(meta: U32, present: Bool | None) -> tuple[U32, U32]:
    """-> [J] bits that every present rank has, and bits that any has."""
    every, some = meta, meta
    if present is not None:
        every = np.where(present, meta, np.uint32(0xFFFFFFFF))
        some = np.where(present, meta, np.uint32(0))
    return np.bitwise_and.reduce(every, axis=0), np.bitwise_or.reduce(some, axis=0)


def _ops_differ(meta: U32, present: Bool | None, op: U8, differ: Bool) -> Bool:
    """Whether ranks called different operations; writes what a mixed all-to-all is into `op`.

    A rank that has nothing for some peer may post a partial group where the others post all.
    """
    if not differ.any():
        return differ
    columns = np.flatnonzero(differ)
    parts = ops.POINT_TO_POINT[meta[:, columns] >> META_OP & 255]
    if present is not None:
        parts = parts | ~present[:, columns]
    fine = columns[parts.all(axis=0)]
    op[fine] = ops.ALL_TO_ALL_V
    differ[fine] = False
    return differ


def _sizes_differ(size: F32, present: Bool | None, op: U8) -> Bool:
    must: Bool = ops.EQUAL_BYTES[op]
    if not must.any():
        return must
    some = size if present is None else np.where(present, size, np.float32(np.nan))
    differ: Bool = np.fmax.reduce(some, axis=0) != np.fmin.reduce(some, axis=0)
    return must & differ


def _select(outcome: I64, wanted: Bool) -> slice | I64 | None:
    chosen = wanted & (outcome == w.SCORED)
    if chosen.all():
        return slice(None)
    return np.flatnonzero(chosen) if chosen.any() else None


def _by_duration(j: Judged) -> None:
    pick = _select(j.outcome, (j.evidence == ops.DEVICE) | (j.evidence == ops.BLOCKING))
    if pick is None:
        return
    d = j.duration[:, pick].astype(np.float64)
    if j.present is not None:
        d[~j.present[:, pick]] = np.nan
    shortest = np.fmin.reduce(d, axis=0)
    j.transfer[pick] = shortest
    j.wait[:, pick] = d - shortest
    j.last[pick], j.margin[pick] = waits.last_two(-d)


def _by_arrival(j: Judged, base: I64, clocks: Clocks) -> None:
    pick = _select(j.outcome, j.evidence == ops.ENQUEUE)
    if pick is None:
        return
    arrival = j.arrival[:, pick]
    a = (arrival - arrival[0]).astype(np.float64)
    member = base[pick] + np.arange(j.ranks)[:, None]
    node = clocks.node[member]
    there = np.ones(a.shape, bool) if j.present is None else j.present[:, pick]
    if j.present is not None:
        # Another origin: rank 0 may be the missing one.
        origin = np.where(there, arrival, np.iinfo(np.int64).max).min(axis=0)
        a = (arrival - origin).astype(np.float64)
    known = np.where(there, node, np.where(there, node, -1).max(axis=0))
    one_clock = (known == known[0]).all(axis=0)
    if not one_clock.all():
        offset, error = clocks.of(node)
        a += np.where(one_clock, 0.0, offset - offset[0])
    if j.present is not None:
        a[~there] = np.nan
    wait = waits.from_arrivals(a)
    last, margin = waits.last_two(a)
    if not one_clock.all():
        wait, margin = _honest(j, pick, wait, last, margin, node, error)
    j.wait[:, pick] = wait
    j.last[pick], j.margin[pick] = last, margin


def _honest(
    j: Judged,
    pick: slice | I64,
    wait: F64,
    last: I64,
    margin: F64,
    node: npt.NDArray[np.int32],
    error: F64,
) -> tuple[F64, F64]:
    """Take off what the clocks' error could explain; all of it gone: the row says nothing."""
    columns = np.arange(wait.shape[1])
    columns = np.arange(wait.shape[1])
    shown = waits.suppress_clock_error(wait, last, node.astype(np.int64), error)
    other = (node != node[last, columns]) & ~np.isnan(wait)
    shown[np.isnan(wait) | (other & ~np.isfinite(error + error[last, columns]))] = np.nan
    rest = wait.copy()
    rest[last, columns] = np.inf
    second = np.where(np.isnan(rest), np.inf, rest).argmin(axis=0)
    margin = np.where(np.isnan(margin), margin, shown[second, columns])
    # A row in which no wait between two nodes stands out is not known to be free of waiting.
    blind = other.any(axis=0) & ~((shown > 0) & other).any(axis=0)
    margin[blind] = np.nan
    outcome = j.outcome[pick]
    outcome[blind] = w.CLOCK
    j.outcome[pick] = outcome
    return shown, margin


def own_times(tables: Tables, j: Judged) -> tuple[F32, F32]:
    """-> (own time, time blocked in synchronise with the wait taken off), ns, NaN unknown."""
    gap = tables.own[j.cells]
    previous = tables.prev[j.cells]
    has = previous >= 0
    blocked = np.zeros((1, 1), np.float32)
    if has.any():
        wait = tables.wait[np.maximum(previous, 0)]
        gap = own.after_wait(gap, wait, has)
        blocked = own.after_wait(tables.sync[j.cells], wait, has)
    if j.present is not None:
        gap = np.where(j.present, gap, np.float32(np.nan))
    return gap, blocked


def blames(j: Judged, own_time: F32) -> F64:
    """[J] blame in ns, charged to `j.last`; NaN unless scored."""
    if j.foreign is None:
        return j.margin
    return blame.charge(j.margin, j.last, own_time.astype(np.float64), j.foreign)
