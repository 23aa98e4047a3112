"""Bytes of a token of PyTorch's all-to-alls, from the split sizes of the call above them.

The call tells how many rows a rank sends (probes/splits.py), the transport below it how many bytes;
a row is a token. Gloo exchanges in another thread: the calls of a process group reach its transport
in their order, so the k-th belongs to the k-th operation, operations from before the first call
left out. NCCL's sends follow in the thread of the call: the group of the first is its operation,
and an all-to-all however few peers it has. Where two calls share a group neither tells anything.

A pair whose bytes are no multiple of its rows is none: it is counted in `unmatched` and tells
nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.agent.events import CAPTURED, I32, I64, NO_SLOT, U16, U64, Bool, Operations, Records
from lanterne.probes.layout import Flag, Func

KEPT_ROUNDS = 3  # windows that a call waits for its operation
MAX_HELD = 1 << 16

_HELD = np.dtype(
    [("slot", "<i8"), ("seq", "<i8"), ("enter", "<u8"), ("sent", "<i8"), ("received", "<i8"),
     ("round", "<i8"), ("thread", "<u8")]
)  # fmt: skip
_BY_ORDER = -1  # in the place of a number


class Splits:
    """One per agent; not thread-safe."""

    def __init__(self) -> None:
        self._held = np.empty(0, _HELD)
        self._waiting = np.empty(0, _HELD)  # for the first send of their thread
        self._round = 0
        self.unmatched = 0

    def add(self, records: Records, slots: U16) -> None:
        """Records of func Splits, with the slot of the communicator that their group uses."""
        rows = self._rows(records)
        rows["slot"] = slots
        self._held = self._bounded(self._held, rows)

    def wait(self, records: Records) -> None:
        """Records of func Splits whose sends will tell the communicator."""
        self._waiting = self._bounded(self._waiting, self._rows(records))

    def place(self, records: Records, slots: U16) -> None:
        """Finds the sends of those that wait, among operations in drained order."""
        calls = self._waiting
        if not len(calls) or not len(records):
            return
        flags = records["flags"]
        lane = (flags & np.uint8(Flag.P2P) != 0) & (flags & np.uint8(Flag.BLOCKING) == 0)
        of = _threads(records)
        at = np.flatnonzero(lane & np.isin(of, calls["thread"]))
        thread = np.concatenate([calls["thread"], of[at]])
        enter = np.concatenate([calls["enter"], records["enter_ns"][at]])
        order = np.lexsort((enter, thread))
        after = np.append(order[1:], -1)  # the next row, where it is of the same thread
        after[np.append(thread[order[1:]] != thread[order[:-1]], True)] = -1
        of_call = order < len(calls)
        calls, after = calls[order[of_call]], after[of_call]
        self._waiting = calls[after < 0]
        sends = after >= len(calls)
        first = at[after[sends] - len(calls)]
        found = calls[sends]
        found["slot"], found["seq"] = slots[first], records["seq"][first]
        known = slots[first] != NO_SLOT
        self.unmatched += int(((after >= 0) & ~sends).sum()) + int((~known).sum())
        self._held = self._bounded(self._held, found[known])

    def forget(self, slots: U16) -> None:
        self._held = self._held[~np.isin(self._held["slot"], slots)]

    def attach(self, operations: Operations) -> Operations:
        """Ends a window: its operations, with the bytes of a row as `root` where they are known."""
        # Of a group with one send it is the peer.
        groups = (operations.op == Func.ALL_TO_ALL_V) & (operations.lane == 1)
        operations = replace(operations, root=np.where(groups, np.int32(-1), operations.root))
        if len(self._held):
            numbered = self._held["seq"] != _BY_ORDER
            operations, ordered = self._by_order(operations, self._held[~numbered])
            operations, numbers = self._by_number(operations, self._held[numbered])
            self._held = self._young(np.concatenate([ordered, numbers]))
        self._waiting = self._young(self._waiting)
        self._round += 1
        return operations

    def _rows(self, records: Records) -> np.ndarray:
        rows = np.zeros(len(records), _HELD)
        rows["enter"], rows["thread"] = records["enter_ns"], _threads(records)
        rows["sent"], rows["received"] = records["count"], records["stream"]
        rows["round"], rows["seq"] = self._round, _BY_ORDER
        return rows

    def _bounded(self, held: np.ndarray, rows: np.ndarray) -> np.ndarray:
        joined = np.concatenate([held, rows])
        self.unmatched += max(0, len(joined) - MAX_HELD)
        return joined[-MAX_HELD:]

    def _young(self, held: np.ndarray) -> np.ndarray:
        old = self._round - held["round"] >= KEPT_ROUNDS
        self.unmatched += int(old.sum())
        return held[~old]

    def _by_order(self, operations: Operations, held: np.ndarray) -> tuple[Operations, np.ndarray]:
        """-> and the calls that are left."""
        held = held[np.lexsort((held["enter"], held["slot"]))]
        which = np.flatnonzero(
            (operations.op == Func.ALL_TO_ALL_V) & np.isin(operations.slot, held["slot"])
        )
        if not len(which):
            return operations, held
        slot = operations.slot[which].astype(np.int64)
        order = np.lexsort((operations.seq[which], slot))
        which, slot = which[order], slot[order]
        heads = held[np.searchsorted(held["slot"], slot)]
        since = operations.arrival_ns[which] >= heads["enter"]
        which, slot = which[since], slot[since]
        at, found = _partner(slot, held["slot"])
        self.unmatched += int((~found).sum())
        operations = self._told(operations, which[found], held[at[found]])
        left = np.ones(len(held), np.bool_)
        left[at[found]] = False
        return operations, held[left]

    def _by_number(self, operations: Operations, held: np.ndarray) -> tuple[Operations, np.ndarray]:
        """-> and the calls that are left."""
        key = held["slot"] << 32 | held["seq"]
        groups = np.flatnonzero(operations.lane == 1)
        if not len(groups):
            return operations, held
        number = operations.slot[groups].astype(np.int64) << 32 | operations.seq[groups]
        keys, first, which_key, times = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
        ordered = np.argsort(number, kind="stable")
        at, there = _partner(keys, number[ordered])
        if not there.any():
            return operations, held
        shared = there & (times > 1)
        self.unmatched += int(times[shared].sum())
        alone = there & (times == 1)
        which = groups[ordered[at[alone]]]
        op = operations.op.copy()
        op[which] = Func.ALL_TO_ALL_V
        operations = replace(operations, op=op)
        # What goes into a graph or fails moves nothing now.
        moved = ~operations.error[which] & (operations.flags[which] & np.uint8(CAPTURED) == 0)
        operations = self._told(operations, which[moved], held[first[alone][moved]])
        return operations, held[~there[which_key]]

    def _told(self, operations: Operations, which: I64, calls: np.ndarray) -> Operations:
        row, fits = _row_bytes(operations, which, calls)
        self.unmatched += int((~fits).sum())
        root: I32 = operations.root.copy()
        root[which] = np.where(fits, row, -1)
        return replace(operations, root=root)


def _threads(records: Records) -> U64:
    threads: U64 = records["tgid"].astype(np.uint64) << np.uint64(32) | records["tid"]
    return threads


def _partner(slot: I64, held: I64) -> tuple[I64, Bool]:
    """For the k-th row of each slot the position of the k-th of `held`, both sorted; and whether
    there is one."""
    first = np.searchsorted(slot, slot)
    at = np.searchsorted(held, slot) + np.arange(len(slot)) - first
    inside = np.minimum(at, max(len(held) - 1, 0))
    return inside, (at < len(held)) & (held[inside] == slot)


def _row_bytes(operations: Operations, which: I64, calls: np.ndarray) -> tuple[I64, Bool]:
    """Bytes of a row (0: nothing was sent), and whether call and operation fit together."""
    sent, rows = operations.bytes[which].astype(np.int64), calls["sent"]
    row = sent // np.maximum(rows, 1)
    fits: Bool = np.where(rows > 0, (row * rows == sent) & (row > 0), sent == 0)
    fits &= row < np.iinfo(np.int32).max
    return row, fits
