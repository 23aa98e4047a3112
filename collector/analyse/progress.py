"""How far each rank's operations have been told: which were lost, and which will not come.

An agent tells the operations of a rank in their order. A jump in the sequence numbers of a rank
therefore means that operations between them were lost, and a row of the alignment tables that all
ranks have gone past is as full as it will be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import OPEN, Tables
from lanterne.collector.analyse.gather import Flow
from lanterne.collector.analyse.registry import Registry

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

EARLIEST_NS = 2 * 10**9  # batches of one second of different nodes may come so far apart


class Progress:
    """[2 * member + lane] newest sequence number (-1 none) and when it was told (0 never)."""

    def __init__(self, members: int) -> None:
        # Members are set by `forget` when they are given: until then their memory is not touched.
        self._newest = np.zeros(2 * members, np.int64)
        self._told = np.zeros(2 * members, np.int64)
        self._scratch = np.zeros(2 * members, np.int64)
        self._began: dict[int, int] = {}  # by table: when something was told of it first

    def forget(self, slot: int, base: int, ranks: int) -> None:
        cells = slice(2 * base, 2 * (base + ranks))
        self._newest[cells], self._told[cells] = -1, 0
        self._began.pop(2 * slot, None)
        self._began.pop(2 * slot + 1, None)

    def add(self, f: Flow, now_ns: int) -> Bool | None:
        """Count rows, in order of process and time -> which of them have lost operations between
        them and the one of their process before; None: no row has.
        """
        cell = 2 * f.member + (f.table & 1)
        low = int(cell.min())
        count = np.bincount(cell - low)
        touched = np.flatnonzero(count)
        count, touched = count[touched], touched + low
        before = self._newest[touched]
        self._scratch[cell[::-1]] = f.seq[::-1]
        first = self._scratch[touched]
        self._scratch[cell] = f.seq
        last = self._scratch[touched]
        self._newest[touched] = np.maximum(before, last)
        self._told[touched] = now_ns
        for table in np.unique(f.table).tolist():
            self._began.setdefault(table, now_ns)
        stride = f.stride if isinstance(f.stride, int) else int(f.stride.min())
        whole = (last - first == (count - 1) * stride) & ((before < 0) | (first - before == stride))
        if whole.all():
            return None
        self._scratch[touched] = np.where(before < 0, -1, before)
        return self._after_losses(f, cell, np.unique(f.process[np.isin(cell, touched[~whole])]))

    def _after_losses(self, f: Flow, cell: I64, processes: npt.NDArray[np.int32]) -> Bool:
        """Rows between which and their predecessor something may be missing, of these processes."""
        rows = np.flatnonzero(np.isin(f.process, processes))
        order = rows[np.argsort(cell[rows], kind="stable")]
        same = np.concatenate([[False], cell[order[1:]] == cell[order[:-1]]])
        at = np.searchsorted(f.process, f.process[order])  # the first row of the process
        previous = np.where(same, np.concatenate([[0], order[:-1]]), at - 1)
        before = np.where(
            same, np.concatenate([[0], f.seq[order[:-1]]]), self._scratch[cell[order]]
        )
        stride = f.stride if isinstance(f.stride, int) else f.stride[order]
        jump = (before >= 0) & (f.seq[order] - before > stride)
        # Lost at any time between the two: the other operations of the process meanwhile, too.
        marks = np.zeros(len(f.seq) + 1, np.int64)
        np.add.at(marks, previous[jump] + 1, 1)
        np.add.at(marks, order[jump] + 1, -1)
        lost: Bool = np.cumsum(marks[:-1]) > 0
        return lost

    def passed(self, tables: Tables, registry: Registry, now_ns: int, deadline_ns: int) -> I64:
        """Open rows that no rank will add to: all have told of later operations, but those that
        have told of none for as long as the deadline.
        """
        high = tables.rows.high
        aged = (tables.state[:high] == OPEN) & (tables.since[:high] < now_ns - EARLIEST_NS)
        rows = np.flatnonzero(aged)
        if not len(rows):
            return rows
        of = tables.table_of[rows]
        least = np.full(len(tables.ranks), -1, np.int64)
        for table in np.unique(of).tolist():
            slot = registry.slots[table // 2]
            if slot is not None:
                cells = 2 * np.arange(slot.base, slot.base + slot.ranks) + (table & 1)
                told = self._told[cells]
                silent = told < now_ns - deadline_ns
                if now_ns - self._began.get(table, now_ns) < deadline_ns:
                    silent &= told > 0  # an agent may still be on its way
                if not silent.all():
                    least[table] = self._newest[cells[~silent]].min()
        found: I64 = rows[tables.tag[rows] <= least[of]]
        return found
