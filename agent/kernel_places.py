"""Merged rows of kernels -> operations with numbers: whose they are, and whether they are sent.

Why and when is told in `kernels`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from lanterne.agent.events import (
    CAPTURED,
    DEVICE,
    I64,
    U8,
    U16,
    Bool,
    Operations,
    empty_operations,
)
from lanterne.agent.kernel_rows import Owner, Process, take
from lanterne.agent.unique import unique
from lanterne.probes.layout import Func

NUMBERS_FROM = 1 << 24  # above those of calls, and of the plugin's replays
ACTIVE_ROUNDS = 5  # windows without a kernel until calls count as not told of
_FUNCS = 64

_P2P = Func.P2P_GROUP
_KIND_OF_CALL = np.arange(256)
_KIND_OF_CALL[_FUNCS:] = _FUNCS - 1
_KIND_OF_CALL[
    [Func.SEND_RECV, Func.SEND, Func.RECV, Func.ALL_TO_ALL, Func.ALL_TO_ALL_V, Func.SCATTER,
     Func.GATHER]
] = _P2P  # fmt: skip

Placed = tuple[Operations, U8, Operations, U8]
NOTHING: Placed = (
    empty_operations(),
    np.empty(0, np.uint8),
    empty_operations(),
    np.empty(0, np.uint8),
)


class Places:
    """Shares `processes` and the counts of what is left out with `kernels`; not thread-safe."""

    def __init__(self, slots: int, processes: dict[int, Process], left_out: Counter[str]) -> None:
        self._processes = processes
        self._left_out = left_out
        self._round = 0
        self.owners: dict[int, Owner] = {}
        self._called = np.zeros((slots, _FUNCS), np.bool_)
        self._partial = np.zeros(slots, np.bool_)  # groups of sends that are no all-to-all
        self._uneven = np.zeros(slots, np.bool_)  # all-to-alls of different sizes
        # Zeros: no page of it is there before a kernel of the slot is told.
        self._told_before = np.zeros((slots, _FUNCS), np.int64)  # round
        self._numbers = np.zeros((slots, 2), np.int64)
        self._replaying: set[int] = set()
        self.operations = 0

    def know(self, owners: Iterable[Owner]) -> None:
        """Communicators that are identified."""
        for owner in owners:
            self.owners[owner.slot] = owner

    def forget(self, slots: U16) -> None:
        """Before slots are used for other communicators."""
        self._called[slots] = False
        self._partial[slots] = self._uneven[slots] = False
        self._told_before[slots] = 0
        self._numbers[slots] = 0
        for slot in slots.tolist():
            owner = self.owners.pop(slot, None)
            if owner is not None and owner.tgid in self._processes:
                self._processes[owner.tgid].started.pop(slot, None)

    def take_replaying(self) -> set[int]:
        """Processes of which replays of graphs became operations since this was last asked."""
        told, self._replaying = self._replaying, set()
        return told

    def note_calls(self, operations: Operations) -> None:
        """Which kinds of operation are called on which communicator, also into graphs."""
        kind = _KIND_OF_CALL[operations.op]
        self._called[operations.slot, kind] = True
        groups = kind == _P2P
        if groups.any():
            slot, op = operations.slot[groups], operations.op[groups]
            whole = np.isin(op, (Func.ALL_TO_ALL, Func.ALL_TO_ALL_V))
            self._partial[slot[~whole]] = True
            self._uneven[slot[op == Func.ALL_TO_ALL_V]] = True

    def place(self, rows: np.ndarray, since_ns: int, covered: Bool, round_: int) -> Placed:
        """-> replays with their roles, called ones with theirs (see `kernels.Told`)."""
        self._round = round_
        if not len(rows):
            return NOTHING
        slot = self._slots(rows)
        self._left_out["communicator"] += int((slot < 0).sum())
        rows, slot = take(rows, slot >= 0), slot[slot >= 0]
        doubled = covered[slot]
        self._left_out["plugin"] += int(doubled.sum())
        rows, slot = take(rows, ~doubled), slot[~doubled]
        distinct, which = np.unique(slot, return_inverse=True)
        numbered = np.array([self._numbered(s, since_ns) for s in distinct.tolist()], np.bool_)
        trusted = numbered[which]
        self._left_out["unplaced"] += int((~trusted).sum())
        rows, slot = take(rows, trusted), slot[trusted]
        order = np.lexsort((rows["start"], slot))
        rows, slot = take(rows, order), slot[order]
        in_order = self._in_order(rows, slot)
        self._left_out["order"] += int((~in_order).sum())
        rows, slot = take(rows, in_order), slot[in_order]
        self.operations += len(rows)
        self._told_before[slot, _KIND_OF_CALL[rows["func"]]] = round_ + ACTIVE_ROUNDS + 1
        operations = self._as_operations(rows, slot)
        graph = rows["graph"]
        self._replaying.update(unique(rows["tgid"][graph]).tolist())
        role = rows["role"].copy()
        return operations.take(graph), role[graph], operations.take(~graph), role[~graph]

    def _slots(self, rows: np.ndarray) -> I64:
        """-1 where the communicator cannot be told."""
        of: dict[tuple[int, int], list[int]] = {}
        for owner in self.owners.values():
            of.setdefault((owner.tgid, owner.library), []).append(owner.slot)
        key = (rows["tgid"] << 16) | (rows["library"].astype(np.int64) << 8) | rows["func"]
        distinct, inverse = np.unique(key, return_inverse=True)
        found = np.full(len(distinct), -1, np.int64)
        for i, packed in enumerate(distinct.tolist()):
            tgid, library, func = packed >> 16, packed >> 8 & 255, packed & 255
            mine = of.get((tgid, library), [])
            called = [s for s in mine if self._called[s, _KIND_OF_CALL[func]]]
            only = called or mine
            if len(only) == 1:
                found[i] = only[0]
        slots: I64 = found[inverse]
        return slots

    def _numbered(self, slot: int, since_ns: int) -> bool:
        owner = self.owners[slot]
        return not owner.complete or 0 < since_ns < owner.born_ns

    def _in_order(self, rows: np.ndarray, slot: I64) -> Bool:
        """Not those of a process of which a kernel came after a later one had its number."""
        fine = np.ones(len(rows), np.bool_)
        for number in unique(slot).tolist():
            mine = slot == number
            process = self._processes.get(int(rows["tgid"][mine][0]))
            if process is None:
                fine[mine] = False
                continue
            if int(rows["start"][mine][0]) < process.started.get(number, 0):
                process.break_off("order")
            if process.broken:
                fine[mine] = False
                continue
            process.started[number] = int(rows["start"][mine][-1])
        return fine

    def _as_operations(self, rows: np.ndarray, slot: I64) -> Operations:
        n = len(rows)
        if not n:
            return empty_operations()
        lane = (rows["func"] == _P2P).astype(np.int64)
        place = slot * 2 + lane
        order = np.argsort(place, kind="stable")
        sorted_place = place[order]
        first = np.flatnonzero(np.r_[True, sorted_place[1:] != sorted_place[:-1]])
        counts = np.diff(first, append=n)
        number = np.empty(n, np.int64)
        number[order] = np.arange(n) - np.repeat(first, counts)
        number += self._numbers[slot, lane]
        self._numbers[slot[order[first]], lane[order[first]]] += counts
        zero = np.zeros(n, np.uint64)
        return Operations(
            slot=slot.astype(np.uint16),
            seq=(NUMBERS_FROM + number).astype(np.uint32),
            lane=lane.astype(np.uint8),
            op=self._op(rows["func"], slot),
            evidence=np.full(n, DEVICE, np.uint8),
            flags=np.zeros(n, np.uint8),
            error=np.zeros(n, np.bool_),
            arrival_ns=rows["start"].astype(np.uint64),
            duration_ns=rows["length"].astype(np.uint64),
            bytes=zero,
            root=np.full(n, -1, np.int32),
            sync_blocked_ns=zero,
            send_shape=zero,
            receive_shape=zero,
            uniform=np.zeros(n, np.bool_),
            send_peers=np.zeros(n, np.uint16),
            receive_peers=np.zeros(n, np.uint16),
        )

    def _op(self, func: U8, slot: I64) -> U8:
        exchange = (func == _P2P) & self._called[slot, _P2P] & ~self._partial[slot]
        what = np.where(self._uneven[slot], np.uint8(Func.ALL_TO_ALL_V), np.uint8(Func.ALL_TO_ALL))
        found: U8 = np.where(exchange, what, func)
        return found

    def replaced(self, operations: Operations) -> Bool:
        """Calls in whose place kernels are sent."""
        kind = _KIND_OF_CALL[operations.op]
        told = self._round < self._told_before[operations.slot, kind]
        told &= (operations.evidence != DEVICE) & ((operations.flags & CAPTURED) == 0)
        return told
