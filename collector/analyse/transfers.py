"""What a window's operations say of transfers, beside own times: how late each rank came after each
other, and lateness that its own time does not explain.

Both from a sample of the rows whose durations are known. A rank that comes last though its own time
is no longer than the others' was held up by the transfers before: it sends or receives slowly, or a
path to it is slow. Which, only times of single receives can tell (`paths`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import Tables
from lanterne.collector.analyse import ops
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.scoring import Clocks, Judged

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MATRIX_RANKS = 64  # largest communicator of which pairs are looked at
SAMPLE, SAMPLE_MOST = 128, 4096  # rows of one communicator in one window, about
LARGE, SAMPLE_LEAST = 1 << 18, 16  # cells (ranks times rows) that a large one's sample may have
PAIR_ROWS = 1 << 26  # of all matrices together: pairs times rows that a window may cost


class Lateness:
    """Of one communicator in one window: how long before its sender each receiver came."""

    def __init__(self, ranks: int) -> None:
        self.sum_ns = np.zeros((ranks, ranks))  # [receiver, sender]
        self.rows = 0

    def mean(self) -> F64 | None:
        """[receiver, sender] ns; NaN where clocks do not allow it; None: nothing seen."""
        return self.sum_ns / self.rows if self.rows else None


class Transfers:
    """Sums of the window being filled; `close` begins the next one."""

    def __init__(self, slots: int, members: int, wanted: set[int]) -> None:
        """wanted: communicators whose lateness is asked for; others may change it."""
        self.lateness: dict[int, Lateness] = {}
        self.wanted = wanted
        self.unexplained = np.zeros(members)  # [member] ns by which it came last for no own time
        self.rows = np.zeros(slots, np.int64)  # sampled
        self._taken = np.zeros(slots, np.int64)
        self._brought, self._brought_before = np.zeros((2, slots), np.int64)

    def close(self, slots: int, members: int) -> None:
        """`slots`, `members`: only so many were ever used."""
        self.lateness = {}
        self.unexplained[:members] = 0
        self.rows[:slots] = self._taken[:slots] = 0
        self._brought, self._brought_before = self._brought_before, self._brought
        self._brought[:slots] = 0

    def forget(self, slot: int, base: int, ranks: int) -> None:
        self.lateness.pop(slot, None)
        self.unexplained[base : base + ranks] = 0
        self.rows[slot] = self._taken[slot] = 0
        self._brought[slot] = self._brought_before[slot] = 0

    def add(self, j: Judged, tables: Tables, base_of: I64, clocks: Clocks) -> None:
        """J rows of communicators of one size, sorted by communicator; `base_of` [slot]."""
        timed = (j.evidence == ops.DEVICE) | (j.evidence == ops.BLOCKING)
        pick = np.flatnonzero(timed & (j.outcome == w.SCORED))
        if not len(pick) or j.ranks < 2:
            return
        pick = self._sample(j, tables, pick)
        self._unexplained(j, tables, pick, base_of)
        if not self.wanted or j.ranks > MATRIX_RANKS:
            return
        exchanges = pick[ops.POINT_TO_POINT[j.op[pick]]]
        for slot in np.unique(j.slot[exchanges]).tolist():
            if slot in self.wanted:
                self._lateness(j, slot, exchanges[j.slot[exchanges] == slot], base_of, clocks)

    def _sample(self, j: Judged, tables: Tables, pick: I64) -> I64:
        """Some of the rows, from all over the window; as many as the last one lets expect."""
        slot = j.slot[pick]
        np.add.at(self._brought, slot, 1)
        expected = np.maximum(self._brought_before[slot], self._brought[slot])
        wanted = np.isin(slot, np.fromiter(self.wanted, np.int64, len(self.wanted)))
        room = PAIR_ROWS // max(len(self.wanted) * j.ranks * j.ranks, 1)
        usual = min(max(LARGE // j.ranks, SAMPLE_LEAST), SAMPLE)
        most = np.where(wanted, np.clip(room, usual, SAMPLE_MOST), usual)
        every = np.maximum(-(-expected // most), 1)
        # Hashed, not counted: operations alternate, a fixed step would always meet the same kind.
        mixed = (tables.tag[j.rows[pick]] * 2_654_435_761 & 0xFFFFFFFF) >> 12
        chosen: I64 = pick[(mixed % every == 0) & (self._taken[slot] < 2 * most)]
        np.add.at(self._taken, j.slot[chosen], 1)
        return chosen

    def _unexplained(self, j: Judged, tables: Tables, pick: I64, base_of: I64) -> None:
        if j.foreign is not None:  # held up in another group: see `blame`
            pick = pick[~j.foreign[pick]]
        own = tables.own[j.cells[:, pick]].astype(np.float64)
        columns, last = np.arange(len(pick)), j.last[pick]
        mine = own[last, columns].copy()
        own[last, columns] = np.nan
        with np.errstate(invalid="ignore"):
            excess = np.clip(mine - np.fmax.reduce(own, axis=0), 0.0, j.margin[pick])
        rest = j.margin[pick] - excess
        known = np.isfinite(rest)
        np.add.at(self.unexplained, (base_of[j.slot[pick]] + last)[known], rest[known])
        np.add.at(self.rows, j.slot[pick][known], 1)

    def _lateness(self, j: Judged, slot: int, pick: I64, base_of: I64, clocks: Clocks) -> None:
        whole = pick if j.present is None else pick[j.present[:, pick].all(axis=0)]
        if not len(whole):
            return
        arrival = j.arrival[:, whole]
        at = (arrival - arrival[0]).astype(np.float64)
        node = clocks.node[base_of[slot] + np.arange(j.ranks)]
        if (node != node[0]).any():
            offset, error = clocks.of(node)
            at += np.where(np.isfinite(error), offset - offset[0], np.nan)[:, None]
        late = np.maximum(at[None, :, :] - at[:, None, :], 0.0).sum(axis=-1)
        same = node[:, None] == node[None, :]
        if np.isnan(late).any():  # one clock needs no offset
            plain = (arrival - arrival[0]).astype(np.float64)
            alike = np.maximum(plain[None, :, :] - plain[:, None, :], 0.0).sum(axis=-1)
            late = np.where(same, alike, late)
        found = self.lateness.setdefault(slot, Lateness(j.ranks))
        found.sum_ns += late
        found.rows += len(whole)
