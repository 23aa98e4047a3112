"""Which call launched what the GPU ran: operations that a profiler plugin timed, joined to calls.

*Which call.* `enqueue_ns` lies inside the call that launched the operation, so the call is the last
one of its kind (a function, or sends and receives) on the communicator that began before it. That
is certain once a later call of the kind is known, or once so much time is over that every record
has been read. Collectives of one group are launched together at its end: they are told apart
counting back from the last one by NCCL's own numbers. A call is taken once; where the bytes of a
group of sends and receives are known on both sides they must agree. What has no call is counted in
`unmatched` and sent nowhere: a join is never guessed.
"""

from __future__ import annotations

import numpy as np

from lanterne.agent.events import (
    GROUPED,
    I64,
    U8,
    U16,
    Bool,
    Operations,
    concatenate,
    empty_operations,
)
from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler.usdt import OpFlag

MAX_ROWS = 1 << 17  # of operations, and of calls, that wait for each other
KEPT_ROUNDS = 60  # windows that a call waits for the GPU
KINDS = 32
P2P = 16  # the kind of sends and receives; below it: the function

KIND = np.full(256, KINDS - 1, np.int64)
KIND[:16] = np.arange(16)
KIND[[Func.SEND_RECV, Func.SEND, Func.RECV, Func.P2P_GROUP]] = P2P
# NCCL makes these of sends and receives; the plugin sees only those.
_KIND_OF_CALL = KIND.copy()
_KIND_OF_CALL[[Func.ALL_TO_ALL, Func.ALL_TO_ALL_V, Func.SCATTER, Func.GATHER]] = P2P

ROW = np.dtype(
    [("key", "<i8"), ("seq", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("enqueue", "<i8"),
     ("bytes", "<i8"), ("received", "<i8"), ("tasks", "<i8"), ("peer", "<i4"), ("func", "u1"),
     ("flags", "u1"), ("part", "<u2"), ("number", "<i8"), ("before", "<i8", (2,)),
     ("since", "<i8")]
)  # fmt: skip


class Calls:
    """Calls, and operations without their call so far; not thread-safe."""

    def __init__(self) -> None:
        self.eager = np.empty(0, ROW)  # operations that wait for their call
        self.unmatched = 0
        self._calls = empty_operations()
        self._roles = np.empty(0, np.uint8)
        self._round = np.empty(0, np.int64)
        self._taken = np.empty(0, np.bool_)

    def forget(self, slots: U16) -> None:
        """Before slots are used for other communicators."""
        if len(self.eager):
            self.eager = self.eager[~np.isin(self.eager["key"] // KINDS, slots)]
        if len(self._calls):
            self._keep(~np.isin(self._calls.slot, slots))

    def expect(self, rows: np.ndarray) -> None:
        """Operations that were not replayed from a graph: each has a call."""
        self.eager = np.concatenate([self.eager, rows])

    def add(self, calls: Operations, role: U8, round_: int) -> None:
        joined = concatenate([self._calls, calls])
        key = _key(joined)
        order = np.lexsort((joined.arrival_ns, key))
        self._calls = joined.take(order)
        self._roles = np.concatenate([self._roles, role])[order]
        new = np.full(len(role), round_)
        self._round = np.concatenate([self._round, new])[order]
        self._taken = np.concatenate([self._taken, np.zeros(len(role), np.bool_)])[order]

    def match(self, settled: int) -> tuple[np.ndarray, Operations, U8]:
        """-> operations, their calls and those calls' roles. Every record of before `settled` has
        been read: what has no call by now will have none."""
        rows, calls = self.eager, self._calls
        nothing = self.eager[:0], empty_operations(), np.empty(0, np.uint8)
        if not len(rows):
            return nothing
        if not len(calls):
            self._give_up(rows, rows["enqueue"] < settled)
            return nothing
        rows = rows[np.lexsort((rows["seq"], rows["key"]))]
        key, enter = _key(calls), calls.arrival_ns.astype(np.int64)
        base = int(min(enter.min(), rows["enqueue"].min()))
        width = int(max(enter.max(), rows["enqueue"].max())) - base + 2
        at = np.searchsorted(
            key * width + (enter - base), rows["key"] * width + (rows["enqueue"] - base), "right"
        )
        later = np.minimum(at, len(calls) - 1)
        has_later = (at < len(calls)) & (key[later] == rows["key"])
        at -= 1
        known = (at >= 0) & (key[np.maximum(at, 0)] == rows["key"])
        at = np.maximum(at, 0)
        together = known & (rows["key"] % KINDS != P2P) & ((calls.flags[at] & GROUPED) != 0)
        old = rows["enqueue"] < settled
        ready = known & (old | (has_later & ~together))
        at = self._back_from_last(rows, at, together & ready)
        fits = ready & (at >= 0) & self._fits(rows, np.maximum(at, 0))
        chosen = np.flatnonzero(fits)
        # By number: the earlier of two for one call has it.
        _, first = np.unique(at[chosen], return_index=True)
        chosen = chosen[np.sort(first)]
        used = np.zeros(len(rows), np.bool_)
        used[chosen] = True
        self._give_up(rows, ~used & (ready | old), used)
        at = at[chosen]
        self._taken[at] = True
        return rows[chosen], self._calls.take(at), self._roles[at]

    def _back_from_last(self, rows: np.ndarray, at: I64, together: Bool) -> I64:
        """Several of one launch: the last by number is the last call, the others come before."""
        if not together.any():
            return at
        end = np.r_[(at[1:] != at[:-1]) | (rows["key"][1:] != rows["key"][:-1]), True]
        ends = np.flatnonzero(end)
        last = rows["seq"][np.repeat(ends, np.diff(ends, prepend=-1))]
        back: I64 = np.where(together, at - (last - rows["seq"]), at)
        key = _key(self._calls)
        back[together & (key[np.maximum(back, 0)] != rows["key"])] = -1
        return back

    def _fits(self, rows: np.ndarray, at: I64) -> Bool:
        calls = self._calls
        free = ~self._taken[at] & (calls.arrival_ns[at].astype(np.int64) <= rows["enqueue"])
        sized = (rows["key"] % KINDS == P2P) & (calls.lane[at] == 1)
        sized &= (rows["flags"] & np.uint8(OpFlag.NO_SIZE)) == 0
        fits: Bool = free & (~sized | (calls.bytes[at].astype(np.int64) == rows["bytes"]))
        return fits

    def _give_up(self, rows: np.ndarray, lost: Bool, used: Bool | None = None) -> None:
        self.unmatched += int(lost.sum())
        keep = ~lost if used is None else ~(lost | used)
        kept = rows[keep]
        self.unmatched += max(0, len(kept) - MAX_ROWS)
        self.eager = kept[-MAX_ROWS:]

    def tidy(self, round_: int) -> None:
        """Ends a window: drops calls that have waited too long."""
        age = round_ - self._round
        keep = (age < KEPT_ROUNDS) & ~(self._taken & (age > 4))
        keep[: max(0, len(keep) - 2 * MAX_ROWS)] = False
        if not keep.all():
            self._keep(keep)

    def _keep(self, keep: Bool) -> None:
        self._calls, self._roles = self._calls.take(keep), self._roles[keep]
        self._round, self._taken = self._round[keep], self._taken[keep]


def _key(calls: Operations) -> I64:
    kind = np.where(calls.lane == 1, P2P, _KIND_OF_CALL[calls.op])
    return calls.slot.astype(np.int64) * KINDS + kind
