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

# In the length, the lower half of a record's first word.
_BUSY = np.uint64(1 << 31)
_DISCARD = np.uint64(1 << 30)


class Ring:
    """One ring map; ``fd`` stays the caller's. Not safe for use by two threads at once."""

    def __init__(self, fd: int, size: int, dtype: np.dtype) -> None:
        if size <= 0 or size & (size - 1) or size % mmap.PAGESIZE:
            raise ValueError(f"ring size {size} is not a power of two of whole pages")
        if dtype.itemsize % 8:
            raise ValueError(f"records of {dtype.itemsize} bytes are not whole words")
        page = mmap.PAGESIZE
        self.dtype = dtype
        self.read = 0
        self.discarded = 0
        self._size = size
        self._stride = RING_HEADER_BYTES + dtype.itemsize
        self._consumer_map = mmap.mmap(fd, page, mmap.MAP_SHARED, offset=0)
        self._producer_map = mmap.mmap(
            fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        # Half the cost of an array's element, and `waiting` is asked twenty times a second.
        self._consumer = memoryview(self._consumer_map)[:8].cast("Q")
        self._producer = memoryview(self._producer_map)[:8].cast("Q")

    @property
    def submitted(self) -> int:
        """Records for which room has been taken so far, whether or not they are complete."""
        return self._producer[0] // self._stride

    @property
    def waiting(self) -> int:
        """Bytes of records for which room has been taken and that have not been drained."""
        return self._producer[0] - self._consumer[0]

    def drain(self, max_rows: int = 1 << 16) -> np.ndarray:
        """Copies out at most ``max_rows`` complete records, oldest first; never blocks.

        Stops before a record that a program is still writing. Discarded records are left out.
        """
        consumer = self._consumer[0]
        rows = min((self._producer[0] - consumer) // self._stride, max_rows)
        if rows <= 0:
            return np.empty(0, self.dtype)
        # As words: numpy copies structured rows field by field, several times as slow.
        words = np.frombuffer(
            self._producer_map,
            np.uint64,
            rows * self._stride // 8,
            mmap.PAGESIZE + consumer % self._size,
        ).reshape(rows, -1)
        length = words[:, 0].copy()
        busy = (length & _BUSY).nonzero()[0]
        if busy.size:
            rows = int(busy[0])
            words, length = words[:rows], length[:rows]
        content = words[:, RING_HEADER_BYTES // 8 :]
        discarded = (length & _DISCARD) != 0
        content = content[~discarded] if discarded.any() else content.copy()
        records: np.ndarray = content.view(self.dtype).reshape(-1)
        self.discarded += rows - len(records)
        # Only now: the kernel may overwrite what lies before the consumer position.
        self._consumer[0] = consumer + rows * self._stride
        self.read += len(records)
        return records

    def close(self) -> None:
        self._consumer.release()
        self._producer.release()
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
