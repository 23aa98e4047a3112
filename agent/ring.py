"""Reads a BPF ring buffer of equally sized records as one numpy array.

The ring's memory (kernel/bpf/ringbuf.c): one page that we may write with the consumer position,
then, read-only, one page with the producer position and the data, mapped twice in a row so that a
record that wraps is still contiguous. Positions are byte counts that never wrap. A record is an
8-byte header (u32 length with two flag bits, u32 page offset) and its payload, padded to 8.
"""

from __future__ import annotations

import mmap
from types import TracebackType

import numpy as np

from lanterne.probes.layout import RING_HEADER_BYTES

_BUSY = np.uint32(1 << 31)
_DISCARD = np.uint32(1 << 30)


class Ring:
    """One ring map; ``fd`` stays the caller's. Not safe for use by two threads at once."""

    def __init__(self, fd: int, size: int, dtype: np.dtype) -> None:
        if size <= 0 or size & (size - 1) or size % mmap.PAGESIZE:
            raise ValueError(f"ring size {size} is not a power of two of whole pages")
        page = mmap.PAGESIZE
        self.dtype = dtype
        self.read = 0
        self.discarded = 0
        self._size = size
        self._stride = RING_HEADER_BYTES + (dtype.itemsize + 7) // 8 * 8
        self._consumer_map = mmap.mmap(fd, page, mmap.MAP_SHARED, offset=0)
        self._producer_map = mmap.mmap(
            fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._consumer = np.frombuffer(self._consumer_map, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_map, np.uint64, 1)
        self._framed = np.dtype(
            {
                "names": ["length", "record"],
                "formats": ["<u4", dtype],
                "offsets": [0, RING_HEADER_BYTES],
                "itemsize": self._stride,
            }
        )

    @property
    def submitted(self) -> int:
        """Records for which room has been taken so far, whether or not they are complete."""
        return int(self._producer[0]) // self._stride

    def drain(self, max_rows: int = 1 << 16) -> np.ndarray:
        """Copies out at most ``max_rows`` complete records, oldest first; never blocks.

        Stops before a record that a program is still writing. Discarded records are left out.
        """
        consumer = int(self._consumer[0])
        rows = min((int(self._producer[0]) - consumer) // self._stride, max_rows)
        if rows <= 0:
            return np.empty(0, self.dtype)
        framed = np.frombuffer(
            self._producer_map,
            self._framed,
            rows,
            mmap.PAGESIZE + consumer % self._size,
        )
        length = framed["length"].copy()
        busy = (length & _BUSY).nonzero()[0]
        if busy.size:
            rows = int(busy[0])
            framed, length = framed[:rows], length[:rows]
        discarded = (length & _DISCARD) != 0
        if discarded.any():
            records: np.ndarray = framed["record"][~discarded]
            self.discarded += rows - len(records)
        else:
            records = framed["record"].copy()
        # Only now: the kernel may overwrite what lies before the consumer position.
        self._consumer[0] = consumer + rows * self._stride
        self.read += len(records)
        return records

    def close(self) -> None:
        # numpy holds the maps open; they go with the arrays.
        self._consumer = self._producer = np.empty(0, np.uint64)
        for view in (self._consumer_map, self._producer_map):
            try:
                view.close()
            except BufferError:  # a caller still holds an array over it
                continue

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
