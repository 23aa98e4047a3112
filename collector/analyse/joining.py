"""Sequence numbers of communicators that an agent met running.

Such an agent counts each rank's operations from where it attached, which is not the same operation
on every rank. The shifts between them are found by the times of their operations (see `shifts`), or
the communicator stays unaligned and is tried again. Operations that came before the shifts were
known are used to find them and not scored.

Of two ranks at least one must have told every operation: where both told samples, by numbers that
begin at different operations, the true shift may be none of those that set any against each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.gather import Flow, take
from lanterne.collector.analyse.shifts import LEAST, Rows, joined, newest, rows_of, series, shift

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

ENOUGH = 32  # operations of each rank
PATIENCE_NS = 3 * 10**9
KEEP = 1 << 15  # held operations of one table, or so many of each rank where that is more:
KEEP_EACH = 4 * ENOUGH
DOUBT_NS = 30 * 10**9
BASE = 1 << 20  # a multiple of every stride; keeps numbers above 0


class Joining:
    """Shifts of members, per lane. `late` is set by the engine from the registry."""

    def __init__(self, tables: int, members: int) -> None:
        self.late = np.zeros(tables // 2, bool)
        self._shift = np.zeros((2, members), np.int64)
        self._known = np.zeros((2, members), bool)
        self._judged = np.zeros((2, tables // 2), np.int64)  # alike and unlike, by slot
        self._held: dict[int, list[Rows]] = {}
        self._since: dict[int, int] = {}  # by table: when it was tried last, or began
        self._tried: set[int] = set()
        self._doubted: dict[int, tuple[int, int]] = {}  # slot: (how often, not again before)
        self.rows_used = 0
        self.changes = 0  # of what is known

    def forget(self, slot: int, base: int, ranks: int, *, late: bool, fresh: bool = False) -> None:
        """Begin anew with a communicator; `fresh`: another one."""
        if fresh:
            self._doubted.pop(slot, None)
        self.changes += int(self.late[slot] or late)
        self.late[slot] = late
        self._judged[:, slot] = 0
        for table in (2 * slot, 2 * slot + 1):
            self._held.pop(table, None)
            self._since.pop(table, None)
            self._tried.discard(table)
        self._shift[:, base : base + ranks] = 0
        self._known[:, base : base + ranks] = False

    def align(
        self,
        flow: Flow,
        complete: Bool,
        offset: F64,
        seen: dict[int, int],
        now_ns: int,
    ) -> Flow | None:
        """Shift what can be shifted, hold back what cannot yet -> the rest.

        complete: [member] seen from its creation. offset: [row] of the node's clock, ns, NaN
        unknown. seen: ranks seen of each slot.
        """
        rows = self.late[flow.slot]
        if not rows.any():
            return flow
        lane = flow.table & 1
        known = self._known[lane, flow.member]
        seq = np.where(rows & known, flow.seq + self._shift[lane, flow.member], flow.seq)
        hold = rows & ~known & (flow.evidence > 0)
        flow.seq = np.maximum(seq, 0)
        if not hold.any():
            return flow
        self.rows_used += int(hold.sum())
        held = take(flow, hold)
        held.arrival = held.arrival + np.nan_to_num(offset[hold]).astype(np.int64)
        usable = ~np.isnan(offset[hold])
        for table in np.unique(held.table).tolist():
            ranks = seen.get(table // 2, 1)
            self._hold(table, take(held, (held.table == table) & usable), ranks, now_ns)
            if now_ns - self._since[table] >= PATIENCE_NS or self._enough(table, ranks):
                self._settle(table, complete, ranks)
                self._since[table] = now_ns
                self._tried.add(table)
        rest = take(flow, ~hold)
        return rest if len(rest.seq) else None

    def judged(self, slot: I64, unlike: Bool) -> None:
        """Rows with evidence that left the tables, and whether they set different operations
        against each other."""
        if self.late[slot].any():
            np.add.at(self._judged, (unlike.astype(np.intp), slot), 1)

    def doubtful(self, now_ns: int) -> list[int]:
        """Once a window: communicators that are mostly aligned wrongly and should be anew; each
        time that happens to one it is looked at less often."""
        alike, unlike = self._judged
        found = []
        for slot in np.flatnonzero(self.late & (unlike >= LEAST) & (unlike > alike)).tolist():
            times, not_before = self._doubted.get(slot, (0, 0))
            if now_ns >= not_before:
                self._doubted[slot] = times + 1, now_ns + (DOUBT_NS << min(times, 6))
                found.append(slot)
        self._judged[:] = 0
        return found

    def _hold(self, table: int, part: Flow, ranks: int, now_ns: int) -> None:
        self._since.setdefault(table, now_ns)
        held = self._held.setdefault(table, [])
        held.append(rows_of(part))
        each = max(KEEP // ranks, KEEP_EACH)
        if sum(map(len, held)) > 2 * each * ranks:
            held[:] = [newest(joined(held), each)]

    def _enough(self, table: int, ranks: int) -> bool:
        """Whether to try before the time has come, once."""
        held = self._held[table]
        if table in self._tried or sum(map(len, held)) < ENOUGH * ranks:
            return False
        _, counts = np.unique(np.concatenate([p.member for p in held]), return_counts=True)
        return len(counts) >= ranks and bool((counts >= ENOUGH).all())

    def _settle(self, table: int, complete: Bool, ranks: int) -> None:
        of, whole = series(joined(self._held[table]))
        if len(of) < ranks:
            return
        reference = max(of, key=lambda m: (whole[m], complete[m], len(of[m][0])))
        shifts = {reference: 0}
        for m in of.keys() - shifts:
            # Ranks seen from their creation sample the same operations.
            can = whole[m] or whole[reference] or complete[m]
            found = shift(of[m], of[reference]) if can else None
            if found is None:
                return  # all or none: half a communicator aligned is worse than none
            shifts[m] = found
        anchor = next((m for m in (reference, *of) if complete[m]), None)
        if anchor is None:
            # Steps repeat: what is sampled should be operations like this one, with evidence.
            seq = of[reference][0]
            base = 2 * BASE - int(seq[len(seq) // 2]) % BASE
        else:  # numbers of a rank that was seen from its creation are right as they are
            base = -shifts[anchor]
        lane = table & 1
        for m, s in shifts.items():
            self._shift[lane, m], self._known[lane, m] = s + base, True
        del self._held[table]
        self.changes += 1

    def comparable(self, slots: list[tuple[int, int, int]]) -> Bool:
        """(number, base, ranks) of slots -> [slot] whether the ranks' numbers are common ones."""
        found = ~self.late
        for slot, base, ranks in slots:
            if self.late[slot]:
                found[slot] = bool(self._known[0, base : base + ranks].all())
        return found

    def shifted(self, lane: npt.NDArray[np.uint8], member: I64, seq: I64) -> I64:
        """Sequence numbers as `align` makes them."""
        found: I64 = np.maximum(seq + self._shift[lane, member], 0)
        return found

    def known(self, slot: int, base: int, ranks: int) -> list[tuple[int, I64, I64]]:
        """(lane, members, shift of each) of a communicator, as far as they are found."""
        found = []
        for lane in (0, 1):
            members = base + np.flatnonzero(self._known[lane, base : base + ranks])
            if self.late[slot] and len(members):
                found.append((lane, members, self._shift[lane, members]))
        return found

    def waiting(self, slot: int) -> bool:
        """Whether a communicator has operations that could not be aligned so far."""
        return bool(self.late[slot]) and (2 * slot in self._held or 2 * slot + 1 in self._held)
