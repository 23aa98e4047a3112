"""Aligning: the same operation of all ranks of a communicator, side by side.

A *table* is one (communicator, lane): for `width` consecutive sequence numbers it holds a dense
array [rank, seq mod width] of each column. Rank-major, because one batch brings a run of sequence
numbers of one rank: its cells lie side by side, and a row over all ranks is one strided read. All
tables are slices of flat arrays shared by all, so one fancy-index assignment scatters the events of
many batches and communicators at once, and the cost per event does not grow with either.

A cell is filled when its lap (seq // width, in its `meta`) is that of its row, so that a row is
reused without clearing it. Widths are odd: with a sampling stride of a power of two the sampled
sequence numbers still fall on all rows. A row is ready when every rank is in (`scatter`), when its
deadline has passed (`expire`), or when a newer sequence number needs its place.
Pure: no IO, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lanterne.collector.moved import Moved

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

PRESENT = 1
META_EVIDENCE, META_ROLE, META_FLAGS, META_OP, META_LAP = 1, 3, 5, 8, 16
EMPTY, OPEN, DONE = 0, 1, 2
FIRST_WIDTH = 255


class Extents:
    """First-fit allocator of [start, start + size) ranges of one flat array."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        self.used = 0
        self.high = 0

    def take(self, size: int) -> int:
        """Start of a free range of `size`, or -1."""
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[i : i + 1] = [(start + size, length - size)] if length > size else []
                self.used += size
                self.high = max(self.high, start + size)
                return start
        return -1

    def give(self, start: int, size: int) -> None:
        """Return a range that `take` gave."""
        self.used -= size
        at = bisect_left(self._free, (start, size))
        if at < len(self._free) and self._free[at][0] == start + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == start:
            start, before = self._free.pop(at - 1)
            size += before
        insort(self._free, (start, size))


@dataclass
class Events:
    """Columns of events to scatter, all of length R; `table` indexes Tables."""

    table: npt.NDArray[np.int32]
    rank: I64
    seq: I64
    arrival: I64
    duration: npt.NDArray[np.float32]
    own: npt.NDArray[np.float32]
    prev: npt.NDArray[np.int32]
    sync: npt.NDArray[np.float32]
    size: npt.NDArray[np.float32]
    meta: npt.NDArray[np.uint32]  # PRESENT and the META_ fields below META_LAP


@dataclass
class Counts:
    """Events that could not be aligned, by cause."""

    late: int = 0
    duplicate: int = 0
    overrun: int = 0
    no_room: int = 0
    grown: int = field(default=0)


class Tables:
    """All alignment tables; `cells` and `rows` bound the memory (44 bytes a cell, 25 a row)."""

    def __init__(self, *, cells: int, rows: int, tables: int) -> None:
        # Zeroed memory that is never touched is never resident, so the bounds may be generous.
        self.arrival = np.zeros(cells, np.int64)
        self.duration = np.zeros(cells, np.float32)
        self.own = np.zeros(cells, np.float32)
        self.prev = np.zeros(cells, np.int32)
        self.wait = np.zeros(cells, np.float32)
        self.sync = np.zeros(cells, np.float32)
        self.size = np.zeros(cells, np.float32)
        self.meta = np.zeros(cells, np.uint32)
        self.tag = np.zeros(rows, np.int64)
        self.filled = np.zeros(rows, np.int32)
        self.need = np.zeros(rows, np.int32)
        self.since = np.zeros(rows, np.int64)
        self.state = np.zeros(rows, np.uint8)
        self.table_of = np.zeros(rows, np.int32)
        self.pick = np.zeros(rows, np.int32)  # scratch of `_unique`
        self.base = np.zeros(tables, np.int64)
        self.width = np.zeros(tables, np.int64)
        self.ranks = np.zeros(tables, np.int64)
        self.row_base = np.zeros(tables, np.int64)
        self.newest = np.full(tables, -1, np.int64)
        self.cells = Extents(cells)
        self.rows = Extents(rows)
        self.counts = Counts()
        self._moved = Moved()

    def open(self, table: int, ranks: int, width: int = FIRST_WIDTH) -> bool:
        """Make `table` for `ranks`; False when the bounds leave no room."""
        width |= 1
        while width >= 31:
            base = self.cells.take(ranks * width)
            if base >= 0:
                row_base = self.rows.take(width)
                if row_base >= 0:
                    self._place(table, ranks, width, base, row_base)
                    return True
                self.cells.give(base, ranks * width)
            width = (width // 2) | 1
        return False

    def _place(self, table: int, ranks: int, width: int, base: int, row_base: int) -> None:
        self.base[table], self.width[table] = base, width
        self.ranks[table], self.row_base[table] = ranks, row_base
        self.newest[table] = -1
        self.meta[base : base + ranks * width] = 0
        rows = slice(row_base, row_base + width)
        self.tag[rows] = -1
        self.filled[rows] = 0
        self.need[rows] = ranks
        self.state[rows] = EMPTY
        self.table_of[rows] = table

    def clear(self, table: int) -> None:
        """Forget every row: the sequence numbers of this table start anew."""
        if self.ranks[table]:
            ranks, width = int(self.ranks[table]), int(self.width[table])
            self._place(table, ranks, width, int(self.base[table]), int(self.row_base[table]))

    def close(self, table: int) -> None:
        """Give the table's memory back."""
        if self.ranks[table]:
            width = int(self.width[table])
            self.cells.give(int(self.base[table]), int(self.ranks[table]) * width)
            self._vacate(int(self.row_base[table]), width)
            self.ranks[table] = 0

    def _vacate(self, row_base: int, width: int) -> None:
        rows = slice(row_base, row_base + width)
        self.tag[rows] = -1
        self.state[rows] = EMPTY
        self.need[rows] = self.filled[rows] = 0
        self.rows.give(row_base, width)

    def cells_of(self, rows: I64, ranks: int) -> I64:
        """[ranks, len(rows)] cell numbers of rows whose tables all have `ranks` ranks."""
        table = self.table_of[rows]
        first = self.base[table] + (rows - self.row_base[table])
        width = self.width[table]
        if len(table) and bool((table == table[0]).all()):
            outer: I64 = np.add.outer(np.arange(ranks) * width[0], first)
            return outer
        return np.arange(ranks)[:, None] * width[None, :] + first[None, :]

    def laps_of(self, rows: I64) -> npt.NDArray[np.uint32]:
        lap = self.tag[rows] // self.width[self.table_of[rows]]
        return (lap & 0xFFFF).astype(np.uint32)

    def cell_index(self, table: npt.NDArray[np.int32], rank: I64, seq: I64) -> tuple[I64, I64]:
        """-> (cell, row) of events, both flat indices."""
        width = self.width[table]
        column = seq % width
        return self.base[table] + rank * width + column, self.row_base[table] + column

    def crowded(self, table: npt.NDArray[np.int32], seq: I64) -> list[tuple[int, int]]:
        """Tables too narrow for these events -> (table, rows needed)."""
        newest, width = self.newest[table], self.width[table]
        if newest.min() >= 0 and bool((np.abs(seq - newest) * 8 <= width * 3).all()):
            return []
        low = np.full(len(self.newest), np.iinfo(np.int64).max)
        high = np.full(len(self.newest), -1)
        np.minimum.at(low, table, seq)
        np.maximum.at(high, table, seq)
        touched = np.flatnonzero(high >= 0)
        spread = np.maximum(high[touched], self.newest[touched]) - low[touched]
        narrow = spread * 4 > self.width[touched] * 3
        return [(int(t), int(s)) for t, s in zip(touched[narrow], spread[narrow], strict=True)]

    def grow(self, table: int, width: int) -> bool:
        """Widen a table, keeping its open rows. False when there is no room: nothing changed.
        `rename` must follow, once for all tables that are widened."""
        ranks, old_width = int(self.ranks[table]), int(self.width[table])
        old_base, old_rows = int(self.base[table]), int(self.row_base[table])
        width |= 1
        base = self.cells.take(ranks * width)
        if base < 0:
            return False
        row_base = self.rows.take(width)
        if row_base < 0:
            self.cells.give(base, ranks * width)
            return False
        live = old_rows + np.flatnonzero(self.tag[old_rows : old_rows + old_width] >= 0)
        tags, filled = self.tag[live], self.filled[live]
        since, state = self.since[live], self.state[live]
        source, laps = self.cells_of(live, ranks), self.laps_of(live)
        present = (self.meta[source] >> META_LAP == laps) & (self.meta[source] & PRESENT != 0)
        newest = int(self.newest[table])
        self._place(table, ranks, width, base, row_base)
        self.newest[table] = newest
        target_rows = row_base + tags % width
        target = base + np.arange(ranks)[:, None] * width + tags % width
        for column in (
            self.arrival, self.duration, self.own, self.prev, self.wait, self.sync, self.size
        ):  # fmt: skip
            column[target] = column[source]
        to = np.full(ranks * old_width, -1)
        to[source - old_base] = target
        self._moved.add(old_base, to)
        meta = (self.meta[source] & 0xFFFF) | (((tags // width) & 0xFFFF) << META_LAP)
        self.meta[target] = np.where(present, meta, 0).astype(np.uint32)
        self.tag[target_rows], self.filled[target_rows] = tags, filled
        self.since[target_rows], self.state[target_rows] = since, state
        self.cells.give(old_base, ranks * old_width)
        self._vacate(old_rows, old_width)
        self.counts.grown += 1
        return True

    def rename(self, cells: I64) -> I64:
        """After `grow`: cells are named by what they are now, in `prev` and in a column of somebody
        else's -> where the latter named what is no longer there.
        """
        if not self._moved:
            return np.zeros(0, np.int64)
        gone = self._moved.rename(self.prev[: self.cells.high])
        self.own[gone] = np.nan  # without the wait that is to be taken off it says nothing
        elsewhere = self._moved.rename(cells)
        self._moved = Moved()
        return elsewhere

    def displaced(self, row: I64, seq: I64) -> I64:
        """Open rows that these events would overwrite: score them first."""
        over = row[(seq > self.tag[row]) & (self.state[row] == OPEN)]
        return self._unique(over)

    def scatter(self, e: Events, cell: I64, row: I64, now_ns: int) -> I64:
        """Write events into their cells -> rows that are now complete.

        Late, duplicate and overrun events are dropped and counted.
        """
        claims = e.seq > self.tag[row]
        if claims.any():
            new = row[claims]
            wanted = e.seq[claims]
            self.tag[new] = wanted
            if bool((self.tag[new] != wanted).any()):
                np.maximum.at(self.tag, new, wanted)
            new = self._unique(new)
            self.filled[new] = 0
            self.state[new] = OPEN
            self.since[new] = now_ns
            np.maximum.at(self.newest, self.table_of[new], self.tag[new])
        lap = ((e.seq // self.width[e.table]) & 0xFFFF).astype(np.uint32)
        meta = e.meta | (lap << META_LAP)
        current = self.tag[row] == e.seq
        late = ~current | (self.state[row] == DONE)
        old = self.meta[cell]
        again = current & (old & PRESENT != 0) & (old >> META_LAP == lap)
        bad = late | again
        good: Bool | slice = slice(None)
        if bad.any():
            self.counts.duplicate += int(again.sum())
            overrun = ~current & claims
            self.counts.overrun += int(overrun.sum())
            self.counts.late += int((late & ~again & ~overrun).sum())
            good = ~bad
            cell, row, meta = cell[good], row[good], meta[good]
        self.meta[cell] = meta
        self.arrival[cell] = e.arrival[good]
        self.duration[cell] = e.duration[good]
        self.own[cell] = e.own[good]
        self.prev[cell] = e.prev[good]
        self.wait[cell] = np.nan
        self.sync[cell] = e.sync[good]
        self.size[cell] = e.size[good]
        if len(row):
            low = int(row.min())  # bincount over the span is ten times faster than np.add.at
            added = np.bincount(row - low)
            self.filled[low : low + len(added)] += added.astype(np.int32)
        return self._unique(row[self.filled[row] >= self.need[row]])

    def expire(self, before_ns: int) -> I64:
        """Open rows whose first event came before `before_ns`."""
        high = self.rows.high
        return np.flatnonzero((self.state[:high] == OPEN) & (self.since[:high] < before_ns))

    def done(self, rows: I64) -> None:
        self.state[rows] = DONE

    def _unique(self, rows: I64) -> I64:
        """Each row once, in linear time: the last writer of a scratch cell keeps it."""
        order = np.arange(len(rows), dtype=np.int32)
        self.pick[rows] = order
        kept: I64 = rows[self.pick[rows] == order]
        return kept
