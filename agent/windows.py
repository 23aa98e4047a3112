"""Operations of one window -> the columns of a batch: instances, summaries, traffic.

No IO, no clock: `close` is told what the time is and what the registry knows. An operation belongs
to the window in which its record was read. Operations of communicators whose identity is not known
yet are kept for `patience` windows, within `max_waiting` rows, then dropped and counted. The last
all-to-all of a communicator may be held back one window for its role (see `roles`). Whatever the
drains were, sums over all windows equal sums over all records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lanterne.agent.events import (
    BLOCKING,
    CAPTURED,
    DEVICE,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
    CommTable,
    Operations,
    concatenate,
    empty_operations,
    scaled_bytes,
)
from lanterne.agent.groups import PeerBytes, empty_peers, merge_peers
from lanterne.agent.roles import Roles, classify
from lanterne.probes.layout import Func

HISTOGRAM_BINS = 48
OP_CODES = 256


@dataclass(frozen=True)
class Summaries:
    slot: U16
    op: U8
    role: U8
    evidence: U8
    count: U64
    errors: U64
    bytes: U64
    duration_sum_ns: U64
    duration_min_ns: U64
    duration_max_ns: U64
    histogram: U32  # [rows, 48]


@dataclass(frozen=True)
class Instances:
    operations: Operations
    role: U8


@dataclass(frozen=True)
class WindowColumns:
    start_ns: int
    end_ns: int
    stride: int
    instances: Instances
    summaries: Summaries
    traffic: PeerBytes


class Windows:
    """Collects operations between two closes; not thread-safe."""

    def __init__(self, slots: int, start_ns: int, *, patience: int = 5, max_waiting: int = 1 << 18):
        self._start_ns = start_ns
        self._patience = patience
        self._max_waiting = max_waiting
        self._roles = Roles(slots)
        self._exchanging = np.zeros(slots, np.bool_)
        self._captured = np.zeros(slots, np.bool_)
        self._parts: list[Operations] = []
        self._peers: list[PeerBytes] = []
        self._held = empty_operations()
        self._waiting: list[tuple[Operations, PeerBytes]] = []  # newest first
        self.unresolved = 0  # operations dropped because their communicator stayed unknown

    def add(self, operations: Operations, peers: PeerBytes | None = None) -> None:
        if len(operations):
            self._parts.append(operations)
        if peers is not None and len(peers):
            self._peers.append(peers)

    @property
    def captured_slots(self) -> Bool:
        """Per slot: some of its operations went into CUDA graphs."""
        return self._captured

    def forget(self, slots: U16) -> None:
        """Before slots are used for other communicators."""
        self._roles.forget(slots)
        self._exchanging[slots] = False
        self._captured[slots] = False

    def close(
        self, end_ns: int, stride: int, table: CommTable, *, final: bool = False
    ) -> WindowColumns:
        """Everything added since the last close; `final` also gives out what would be held."""
        fresh = concatenate([*(part for part, _ in reversed(self._waiting)), *self._parts])
        peers = _join([*(part for _, part in self._waiting), *self._peers])
        ages = self._waiting
        self._parts, self._peers = [], []
        fresh, peers = self._set_aside(fresh, peers, table, ages, final=final)
        held_count = len(self._held)
        fresh = scaled_bytes(fresh, table.n_ranks[fresh.slot], table.rank[fresh.slot])
        op, every = classify(fresh, table.n_ranks[fresh.slot], self._exchanging[fresh.slot])
        self._exchanging[fresh.slot[every]] = True
        self._captured[fresh.slot[(fresh.flags & CAPTURED) != 0]] = True
        fresh = replace(fresh, op=op)
        # A peer that the communicator does not have is a call that NCCL refuses.
        peers = _take_peers(peers, peers.peer < table.n_ranks[peers.slot])
        traffic = merge_peers(_join([peers, _equal_splits(fresh, table)]))
        operations = concatenate([self._held, fresh])
        before = np.zeros(len(operations), np.bool_)
        before[:held_count] = True
        if len(operations) and (operations.slot[1:] < operations.slot[:-1]).any():
            order = np.argsort(operations.slot, kind="stable")
            operations, before = operations.take(order), before[order]
        role, hold = self._roles.assign(
            operations, table.complete[operations.slot], before, final=final
        )
        self._held = operations.take(hold) if hold.any() else empty_operations()
        if hold.any():
            operations, role = operations.take(~hold), role[~hold]
        window = WindowColumns(
            start_ns=self._start_ns,
            end_ns=end_ns,
            stride=stride,
            instances=_instances(operations, role, stride),
            summaries=_summaries(operations, role),
            traffic=traffic,
        )
        self._start_ns = end_ns
        return window

    def _set_aside(
        self,
        operations: Operations,
        peers: PeerBytes,
        table: CommTable,
        ages: list[tuple[Operations, PeerBytes]],
        *,
        final: bool,
    ) -> tuple[Operations, PeerBytes]:
        """Keep what is not resolved, for a while; return what is."""
        known = table.resolved[operations.slot]
        known_peers = table.resolved[peers.slot]
        if known.all() and known_peers.all():
            self._waiting = []
            return operations, peers
        # Rows of older windows come first in `operations`: cut them back into their windows.
        waiting: list[tuple[Operations, PeerBytes]] = []
        for part, _ in ages:
            still = ~table.resolved[part.slot]
            waiting.append((part.take(still), empty_peers()))
        old = sum(len(part) for part, _ in ages)
        new = operations.take(np.flatnonzero(~known[old:]) + old)
        unknown_peers = _take_peers(peers, ~known_peers)
        waiting.insert(0, (new, unknown_peers))
        kept: list[tuple[Operations, PeerBytes]] = []
        rows = 0
        for age, (part, part_peers) in enumerate(waiting):
            if final or age >= self._patience or rows + len(part) > self._max_waiting:
                self.unresolved += len(part)
                continue
            rows += len(part)
            kept.append((part, part_peers))
        if kept:
            slots = np.unique(np.concatenate([part.slot for part, _ in kept]))
            kept[0] = (kept[0][0], _take_peers(kept[0][1], np.isin(kept[0][1].slot, slots)))
        self._waiting = kept
        return operations.take(known), _take_peers(peers, known_peers)


def _take_peers(peers: PeerBytes, mask: Bool) -> PeerBytes:
    return PeerBytes(peers.slot[mask], peers.peer[mask], peers.sent[mask], peers.received[mask])


def _join(parts: list[PeerBytes]) -> PeerBytes:
    parts = [part for part in parts if len(part)]
    if not parts:
        return empty_peers()
    if len(parts) == 1:
        return parts[0]
    return PeerBytes(
        np.concatenate([part.slot for part in parts]),
        np.concatenate([part.peer for part in parts]),
        np.concatenate([part.sent for part in parts]),
        np.concatenate([part.received for part in parts]),
    )


def _equal_splits(operations: Operations, table: CommTable) -> PeerBytes:
    """Traffic of equal-split all-to-alls: the same bytes to and from every rank, self included."""
    rows = operations.op == Func.ALL_TO_ALL
    if not rows.any():
        return empty_peers()
    slots, amount = operations.slot[rows], operations.bytes[rows]
    totals = np.zeros(int(slots.max()) + 1, np.uint64)
    np.add.at(totals, slots, amount)
    used = np.flatnonzero(totals).astype(np.uint16)
    n = table.n_ranks[used].astype(np.int64)
    share = totals[used] // np.maximum(n, 1).astype(np.uint64)
    each = np.repeat(share, n)
    peer = np.arange(len(each)) - np.repeat(np.cumsum(n) - n, n)
    return PeerBytes(np.repeat(used, n), peer.astype(np.uint32), each, each)


def _instances(operations: Operations, role: U8, stride: int) -> Instances:
    """Rows for the collector to align: no failed calls, and only the numbers it asked for."""
    keep = ~operations.error
    if stride > 1:
        keep &= operations.seq % np.uint32(stride) == 0
    if keep.all():
        return Instances(operations, role)
    return Instances(operations.take(keep), role[keep])


def _summaries(operations: Operations, role: U8) -> Summaries:
    key = (
        (operations.slot.astype(np.int64) * OP_CODES + operations.op) * 12
        + role.astype(np.int64) * 4
        + operations.evidence
    )
    keys, row = _number(key)
    n = len(keys)
    timed = (operations.evidence == BLOCKING) | (operations.evidence == DEVICE)
    timed &= ~operations.error
    total = np.zeros(n, np.uint64)
    low = np.zeros(n, np.uint64)
    high = np.zeros(n, np.uint64)
    histogram = np.zeros((n, HISTOGRAM_BINS), np.uint32)
    if timed.any():
        at, duration = row[timed], operations.duration_ns[timed]
        low[:] = np.iinfo(np.uint64).max
        np.add.at(total, at, duration)
        np.minimum.at(low, at, duration)
        np.maximum.at(high, at, duration)
        counted = np.bincount(at, minlength=n) > 0
        low[~counted] = 0
        bins = np.bincount(at * HISTOGRAM_BINS + histogram_bin(duration), minlength=n * 48)
        histogram = bins.reshape(n, HISTOGRAM_BINS).astype(np.uint32)
    amount = np.zeros(n, np.uint64)
    np.add.at(amount, row, operations.bytes)
    code, rest = np.divmod(keys, 12)
    return Summaries(
        slot=(code // OP_CODES).astype(np.uint16),
        op=(code % OP_CODES).astype(np.uint8),
        role=(rest // 4).astype(np.uint8),
        evidence=(rest % 4).astype(np.uint8),
        count=np.bincount(row, minlength=n).astype(np.uint64),
        errors=np.bincount(row[operations.error], minlength=n).astype(np.uint64),
        bytes=amount,
        duration_sum_ns=total,
        duration_min_ns=low,
        duration_max_ns=high,
        histogram=histogram,
    )


def _number(key: I64) -> tuple[I64, I64]:
    """Distinct keys in order, and for each row the position of its key."""
    if not len(key):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    low = int(key.min())
    span = int(key.max()) - low + 1
    if span > 4 * len(key) + (1 << 20):
        keys, row = np.unique(key, return_inverse=True)
        return keys, row
    present = np.zeros(span, np.bool_)
    present[key - low] = True
    keys = np.flatnonzero(present)
    number = np.zeros(span, np.int64)
    number[keys] = np.arange(len(keys))
    return keys + low, number[key - low]


def histogram_bin(duration_ns: U64) -> I64:
    """b of [2^b, 2^(b+1)) ns, 0 for less than 2, the last for everything longer.

    The binary exponent of the float64 is the answer; rounding to 53 bits could only lift values
    above 2^53, far beyond the last bin.
    """
    exponent = (duration_ns.astype(np.float64).view(np.int64) >> 52) - 1023
    clipped: I64 = np.clip(exponent, 0, HISTOGRAM_BINS - 1)
    return clipped
