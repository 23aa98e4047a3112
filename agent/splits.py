"""Bytes of a token of PyTorch's all-to-alls, from the split sizes of the call above them.

`alltoall_base` tells how many rows a rank sends (probes/splits.py), the transport below it how many
bytes; a row is a token. The calls of a process group reach its transport in their order, so the
k-th belongs to the k-th operation, operations from before the first call left out. A pair whose
bytes are no multiple of its rows is none: it is counted in `unmatched` and tells nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.agent.events import I32, I64, U16, Bool, Operations, Records
from lanterne.probes.layout import Func

KEPT_ROUNDS = 3  # windows that a call waits for its operation
MAX_HELD = 1 << 16

_HELD = np.dtype(
    [("slot", "<i8"), ("enter", "<u8"), ("sent", "<i8"), ("received", "<i8"), ("round", "<i8")]
)


class Splits:
    """One per agent; not thread-safe."""

    def __init__(self) -> None:
        self._held = np.empty(0, _HELD)
        self._round = 0
        self.unmatched = 0

    def add(self, records: Records, slots: U16) -> None:
        """Records of func Splits, with the slot of the communicator that their group uses."""
        rows = np.empty(len(records), _HELD)
        rows["slot"], rows["enter"] = slots, records["enter_ns"]
        rows["sent"], rows["received"] = records["count"], records["stream"]
        rows["round"] = self._round
        joined = np.concatenate([self._held, rows])
        self.unmatched += max(0, len(joined) - MAX_HELD)
        self._held = joined[-MAX_HELD:]

    def forget(self, slots: U16) -> None:
        self._held = self._held[~np.isin(self._held["slot"], slots)]

    def attach(self, operations: Operations) -> Operations:
        """Ends a window: its operations, with the bytes of a row as `root` where they are known."""
        held = self._held
        held = held[np.lexsort((held["enter"], held["slot"]))]
        which = np.flatnonzero(
            (operations.op == Func.ALL_TO_ALL_V) & np.isin(operations.slot, held["slot"])
        )
        if len(which):
            slot = operations.slot[which].astype(np.int64)
            order = np.lexsort((operations.seq[which], slot))
            which, slot = which[order], slot[order]
            heads = held[np.searchsorted(held["slot"], slot)]
            since = operations.arrival_ns[which] >= heads["enter"]
            which, slot = which[since], slot[since]
            at, found = _partner(slot, held["slot"])
            row, told = _row_bytes(operations, which[found], held[at[found]])
            root: I32 = operations.root.copy()
            root[which[found][told]] = row[told]
            operations = replace(operations, root=root)
            self.unmatched += int((~told).sum()) + int((~found).sum())
            left = np.ones(len(held), np.bool_)
            left[at[found]] = False
            held = held[left]
        old = self._round - held["round"] >= KEPT_ROUNDS
        self.unmatched += int(old.sum())
        self._held = held[~old]
        self._round += 1
        return operations


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
