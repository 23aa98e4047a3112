"""The queue of encoded batches that the collector has not acknowledged yet.

Thread-safe; every method but `data` returns at once. Batches go out in order, those of earlier runs
first. What is held in memory is bounded. Where the spool has a copy, memory gives up the batch and
`data` reads it again; without a copy the oldest is dropped, one that is not on its way if there is
any, and counted: a gap that the collector can see in the sequence.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lanterne.agent.segments import Key
from lanterne.agent.spool import Place

OVERSHOOT = 2  # times the bounds, for as long as the spool has not got round to it


@dataclass(slots=True)
class Item:
    key: Key
    contents: bytes | None  # None: in the spool only
    offered: float = 0.0  # monotonic seconds
    place: Place | None = None  # in the spool, where it is safe
    memory_only: bool = False  # the spool has given it up
    on_its_way: bool = False
    sent_before: bool = False
    not_before: float = 0.0  # monotonic seconds; after a RETRY
    taken: bool = False  # counts there, and is to be kept here all the same

    @property
    def sequence(self) -> int:
        return self.key[1]


@dataclass
class Backing:
    """What a spool does for the queue; nothing by default."""

    usable: Callable[[], bool] = lambda: False
    wake: Callable[[], None] = lambda: None
    read: Callable[[Key, Place], bytes | None] = field(default=lambda key, place: None)


class Outbox:
    def __init__(self, *, max_batches: int, max_bytes: int, epoch: int = 0):
        """The bounds are on what is in memory; `epoch` is this run's."""
        self._epoch = epoch
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._items: OrderedDict[Key, Item] = OrderedDict()
        self._memory: OrderedDict[Key, Item] = OrderedDict()  # of them, those with contents
        self._bytes = 0
        self._released: list[tuple[Key, Place]] = []
        self.changed = threading.Condition()
        self.backing = Backing()
        self.dropped: Counter[str] = Counter(
            queue_full=0, too_large=0, spool_full=0, spool_damaged=0
        )

    def put(self, sequence: int, data: bytes) -> None:
        with self.changed:
            key = (self._epoch, sequence)
            item = Item(key, data, time.monotonic())
            self._items[key] = self._memory[key] = item
            self._bytes += len(data)
            self._shrink(item)
            self.changed.notify_all()

    def _shrink(self, newest: Item) -> None:
        # The newest stays, however large: a bound below one batch would send nothing at all.
        while len(self._memory) > 1 and self._over(1):
            oldest = next(iter(self._memory.values()))
            if oldest.place is not None:
                self._let_go(oldest)
                continue
            if self.backing.usable():
                self.backing.wake()
                if not self._over(OVERSHOOT):
                    return
            if oldest.on_its_way:
                waiting = (i for i in self._memory.values() if not i.on_its_way)
                found = next(waiting, oldest)
                oldest = oldest if found is newest else found
            self._remove(oldest.key)
            self.dropped["queue_full"] += 1

    def _over(self, times: int) -> bool:
        return (
            len(self._memory) > times * self._max_batches or self._bytes > times * self._max_bytes
        )

    def next(self, now: float) -> tuple[Item | None, float | None]:
        """The first batch that is not on its way, now marked so; else how long until one is due.

        What the collector has taken comes after all that it has not: were there ever so much of it,
        the newest window would not be late.
        """
        with self.changed:
            due: Item | None = None
            wait = float("inf")
            for item in self._items.values():
                if item.on_its_way or (item.taken and due is not None):
                    continue
                if item.not_before > now:
                    wait = min(wait, item.not_before - now)
                    if item.taken:
                        continue
                    break  # what follows waits too: batches go out in order
                due = item
                if not item.taken:
                    break
            if due is None:
                return None, None if wait == float("inf") else wait
            due.on_its_way = True
            return due, None

    def data(self, item: Item) -> bytes | None:
        """What to send, from the disk if need be; None (dropped, counted) where it is gone."""
        contents, place = item.contents, item.place
        if contents is None and place is not None:
            contents = self.backing.read(item.key, place)
        if contents is None:
            with self.changed:
                # Without a place it was the spool's oldest when that was full.
                if self._remove(item.key):
                    self.dropped["spool_full" if item.place is None else "spool_damaged"] += 1
        return contents

    def done(self, key: Key) -> bool:
        """Accepted, known already, or refused for good. False where it had been dropped."""
        with self.changed:
            found = self._remove(key)
            self.changed.notify_all()
            return found

    def drop(self, key: Key, cause: str) -> None:
        """No collector can ever have it: lost, and counted."""
        with self.changed:
            if self._remove(key):
                self.dropped[cause] += 1
            self.changed.notify_all()

    def again(self, key: Key, not_before: float, *, taken: bool = False) -> None:
        with self.changed:
            item = self._items.get(key)
            if item is not None:
                item.on_its_way, item.not_before, item.taken = False, not_before, taken
            self.changed.notify_all()

    def all_again(self) -> None:
        """The connection is gone: whatever was on its way may or may not have arrived, and what had
        been taken may be forgotten."""
        with self.changed:
            for item in self._items.values():
                if item.taken:
                    item.not_before = 0.0
                item.on_its_way = item.taken = False

    # -- the spool's side -------------------------------------------------------------------

    def restore(self, found: Iterable[tuple[Key, Place]]) -> None:
        """What earlier runs left, oldest first: it goes out before all else."""
        with self.changed:
            for key, place in reversed(list(found)):
                if key not in self._items:
                    self._items[key] = Item(key, None, place=place)
                    self._items.move_to_end(key, last=False)
            self.changed.notify_all()

    def unspooled(self, before: float, most_bytes: int) -> list[tuple[Key, bytes]]:
        """Batches offered before `before` (monotonic seconds) that have no copy, oldest first."""
        found: list[tuple[Key, bytes]] = []
        size = 0
        with self.changed:
            for item in self._memory.values():
                if item.place is not None or item.memory_only or item.contents is None:
                    continue
                if item.offered > before or (found and size + len(item.contents) > most_bytes):
                    break
                found.append((item.key, item.contents))
                size += len(item.contents)
        return found

    def spooled(self, places: dict[Key, Place]) -> None:
        """These have a copy now."""
        with self.changed:
            for key, place in places.items():
                item = self._items.get(key)
                if item is None:  # acknowledged meanwhile
                    self._released.append((key, place))
                else:
                    item.place = place
            while self._over(1) and len(self._memory) > 1:
                oldest = next(iter(self._memory.values()))
                if oldest.place is None:
                    break
                self._let_go(oldest)

    def given_up(self, keys: Iterable[Key]) -> None:
        """The spool no longer keeps these: what only it had is lost, and counted."""
        with self.changed:
            for key in keys:
                item = self._items.get(key)
                if item is None:
                    continue
                item.place, item.memory_only = None, True
                # One on its way may yet be acknowledged; if it is not, `data` finds nothing.
                if item.contents is None and not item.on_its_way:
                    self._remove(key)
                    self.dropped["spool_full"] += 1

    def take_released(self) -> list[tuple[Key, Place]]:
        """Copies that are no longer wanted."""
        with self.changed:
            released, self._released = self._released, []
            return released

    # -- both -------------------------------------------------------------------------------

    def _let_go(self, item: Item) -> None:
        """Its copy on disk is enough."""
        if self._memory.pop(item.key, None) is not None and item.contents is not None:
            self._bytes -= len(item.contents)
            item.contents = None

    def _remove(self, key: Key) -> bool:
        item = self._items.pop(key, None)
        if item is None:
            return False
        if self._memory.pop(key, None) is not None and item.contents is not None:
            self._bytes -= len(item.contents)
        if item.place is not None:
            self._released.append((key, item.place))
        return True

    def __len__(self) -> int:
        return len(self._items)

    @property
    def bytes(self) -> int:
        """In memory."""
        return self._bytes
