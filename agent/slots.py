"""A memory-mapped BPF array of state slots, and the freeing of the dead among them."""

from __future__ import annotations

import mmap

import numpy as np


class SlotTable:
    """Slots as the programs see them: ``owner`` is the field that is 0 in a free slot."""

    def __init__(self, fd: int, dtype: np.dtype, count: int, owner: str) -> None:
        page = mmap.PAGESIZE
        size = (dtype.itemsize * count + page - 1) // page * page
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
        self.slots = np.frombuffer(self._map, dtype, count)
        self._owner = owner

    def free(self, dead: np.ndarray) -> None:
        """Frees the slots where ``dead`` (bool, one per slot) holds and an owner is named."""
        owner = self.slots[self._owner]
        which = np.flatnonzero(dead & (owner != 0))
        for name in self.slots.dtype.names or ():
            if name != self._owner:
                self.slots[name][which] = 0
        owner[which] = 0  # last: from here on a program may claim the slot

    def used(self) -> float:
        """Share in use, 0 to 1."""
        return float(np.count_nonzero(self.slots[self._owner])) / len(self.slots)

    def close(self) -> None:
        self.slots = np.empty(0, self.slots.dtype)
        try:
            self._map.close()
        except BufferError:
            return
