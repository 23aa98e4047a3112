"""The bounded queue of encoded batches that the collector has not acknowledged yet.

Thread-safe; every method returns at once. Batches go out in order. Beyond the bounds the oldest
goes first, one that is not on its way if there is any, and is counted: a gap that the collector
can see in the sequence.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class Item:
    sequence: int
    data: bytes
    on_its_way: bool = False
    sent_before: bool = False
    not_before: float = 0.0  # monotonic seconds; after a RETRY


class Outbox:
    def __init__(self, *, max_batches: int, max_bytes: int):
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._items: OrderedDict[int, Item] = OrderedDict()
        self._bytes = 0
        self.changed = threading.Condition()
        self.dropped = 0

    def put(self, sequence: int, data: bytes) -> None:
        with self.changed:
            self._items[sequence] = Item(sequence, data)
            self._bytes += len(data)
            # The newest stays, however large: a bound below one batch would send nothing at all.
            while len(self._items) > 1 and (
                len(self._items) > self._max_batches or self._bytes > self._max_bytes
            ):
                waiting = (i for i in self._items.values() if not i.on_its_way)
                oldest = next(waiting)
                if oldest.sequence == sequence:
                    oldest = next(iter(self._items.values()))
                self._remove(oldest.sequence)
                self.dropped += 1
            self.changed.notify_all()

    def next(self, now: float) -> tuple[Item | None, float | None]:
        """The first batch that is not on its way, now marked so; else how long until one is due."""
        with self.changed:
            for item in self._items.values():
                if item.on_its_way:
                    continue
                if item.not_before > now:  # what follows waits too: batches go out in order
                    return None, item.not_before - now
                item.on_its_way = True
                return item, None
            return None, None

    def done(self, sequence: int) -> bool:
        """Accepted, known already, or refused for good. False where it had been dropped."""
        with self.changed:
            found = self._remove(sequence)
            self.changed.notify_all()
            return found

    def again(self, sequence: int, not_before: float) -> None:
        with self.changed:
            item = self._items.get(sequence)
            if item is not None:
                item.on_its_way, item.not_before = False, not_before
            self.changed.notify_all()

    def all_again(self) -> None:
        """The connection is gone: whatever was on its way may or may not have arrived."""
        with self.changed:
            for item in self._items.values():
                item.on_its_way = False

    def _remove(self, sequence: int) -> bool:
        item = self._items.pop(sequence, None)
        if item is None:
            return False
        self._bytes -= len(item.data)
        return True

    def __len__(self) -> int:
        return len(self._items)

    @property
    def bytes(self) -> int:
        return self._bytes
