"""Running figures of every communicator and rank: totals since start, and two windows.

A *pane* is one window's sums; shares are over the closed pane and the one being filled, so the span
slides by one window. Flat arrays, indexed by slot or member (see `registry`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# What became of a row; every row that leaves the tables gets exactly one.
OUTCOMES = (
    "scored",
    "order_only",  # evidence 0 on every rank
    "mixed",  # evidence differs between the ranks
    "misaligned",  # operations or sizes differ between the ranks
    "missing",  # too few ranks came in time
    "first",  # first operation of a communicator: lazy connection
    "rooted",  # broadcast and the like: no barrier
    "captured",  # recorded into a CUDA graph
    "alone",  # one rank
    "clock",  # arrivals of two nodes, clocks not known well enough
)
(SCORED, ORDER_ONLY, MIXED, MISALIGNED, MISSING, FIRST, ROOTED, CAPTURED, ALONE, CLOCK) = range(10)


class Pane:
    """Sums of one window."""

    def __init__(self, slots: int, members: int) -> None:
        self.wait = np.zeros((4, members))  # by evidence; ns
        self.blame = np.zeros((4, members))
        self.outcome = np.zeros((slots, len(OUTCOMES)), np.int64)
        self.evidence = np.zeros((slots, 4), np.int64)  # scored rows
        self.complete = np.zeros(slots, np.int64)
        self.rows = np.zeros(slots, np.int64)
        self.first_ns = np.full(slots, np.iinfo(np.int64).max)
        self.last_ns = np.full(slots, -1)
        self.span_ns = np.zeros(slots)

    def zero(self, slots: int, members: int) -> None:
        """Begin anew; `slots`, `members`: only so many were ever used."""
        self.wait[:, :members] = 0
        self.blame[:, :members] = 0
        for array in (self.outcome, self.evidence, self.span_ns, self.complete, self.rows):
            array[:slots] = 0
        self.first_ns[:slots] = np.iinfo(np.int64).max
        self.last_ns[:slots] = -1

    def forget(self, slot: int, base: int, ranks: int) -> None:
        members = slice(base, base + ranks)
        self.wait[:, members] = 0
        self.blame[:, members] = 0
        self.outcome[slot], self.evidence[slot] = 0, 0
        self.complete[slot] = self.rows[slot] = 0
        self.first_ns[slot], self.last_ns[slot] = np.iinfo(np.int64).max, -1
        self.span_ns[slot] = 0


@dataclass
class OwnBlock:
    """Own times of some rows of communicators of one size; [rank, row]."""

    ranks: int
    group: I64  # slot * KINDS + kind
    own: npt.NDArray[np.float32]
    blocked: npt.NDArray[np.float32]
    size: npt.NDArray[np.float32]


class Window:
    def __init__(self, slots: int, members: int, own_cells: int, window_ns: int) -> None:
        self._window_ns = window_ns
        self.current, self.closed = Pane(slots, members), Pane(slots, members)
        self.wait_total = np.zeros((4, members))
        self.blame_total = np.zeros((4, members))
        self.comm_total = np.zeros(members)  # NaN: no durations; set by `forget`
        self.compute_total = np.zeros(members)
        self.instances = np.zeros(slots, np.int64)
        self.complete_total = np.zeros(slots, np.int64)
        self.last_end = np.zeros(slots, np.int64)
        self._ever = np.zeros((slots, 4), bool)
        self.blocks: list[OwnBlock] = []
        self.own_cells = 0
        self.own_limit = own_cells
        self.own_skipped = 0

    def forget(self, slot: int, base: int, ranks: int) -> None:
        """Start a communicator at zero."""
        members = slice(base, base + ranks)
        self.current.forget(slot, base, ranks)
        self.closed.forget(slot, base, ranks)
        self.wait_total[:, members] = 0
        self.blame_total[:, members] = 0
        self.comm_total[members] = np.nan
        self.compute_total[members] = 0
        self._ever[slot] = False
        self.instances[slot] = self.complete_total[slot] = self.last_end[slot] = 0

    def store(self, block: OwnBlock) -> None:
        """Keep own times for the window's medians, up to the bound."""
        if self.own_cells + block.own.size > self.own_limit:
            self.own_skipped += block.own.size
            return
        self.blocks.append(block)
        self.own_cells += block.own.size

    def expected(self, slot: I64) -> I64:
        """Rows with own times that the window brings of each communicator: so many as it has by
        now, or as the one before had in as much time. A backlog that fell into that one, of hours
        or of rows that lacked ranks, thins out nothing.
        """
        before, now = (p.rows[slot] - p.outcome[slot, MISSING] for p in (self.closed, self.current))
        longer = np.maximum(self.closed.span_ns[slot] / self._window_ns, 1.0)
        rows: I64 = np.maximum(np.ceil(before / longer).astype(np.int64), now)
        return rows

    def ever(self) -> npt.NDArray[np.bool_]:
        """[slot, evidence] whether any instance of it was ever scored: totals that stay."""
        return self._ever | (self.current.evidence > 0)

    def spans(self) -> F64:
        """[slot] ns observed in the two panes; 0 where nothing was."""
        return self.closed.span_ns + _span(self.current, self.closed)

    def close(self, slots: int, members: int) -> list[OwnBlock]:
        """End the window -> its own times. `slots`, `members`: only so many were ever used."""
        self._ever[:slots] |= self.current.evidence[:slots] > 0
        self.current.span_ns[:] = _span(self.current, self.closed)
        self.current, self.closed = self.closed, self.current
        self.current.zero(slots, members)
        blocks, self.blocks, self.own_cells = self.blocks, [], 0
        return blocks


def _span(pane: Pane, before: Pane) -> F64:
    """Observed time of a pane: since the last instance of the one before, if there was one."""
    start = np.where(before.last_ns >= 0, np.minimum(before.last_ns, pane.first_ns), pane.first_ns)
    return np.where(pane.last_ns >= 0, np.maximum(pane.last_ns - start, 0), 0).astype(np.float64)
