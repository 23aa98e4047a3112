"""Several batches -> one set of event columns, linked to each process's previous operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import META_EVIDENCE, META_FLAGS, META_OP, META_ROLE, PRESENT, Events
from lanterne.collector.analyse import ops, own
from lanterne.collector.analyse.registry import Resolved
from lanterne.collector.batch import DecodedBatch

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

ARRIVAL_BITS = 43  # 2.4 hours: longest spread of arrivals of one node in one flush kept in order


@dataclass
class Flow:
    """Columns of the instances of several batches, length R, ordered by process and arrival."""

    table: I32
    slot: I32
    rank: I64
    member: I64
    process: I32
    seq: I64
    op: U8
    role: U8
    evidence: U8
    flags: U8
    arrival: I64
    duration: I64
    size: I64
    sync: I64
    stride: I64 | int


def collect(batches: list[tuple[DecodedBatch, Resolved]]) -> Flow | None:
    """Join the instances of batches; rows of dropped communicators are left out."""
    some = [(b, r) for b, r in batches if len(b.instances.seq)]
    if not some:
        return None
    counts = [len(b.instances.seq) for b, _ in some]
    offsets = np.cumsum([0] + [len(r.slot) for _, r in some[:-1]])
    index = np.concatenate([b.instances.communicator for b, _ in some])
    index += np.repeat(offsets, counts)
    slot = np.concatenate([r.slot for _, r in some])[index]
    process = np.concatenate([r.process for _, r in some])[index]
    arrival = np.concatenate([b.instances.arrival_ns for b, _ in some])
    strides = [b.stride for b, _ in some]
    # Nodes' clocks start at different times: order by arrival within a node only.
    origins = np.array([int(b.instances.arrival_ns.min()) for b, _ in some])
    lowest: dict[str, int] = {}
    for (b, _), o in zip(some, origins.tolist(), strict=True):
        lowest[b.node] = min(o, lowest.get(b.node, o))
    origin = np.repeat(np.array([lowest[b.node] for b, _ in some]), counts)
    key = np.minimum(arrival - origin, (1 << ARRIVAL_BITS) - 1)
    key += process.astype(np.int64) << ARRIVAL_BITS
    order: I64 | slice = slice(None)
    if bool((slot < 0).any()):
        keep = np.flatnonzero(slot >= 0)
        order = keep[np.argsort(key[keep], kind="stable")]
    elif bool((key[1:] < key[:-1]).any()):
        order = np.argsort(key, kind="stable")  # a merge of sorted runs: the common case

    def join(name: str) -> npt.NDArray[np.generic]:
        joined: npt.NDArray[np.generic] = np.concatenate(
            [getattr(b.instances, name) for b, _ in some]
        )[order]
        return joined

    slot = slot[order]
    if not len(slot):
        return None
    rank = np.concatenate([r.rank for _, r in some])[index][order]
    member = np.concatenate([r.member for _, r in some])[index][order]
    one = max(strides) == 1
    return Flow(
        table=slot * 2 + join("lane").astype(np.int32),
        slot=slot,
        rank=rank,
        member=member,
        process=process[order],
        seq=join("seq"),  # type: ignore[arg-type]
        op=join("op"),  # type: ignore[arg-type]
        role=join("role"),  # type: ignore[arg-type]
        evidence=join("evidence"),  # type: ignore[arg-type]
        flags=join("flags"),  # type: ignore[arg-type]
        arrival=arrival[order],
        duration=join("duration_ns"),  # type: ignore[arg-type]
        size=join("bytes"),  # type: ignore[arg-type]
        sync=join("sync_blocked_ns"),  # type: ignore[arg-type]
        stride=1 if one else np.repeat(np.array(strides), counts)[order],
    )


def take(f: Flow, pick: npt.NDArray[np.bool_]) -> Flow:
    """The rows of `f` that are picked."""
    values = {k: (v[pick] if isinstance(v, np.ndarray) else v) for k, v in vars(f).items()}
    return Flow(**values)


class Carry:
    """Each process's last operation, so that flushes join up."""

    def __init__(self, processes: int) -> None:
        self.arrival = np.full(processes, -1, np.int64)
        self.duration = np.zeros(processes, np.int64)
        self.cell = np.full(processes, -1, np.int64)
        self.table = np.full(processes, -1, np.int32)
        self.needs_wait = np.zeros(processes, bool)

    def forget(self, processes: list[int]) -> None:
        self.arrival[processes] = -1

    def link(self, f: Flow, cell: I64) -> Events:
        """-> events with their own-time gap, where to find the wait to take off, and whether the
        previous operation was on another table (flag bit 0).

        Only operations with evidence are links: the others' times are order, not time.
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
        previous = np.where(
            shift(needs_wait, self.needs_wait).astype(bool) & ~unknown, shift(cells, self.cell), -1
        ).astype(np.int32)
        foreign = (shift(table, self.table) != table) & ~unknown
        ends = process[last]
        self.arrival[ends], self.duration[ends] = arrival[last], duration[last]
        self.cell[ends], self.table[ends] = cells[last], table[last]
        self.needs_wait[ends] = needs_wait[last]
        return gap, previous, foreign.astype(np.uint8)
