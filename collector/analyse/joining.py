"""Sequence numbers of communicators that an agent met running.

Such an agent counts each rank's operations from where it attached, which is not the same operation
on every rank. The ranks leave a barrier together (or arrive at it within a fraction of a period),
so the shift between two ranks is the one under which the times of equal numbers agree. It must be
clearly better than its neighbours, or the communicator stays unaligned and is tried again. Shifts
that would set different operations against each other (a dispatch against a combine) are none:
beside a rank that is late by a large part of the period, the one after could else seem nearer.
Operations that came before the shifts were known are used to find them and not scored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops
from lanterne.collector.analyse.gather import Flow, take

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Series = tuple[I64, I64, I64]  # seq, time, kind: operation and role

ENOUGH = 32  # operations of each rank
PATIENCE_NS = 3 * 10**9
KEEP = 1 << 15  # held operations of one table
REACH = 6  # shifts tried to either side of the nearest in time
CLEARLY = 0.4  # of the second best's disagreement
UNLIKE = 0.2  # of the pairs that may be of different operations: what is told of them may be wrong
BASE = 1 << 20  # keeps numbers above 0 where no rank was seen from the beginning


class Joining:
    """Shifts of members, per lane. `late` is set by the engine from the registry."""

    def __init__(self, tables: int, members: int) -> None:
        self.late = np.zeros(tables // 2, bool)
        self._settled = np.zeros(tables, bool)
        self._shift = np.zeros((2, members), np.int64)
        self._known = np.zeros((2, members), bool)
        self._held: dict[int, list[Flow]] = {}
        self._since: dict[int, int] = {}
        self.rows_used = 0

    def forget(self, slot: int, base: int, ranks: int, *, late: bool) -> None:
        """Begin anew with a communicator."""
        self.late[slot] = late
        for table in (2 * slot, 2 * slot + 1):
            self._settled[table] = False
            self._held.pop(table, None)
            self._since.pop(table, None)
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
            self._hold(table, take(held, (held.table == table) & usable), now_ns)
            if now_ns - self._since[table] >= PATIENCE_NS or self._enough(table, seen):
                self._settle(table, complete, seen.get(table // 2, 0))
                self._since[table] = now_ns
        rest = take(flow, ~hold)
        return rest if len(rest.seq) else None

    def _hold(self, table: int, part: Flow, now_ns: int) -> None:
        self._since.setdefault(table, now_ns)
        held = self._held.setdefault(table, [])
        held.append(part)
        while len(held) > 1 and sum(len(p.seq) for p in held) > KEEP:
            held.pop(0)

    def _enough(self, table: int, seen: dict[int, int]) -> bool:
        member = np.concatenate([p.member for p in self._held[table]])
        _, counts = np.unique(member, return_counts=True)
        return len(counts) >= seen.get(table // 2, 1) and bool((counts >= ENOUGH).all())

    def _settle(self, table: int, complete: Bool, seen: int) -> None:
        parts = self._held[table]
        member = np.concatenate([p.member for p in parts])
        seq = np.concatenate([p.seq for p in parts])
        time = np.concatenate([_barrier_time(p) for p in parts])
        kind = np.concatenate([p.op.astype(np.int64) << 8 | p.role for p in parts])
        members = np.unique(member)
        if len(members) < seen:
            return
        of = {int(m): _sorted(*(c[member == m] for c in (seq, time, kind))) for m in members}
        whole = [m for m in of if complete[m]]
        reference = whole[0] if whole else max(of, key=lambda m: len(of[m][0]))
        base = 0 if whole else BASE
        shifts = {m: 0 if m == reference else _shift(of[m], of[reference]) for m in of}
        found = {m: s for m, s in shifts.items() if s is not None}
        if len(found) < len(of):
            return  # all or none: half a communicator aligned is worse than none
        lane = table & 1
        for m, s in found.items():
            self._shift[lane, m], self._known[lane, m] = s + base, True
        del self._held[table]

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

    def waiting(self, slot: int) -> bool:
        """Whether a communicator has operations that could not be aligned so far."""
        return bool(self.late[slot]) and (2 * slot in self._held or 2 * slot + 1 in self._held)


def _barrier_time(p: Flow) -> I64:
    """When the ranks were together: the end of a call that waits, else its arrival."""
    return p.arrival + np.where(p.evidence == ops.ENQUEUE, 0, p.duration)


def _sorted(seq: I64, time: I64, kind: I64) -> Series:
    order = np.argsort(seq)
    return seq[order], time[order], kind[order]


def _unlike(one: I64, other: I64) -> float:
    """Share of pairs whose operations, or whose roles where both are known, differ."""
    roles = (one & 0xFF > 0) & (other & 0xFF > 0)
    return float(np.mean(np.where(roles, one != other, one >> 8 != other >> 8)))


def _shift(mine: Series, reference: Series) -> int | None:
    """What to add to a rank's numbers to get the reference's; None where it is not clear."""
    seq, time, kind = mine
    ref_seq, ref_time, ref_kind = reference
    if len(seq) < 8 or len(ref_seq) < 8:
        return None
    at = int(np.abs(time - ref_time[len(ref_time) // 2]).argmin())
    nearest = int(np.abs(ref_time - time[at]).argmin())
    middle = int(ref_seq[nearest] - seq[at])
    step = max(1, int(np.diff(seq).min()))
    costs: dict[int, float] = {}
    for shift in range(middle - REACH * step, middle + REACH * step + 1, step):
        place = np.searchsorted(ref_seq, seq + shift).clip(0, len(ref_seq) - 1)
        match = ref_seq[place] == seq + shift
        if match.sum() >= 8 and _unlike(kind[match], ref_kind[place[match]]) <= UNLIKE:
            costs[shift] = float(np.median(np.abs(time[match] - ref_time[place[match]])))
    if len(costs) < 2:
        return None
    best, second = sorted(costs, key=costs.__getitem__)[:2]
    return best if costs[best] <= CLEARLY * costs[second] else None
