"""What to tell agents of the communicators that they met running.

Where `joining` has found what to add to the numbers of each rank, the agents are told it, so that
all ranks of a communicator sample the same operations. Where it has not, and a sample is asked for,
it is the turn of some to be told whole (see `turns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.joining import Joining
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.turns import Turns
from lanterne.collector.analyse.who import Slot

I64 = npt.NDArray[np.int64]

MAX_ROWS = 16_384  # of a node; as the schema says


class Told(NamedTuple):
    """Columns of proto Origins, little-endian, of one node."""

    epoch: int
    rows: int
    comm_hash: bytes
    rank: bytes
    lane: bytes
    offset: bytes
    whole: bytes


class Origins:
    """`update` once a snapshot; `news` gives what has changed."""

    def __init__(self, joining: Joining, registry: Registry) -> None:
        self.turns = Turns()
        self.dropped = 0  # rows beyond the bound of a node
        self._joining = joining
        self._registry = registry
        self._told: dict[int, Told] = {}  # by node number, never empty
        self._news: dict[str, Told] = {}
        self._made_of: object = None
        self._aligned: set[int] = set()
        self._states: dict[str, int] = {}

    def update(self, stride: int, now_ns: int) -> None:
        """stride: in force from now on."""
        r = self._registry
        waiting = {
            number: int((r.process[slot.base : slot.base + slot.ranks] >= 0).sum())
            for number, slot in self._late()
            if self._joining.waiting(number)
        }
        ranks = int((r.slot_of[: r.members_used] >= 0).sum())
        # At stride 1 all are told whole.
        self.turns.choose(waiting if stride > 1 else {}, ranks // stride, now_ns)
        made_of = (self._joining.changes, r.generation, tuple(self.turns.asked))
        if made_of != self._made_of:
            self._made_of = made_of
            self._tell()
        asked = len(self.turns.asked)
        self._states = {
            "aligned": len(self._aligned - waiting.keys()),
            "whole": asked,
            "waiting": len(waiting) - asked,
        }

    def states(self) -> dict[str, int]:
        """Communicators that were met running, by what is known of them."""
        return dict(self._states)

    def news(self) -> dict[str, Told]:
        """By node, what has changed since this was last asked; each is all that holds now."""
        news, self._news = self._news, {}
        return news

    def _late(self) -> Iterator[tuple[int, Slot]]:
        for number, slot in enumerate(self._registry.slots):
            if slot is not None and self._joining.late[number]:
                yield number, slot

    def _tell(self) -> None:
        now = self._by_node()
        names = self._registry.nodes
        for number in self._told.keys() | now.keys():
            told = now.get(number)
            if told != self._told.get(number):
                nothing = Told(names[number].head.epoch, 0, b"", b"", b"", b"", b"")
                self._news[names[number].head.node] = told or nothing
        self._told = now

    def _by_node(self) -> dict[int, Told]:
        parts = [part for number, slot in self._late() for part in self._rows(number, slot)]
        self._aligned = {int(self._registry.slot_of[part[0][0]]) for part in parts}
        if not parts:
            return {}
        member, comm_hash, lane, offset, whole = map(np.concatenate, zip(*parts, strict=True))
        r = self._registry
        node = r.node[member]
        rank = member - np.array([s.base if s else 0 for s in r.slots])[r.slot_of[member]]
        newest = np.array([n.head.epoch for n in r.nodes])
        order = np.argsort(node, kind="stable")
        order = order[(r.epoch[member] == newest[node])[order]]
        found = {}
        for number, rows in _groups(node, order):
            self.dropped += max(0, len(rows) - MAX_ROWS)
            pick = rows[:MAX_ROWS]
            found[number] = Told(
                int(newest[number]),
                len(pick),
                comm_hash[pick].astype("<u8").tobytes(),
                rank[pick].astype("<u4").tobytes(),
                lane[pick].astype("u1").tobytes(),
                offset[pick].astype("<i8").tobytes(),
                whole[pick].astype("u1").tobytes(),
            )
        return found

    def _rows(
        self, number: int, slot: Slot
    ) -> Iterator[tuple[I64, npt.NDArray[np.uint64], I64, I64, npt.NDArray[np.bool_]]]:
        """(member, hash, lane, offset, whole) of a communicator."""
        whole = number in self.turns.asked
        known = self._joining.known(number, slot.base, slot.ranks)
        if whole:
            process = self._registry.process[slot.base : slot.base + slot.ranks]
            seen = slot.base + np.flatnonzero(process >= 0)
            known = [(0, seen, np.zeros(len(seen), np.int64))]
        for lane, members, shift in known:
            one = np.ones(len(members), np.int64)
            yield (
                members,
                np.full(len(members), slot.comm_hash, np.uint64),
                lane * one,
                shift,
                np.full(len(members), whole),
            )


def _groups(key: npt.NDArray[np.int32], order: I64) -> Iterator[tuple[int, I64]]:
    """Of row numbers in the order of their keys: (key, its rows)."""
    if len(order):
        cuts = np.flatnonzero(np.diff(key[order])) + 1
        for rows in np.split(order, cuts):
            yield int(key[rows[0]]), rows
