"""From (process, communicator pointer) to the row of the registry, for whole columns of records.

A pointer may be freed and used again: records from before a communicator's end belong to it,
whoever has the pointer now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.agent.commhash import MASK
from lanterne.agent.events import NO_SLOT, U16, U32, U64, Bool, Records, rows_of

RECENT_NS = 2_000_000_000
_TGID_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class _Ended:
    tgid: int
    pointer: int
    slot: int
    time_ns: int


class Lookup:
    """One row per slot; not thread-safe."""

    def __init__(self, rows: int) -> None:
        self._pointer = np.zeros(rows, np.uint64)
        self._tgid = np.zeros(rows, np.uint32)
        self._last_used = np.zeros(rows, np.uint64)
        self._alive = np.zeros(rows, np.bool_)
        self._owned = np.zeros(rows, np.bool_)  # alive, or ended and not given to another yet
        self._recent: deque[_Ended] = deque(maxlen=1024)
        self._keys: U64 = np.empty(0, np.uint64)
        self._key_slots: U16 = np.empty(0, np.uint16)
        self._stale = True

    def put(self, slot: int, tgid: int, pointer: int, now_ns: int) -> None:
        self._pointer[slot], self._tgid[slot] = pointer, tgid
        self._last_used[slot] = now_ns
        self._alive[slot] = self._owned[slot] = True
        self._stale = True

    def end(self, slot: int, tgid: int, pointer: int, time_ns: int) -> None:
        self._recent.append(_Ended(tgid, pointer, slot, time_ns))
        self._alive[slot] = False
        self._stale = True

    def release(self, slot: int) -> None:
        """Of an ended one: nothing belongs to it any more."""
        self._owned[slot] = False

    def used(self, slots: U16, time_ns: int) -> None:
        there = np.zeros(NO_SLOT + 1, np.bool_)
        there[slots] = True
        self._last_used[there[: len(self._alive)]] = time_ns

    def idle_longest(self) -> int:
        """Slot of the live communicator whose last operation is the oldest."""
        alive = np.flatnonzero(self._alive)
        return int(alive[np.argmin(self._last_used[alive])])

    def find(self, records: Records) -> tuple[U16, Bool]:
        """(slot of each record, mask of those that have none); slots are NO_SLOT there."""
        pointer = np.ascontiguousarray(records["comm"])
        tgid = np.ascontiguousarray(records["tgid"])
        key = pointer + tgid * _TGID_FACTOR
        slots, missing = self._search(key, pointer, tgid)
        self._correct_ended(records, key, slots, missing)
        return slots, missing

    def _search(self, key: U64, pointer: U64, tgid: U32) -> tuple[U16, Bool]:
        if self._stale:
            self._index()
        if not len(self._keys):
            return np.full(len(key), NO_SLOT, np.uint16), np.ones(len(key), np.bool_)
        at = np.searchsorted(self._keys, key)
        at[at == len(self._keys)] = 0
        slots = self._key_slots[at]
        # The key mixes two numbers into one: compare both, a false match is a wrong owner.
        missing = (self._pointer[slots] != pointer) | (self._tgid[slots] != tgid)
        slots[missing] = NO_SLOT
        return slots, missing

    def _index(self) -> None:
        slots: npt.NDArray[np.uint16] = np.flatnonzero(self._alive).astype(np.uint16)
        keys = self._pointer[slots] + self._tgid[slots] * _TGID_FACTOR
        order = np.argsort(keys)
        self._keys, self._key_slots = keys[order], slots[order]
        self._stale = False

    def _correct_ended(self, records: Records, key: U64, slots: U16, missing: Bool) -> None:
        if not self._recent:
            return
        entered = records["enter_ns"]
        oldest, newest = int(entered.min()), int(entered.max())
        while self._recent and self._recent[0].time_ns + RECENT_NS < newest:
            self._recent.popleft()
        # Newest end first, so that the earliest end after a record has the last word.
        ended = [e for e in reversed(self._recent) if e.time_ns > oldest and self._owned[e.slot]]
        if not ended:
            return
        keys = [_key(e.pointer, e.tgid) for e in ended]
        rows = np.flatnonzero(np.isin(key, np.array(keys, np.uint64)))
        if not len(rows):
            return
        some = rows_of(records, rows)
        for one in ended:
            mine = (some["comm"] == one.pointer) & (some["tgid"] == one.tgid)
            mine &= some["enter_ns"] < one.time_ns
            slots[rows[mine]] = one.slot
            missing[rows[mine]] = False


def _key(pointer: int, tgid: int) -> int:
    """What `find` computes for whole columns."""
    return (pointer + tgid * int(_TGID_FACTOR)) & MASK
