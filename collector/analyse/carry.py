"""Each process's last operation, so that the own time before the next one can be told."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import META_EVIDENCE, META_FLAGS, META_OP, META_ROLE, PRESENT, Events
from lanterne.collector.analyse import ops, own
from lanterne.collector.analyse.gather import I32, I64, U8, Flow


class Carry:
    """Each process's last operation, so that flushes join up."""

    def __init__(self, processes: int) -> None:
        # Set by `forget` when a process gets its number: until then memory is not touched.
        self.arrival = np.zeros(processes, np.int64)
        self.duration = np.zeros(processes, np.int64)
        self.cell = np.zeros(processes, np.int64)
        self.table = np.zeros(processes, np.int32)
        self.needs_wait = np.zeros(processes, bool)

    def forget(self, processes: list[int] | I64) -> None:
        self.arrival[processes] = -1

    def link(self, f: Flow, cell: I64, after_loss: npt.NDArray[np.bool_] | None = None) -> Events:
        """-> events with their own-time gap, where to find the wait to take off, and whether the
        previous operation was on another table (flag bit 0).

        Only operations with evidence are links: the others' times are order, not time. after_loss:
        [row] what came between it and the one before is not known, nor is its own time then.
        """
        own_gap = np.full(len(f.seq), np.nan, np.float32)
        prev = np.full(len(f.seq), -1, np.int32)
        foreign = np.zeros(len(f.seq), np.uint8)
        pick: npt.NDArray[np.int64] | slice = slice(None)
        if not f.evidence.all():
            pick = np.flatnonzero(f.evidence)
        process = f.process[pick]
        if len(process):
            own_gap[pick], prev[pick], foreign[pick] = self._chain(f, cell, pick, process)
        if after_loss is not None:
            own_gap[after_loss], prev[after_loss] = np.nan, -1
        meta = (
            PRESENT
            | (f.evidence.astype(np.uint32) << META_EVIDENCE)
            | (f.role.astype(np.uint32) << META_ROLE)
            | (((f.flags & ~np.uint8(1)) | foreign).astype(np.uint32) << META_FLAGS)
            | (f.op.astype(np.uint32) << META_OP)
        ).astype(np.uint32)
        return Events(
            table=f.table,
            rank=f.rank,
            seq=f.seq,
            arrival=f.arrival,
            duration=f.duration.astype(np.float32),
            own=own_gap,
            prev=prev,
            sync=f.sync.astype(np.float32),
            size=f.size.astype(np.float32),
            meta=meta,
        )

    def _chain(
        self, f: Flow, cell: I64, pick: I64 | slice, process: I32
    ) -> tuple[npt.NDArray[np.float32], I32, U8]:
        arrival, duration, table = f.arrival[pick], f.duration[pick], f.table[pick]
        cells = cell[pick]
        needs_wait = f.evidence[pick] == ops.ENQUEUE
        stride = f.stride if isinstance(f.stride, int) else f.stride[pick]
        first = np.flatnonzero(np.concatenate([[True], process[1:] != process[:-1]]))
        last = np.concatenate([first[1:] - 1, [len(process) - 1]])

        def shift(
            column: npt.NDArray[np.generic], carried: npt.NDArray[np.generic]
        ) -> npt.NDArray[np.generic]:
            before = np.empty(len(column), carried.dtype)
            before[1:] = column[:-1]
            before[first] = carried[process[first]]
            return before

        before: I64 = shift(arrival, self.arrival).astype(np.int64)
        gap = own.before_wait(
            arrival,
            before,
            shift(duration, self.duration),  # type: ignore[arg-type]
            stride,
        )
        unknown = (before < 0) | (before > arrival)
        gap[unknown] = np.nan
        if not isinstance(stride, int):
            # Another communicator's are told whole: what came between two of them is not known.
            uneven = np.minimum.reduceat(stride, first) != np.maximum.reduceat(stride, first)
            gap[np.repeat(uneven, last - first + 1)] = np.nan
        previous = np.where(
            shift(needs_wait, self.needs_wait).astype(bool) & ~unknown, shift(cells, self.cell), -1
        ).astype(np.int32)
        foreign = (shift(table, self.table) != table) & ~unknown
        ends = process[last]
        self.arrival[ends], self.duration[ends] = arrival[last], duration[last]
        self.cell[ends], self.table[ends] = cells[last], table[last]
        self.needs_wait[ends] = needs_wait[last]
        return gap, previous, foreign.astype(np.uint8)
