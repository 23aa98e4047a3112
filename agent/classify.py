"""Which collectives of an expert-parallel job are dispatch and combine, beside all-to-alls.

Patterns, each seen in a framework; what fits none keeps role unknown:

- A group of broadcasts, one per root (several tensors: the same number per root), is one
  all-gather of unequal parts; a group of reduces likewise one reduce-scatter. Where such an
  all-gather is followed by a reduce-scatter of proportional parts, they are dispatch and combine
  (vLLM's default when ranks have different numbers of tokens).
- A run of two or more all-gathers of different sizes (tokens, and what goes with them: routing,
  probabilities) followed by one reduce-scatter as large as the largest, again and again: vLLM's
  default with equal numbers, and Megatron's all-gather dispatcher. The largest is the dispatch.
  Once is not enough, for sharded data parallelism may gather two layers' weights before it
  reduces gradients; but it does not do so every time.
- One all-gather and one reduce-scatter of its size: also what tensor parallelism does. Only on a
  communicator that its name or its configured role calls expert-parallel are they a pair.
- Calls of DeepEP and NCCL EP say themselves what they are.

No IO, no clock.
"""

from __future__ import annotations

import numpy as np

from lanterne.agent.events import (
    GROUPED,
    I64,
    U8,
    U16,
    U64,
    Bool,
    CommTable,
    Operations,
    Records,
    Rules,
    collectives,
    concatenate,
    errors_of,
    payload_bytes,
    rows_of,
)
from lanterne.agent.roles import COMBINE, DISPATCH, UNKNOWN
from lanterne.agent.vectors import MAX_PEER, PeerBytes, empty_peers, shape_hash
from lanterne.probes.layout import Flag, Func

_OWN_ROLE = np.zeros(256, np.uint8)
_OWN_ROLE[[Func.DISPATCH, Func.COMBINE]] = DISPATCH, COMBINE
_GATHER = np.zeros(256, np.bool_)
_GATHER[[Func.ALL_GATHER, Func.ALL_GATHER_V]] = True
_SCATTER = np.zeros(256, np.bool_)
_SCATTER[[Func.REDUCE_SCATTER, Func.REDUCE_SCATTER_V]] = True


# -- groups of broadcasts, groups of reduces -----------------------------------------------


def rooted(records: Records) -> Bool:
    """Mask of the records that `assemble_rooted` looks at: broadcasts and reduces in groups."""
    flags = records["flags"]
    mask: Bool = (flags & np.uint8(Flag.GROUP | Flag.P2P)) == np.uint8(Flag.GROUP)
    if mask.any():
        mask &= records["func"] <= Func.REDUCE  # 0 is a broadcast
    return mask


class Rooted:
    """What `groups.Groups` calls for the runs of one communicator and group each."""

    def __init__(self, table: CommTable):
        self._table = table  # its columns are the registry's own: always what is known now

    def __call__(
        self, records: Records, slots: U16, starts: I64, lengths: I64, rules: Rules
    ) -> tuple[Operations, PeerBytes]:
        """One operation where a run has every root; its calls as they are otherwise."""
        run = np.repeat(np.arange(len(starts)), lengths)
        sums, heads, peers, whole = self._by_root(records, slots, starts, lengths, run)
        alone = ~whole[run]
        parts = [collectives(rows_of(records, alone), slots[alone], rules)] if alone.any() else []
        if whole.any():
            merged = collectives(rows_of(records, starts), slots[starts], rules)
            totals = np.add.reduceat(sums, heads)
            merged.send_shape[:] = shape_hash(
                sums, np.repeat(totals, np.diff(np.append(heads, len(sums)))), peers, heads
            )
            gathers = merged.op == Func.BROADCAST
            own = heads + np.minimum(self._table.rank[merged.slot], np.append(
                np.diff(heads), len(sums) - heads[-1]) - 1)  # fmt: skip
            known = self._table.resolved[merged.slot]
            mine = np.where(known, sums[own.astype(np.int64)], np.uint64(0))
            merged.bytes[:] = np.where(gathers, mine, totals)
            merged.op[:] = np.where(gathers, Func.ALL_GATHER_V, Func.REDUCE_SCATTER_V)
            merged.flags[:] |= GROUPED
            merged.error[:] = np.logical_or.reduceat(errors_of(records), starts)
            merged.root[:] = -1
            blocked = np.add.reduceat(records["sync_blocked_us"].astype(np.uint64), starts)
            merged.sync_blocked_ns[:] = blocked * np.uint64(1000)
            parts.append(merged.take(whole))
        return concatenate(parts), empty_peers()

    def _by_root(
        self, records: Records, slots: U16, starts: I64, lengths: I64, run: I64
    ) -> tuple[U64, I64, I64, Bool]:
        """-> per (run, root) bytes, the first cell of each run, the root of each cell, and of each
        run whether it has every root the same number of times."""
        root = records["peer"].astype(np.int64)
        bad = (root < 0) | (root >= MAX_PEER)
        root = np.where(bad, 0, root)
        cells, cell, times = np.unique(
            run * MAX_PEER + root, return_inverse=True, return_counts=True
        )
        amount = payload_bytes(records)
        sums = np.zeros(len(cells), np.uint64)
        np.add.at(sums, cell, amount)
        of, peers = np.divmod(cells, MAX_PEER)
        heads = np.searchsorted(of, np.arange(len(starts)))
        roots = np.diff(np.append(heads, len(cells)))
        func = records["func"]
        whole = np.minimum.reduceat(func, starts) == np.maximum.reduceat(func, starts)
        whole &= ~np.logical_or.reduceat(bad, starts)
        whole &= np.minimum.reduceat(times, heads) == np.maximum.reduceat(times, heads)
        whole &= (np.maximum.reduceat(peers, heads) == roots - 1) & (roots > 1)
        known = self._table.resolved[slots[starts]]
        whole &= ~known | (self._table.n_ranks[slots[starts]] == roots)
        return sums, heads, peers, whole


# -- all-gathers and reduce-scatters -------------------------------------------------------


class Pairs:
    """State of each slot across windows; `forget` a slot before it is used anew."""

    def __init__(self, slots: int):
        self._pattern = np.zeros(slots, np.uint64)  # of the newest block, 0: fits nothing

    def forget(self, slots: U16) -> None:
        self._pattern[slots] = 0

    def assign(
        self, operations: Operations, table: CommTable, held_before: Bool, *, final: bool = False
    ) -> tuple[U8, Bool]:
        """Role of each operation, and which to hold back until what follows them is known.

        `operations` are sorted by slot, in order within it, except that groups may come late.
        """
        hold = np.zeros(len(operations), np.bool_)
        kinds = np.flatnonzero(np.bincount(operations.op, minlength=256))
        role = np.zeros(len(operations), np.uint8)
        if _OWN_ROLE[kinds].any():
            role = _OWN_ROLE[operations.op]
        if not _SCATTER[kinds].any() and not _GATHER[kinds].any():
            return role, hold
        chosen = np.flatnonzero((operations.lane == 0) & ~operations.error)
        if not len(chosen):
            return role, hold
        order = np.lexsort((operations.seq[chosen], operations.slot[chosen]))
        rows = chosen[order]
        ops = operations.take(rows)
        expert = np.zeros(len(ops), np.bool_) if table.expert is None else table.expert[ops.slot]
        found, waits = self._blocks(ops, table, expert)
        role[rows] = np.where(found != UNKNOWN, found, role[rows])
        hold[rows] = waits & ~held_before[rows] & (not final)
        return role, hold

    def _blocks(self, ops: Operations, table: CommTable, expert: Bool) -> tuple[U8, Bool]:
        n = len(ops)
        index = np.arange(n)
        gather, scatter = _GATHER[ops.op], _SCATTER[ops.op]
        first = np.r_[True, ops.slot[1:] != ops.slot[:-1]]
        # The run of gathers before each row: behind the last row that is none, or the slot's first.
        stop = np.where(~gather, index + 1, np.where(first, index, 0))
        before = np.r_[0, np.maximum.accumulate(stop)[:-1]]
        slot_start = np.maximum.accumulate(np.where(first, index, 0))
        before = np.maximum(before, slot_start)
        role = np.zeros(n, np.uint8)
        ends = np.flatnonzero(scatter)
        if len(ends):
            starts = before[ends]
            largest, smallest = _extremes(ops.bytes, starts, ends)
            fits, pattern = _patterns(ops, table, starts, ends, largest, smallest)
            accepted = self._accept(ops, starts, ends, fits, pattern, expert)
            role[largest[accepted]] = DISPATCH
            role[ends[accepted]] = COMBINE
        last = np.r_[first[1:], True]
        tails = np.flatnonzero(last & gather)
        waits = np.zeros(n, np.bool_)
        for tail in tails.tolist():  # one per communicator at most
            slot = int(ops.slot[tail])
            vector = ops.op[tail] == Func.ALL_GATHER_V
            if vector or expert[tail] or self._pattern[slot]:
                run_start = int(before[tail]) if gather[tail] else tail
                waits[min(run_start, tail) : tail + 1] = True
        return role, waits

    def _accept(
        self, ops: Operations, starts: I64, ends: I64, fits: Bool, pattern: U64, expert: Bool
    ) -> Bool:
        """Which blocks are a dispatch and its combine; remembers the newest patterns."""
        slot = ops.slot[ends]
        same = np.r_[False, (slot[1:] == slot[:-1]) & (pattern[1:] == pattern[:-1])]
        same &= pattern != 0
        again = same | np.r_[same[1:], False]
        newest = np.r_[slot[1:] != slot[:-1], True]
        oldest = np.r_[True, slot[1:] != slot[:-1]]
        again |= oldest & (pattern != 0) & (self._pattern[slot] == pattern)
        self._pattern[slot[newest]] = pattern[newest]
        vector = ops.op[ends] == Func.REDUCE_SCATTER_V
        accepted: Bool = fits & (vector | again | expert[ends])
        return accepted


def _extremes(size: U64, starts: I64, ends: I64) -> tuple[I64, I64]:
    """Rows with most and fewest bytes in each [start, end); the row `end` if it is empty."""
    largest, smallest = ends.copy(), ends.copy()
    some = np.flatnonzero(starts < ends)
    if len(some):
        lengths = ends[some] - starts[some]
        of = np.repeat(np.arange(len(some)), lengths)
        rows = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows += np.repeat(starts[some], lengths)
        order = np.lexsort((size[rows], of))
        tops = np.cumsum(lengths) - 1
        largest[some] = rows[order[tops]]
        smallest[some] = rows[order[tops - lengths + 1]]
    return largest, smallest


def _patterns(
    ops: Operations, table: CommTable, starts: I64, ends: I64, largest: I64, smallest: I64
) -> tuple[Bool, U64]:
    """-> which blocks could be a dispatch and its combine by their sizes, and what must repeat."""
    length = (ends - starts).astype(np.uint64)
    n_ranks = table.n_ranks[ops.slot[ends]].astype(np.uint64)
    vector = ops.op[ends] == Func.REDUCE_SCATTER_V
    both = (ops.op[largest] == Func.ALL_GATHER_V) == vector
    equal = ops.bytes[largest] * n_ranks == ops.bytes[ends]
    proportional = (ops.send_shape[largest] == ops.send_shape[ends]) & (ops.send_shape[ends] != 0)
    fits = (length > 0) & both & np.where(vector, proportional, equal) & (ops.bytes[ends] != 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = ops.bytes[smallest] / ops.bytes[largest].astype(np.float64)
    several = fits & ~vector & (length > 1) & (ratio < 1)
    pattern = ratio.view(np.uint64) ^ (length << np.uint64(56))
    return fits, np.where(several, np.maximum(pattern, np.uint64(1)), np.uint64(0))
