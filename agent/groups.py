"""Sends and receives of one group become one operation with a byte vector per peer.

Between ncclGroupStart and ncclGroupEnd a rank posts one send and one receive for each peer; that is
how frameworks express all-to-all with unequal parts. All records of one group on one communicator
form one operation (lane 1). A send or receive outside any group is one by itself.

Gloo's all-to-all with unequal parts is one call. The probe tells the bytes per peer in records of
their own at entry, and the call itself at its return; they share a group number, and become one
operation of the collective lane.

A group may straddle two drains. Its records are held until a later group appears on the same
communicator, or until it has been silent for `grace_ns` (a blocking call: for a minute). The memory
held is bounded: beyond `max_records` every open group is closed, and counted in `forced`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.agent.events import (
    _FLAG_BITS,
    BLOCKING,
    CAPTURED,
    GROUPED,
    I64,
    ORDER,
    SENDS,
    U8,
    U16,
    U32,
    U64,
    Bool,
    Operations,
    Records,
    Rules,
    empty_operations,
    errors_of,
    evidence_of,
    payload_bytes,
    rows_of,
)
from lanterne.probes.layout import RECORD, Flag, Func

MAX_PEER = 1 << 16
CALL_GRACE_NS = 60 * 10**9


@dataclass(frozen=True)
class PeerBytes:
    """Sparse rows of the traffic matrix: bytes between the rank of `slot` and `peer`."""

    slot: U16
    peer: U32
    sent: U64
    received: U64

    def __len__(self) -> int:
        return len(self.slot)


def empty_peers() -> PeerBytes:
    return PeerBytes(
        np.empty(0, np.uint16),
        np.empty(0, np.uint32),
        np.empty(0, np.uint64),
        np.empty(0, np.uint64),
    )


class Groups:
    """Holds the open groups between drains; not thread-safe."""

    def __init__(self, rules: Rules, *, grace_ns: int = 100_000_000, max_records: int = 1 << 17):
        self._rules = rules
        self._grace_ns = grace_ns
        self._max_records = max_records
        self._records: Records = np.empty(0, RECORD)
        self._slots: U16 = np.empty(0, np.uint16)
        self.forced = 0

    @property
    def held(self) -> int:
        """Records of groups that are still open."""
        return len(self._records)

    def add(
        self, records: Records, slots: U16, now_ns: int, *, close: bool = False
    ) -> tuple[Operations, PeerBytes]:
        """Point-to-point records in drained order -> the operations that are complete by now.

        `now_ns` is on the clock of the records. `close` ends every open group.
        """
        if len(self._records):
            records = _join(self._records, records)
            slots = np.concatenate([self._slots, slots])
        if not len(records):
            return empty_operations(), empty_peers()
        records, slots = _by_communicator(records, slots)
        starts = _starts(records, slots)
        open_ = self._open(records, slots, starts, now_ns)
        if close:
            open_[:] = False
        lengths = np.diff(starts, append=len(records))
        rows = np.repeat(open_, lengths)
        if open_.any() and int(rows.sum()) > self._max_records:
            self.forced += int(open_.sum())
            open_[:] = False
            rows[:] = False
        if not open_.any():
            self._records, self._slots = np.empty(0, RECORD), np.empty(0, np.uint16)
            return _assemble(records, slots, starts, lengths, self._rules)
        self._records, self._slots = rows_of(records, rows), slots[rows]
        done = ~rows
        if not done.any():
            return empty_operations(), empty_peers()
        lengths = lengths[~open_]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        return _assemble(rows_of(records, done), slots[done], starts, lengths, self._rules)

    def _open(self, records: Records, slots: U16, starts: I64, now_ns: int) -> Bool:
        """Of each run: may more of its records come? Only the newest of a communicator may grow."""
        last_of_slot = np.empty(len(starts), np.bool_)
        run_slots = slots[starts]
        last_of_slot[:-1] = run_slots[1:] != run_slots[:-1]
        last_of_slot[-1] = True
        ends = np.append(starts[1:], len(records)) - 1
        flags = records["flags"][ends]
        blocking = (flags & np.uint8(Flag.BLOCKING)) != 0
        called = (flags & np.uint8(Flag.P2P)) == 0  # the call itself: nothing comes after it
        patience = np.where(blocking, CALL_GRACE_NS, self._grace_ns)
        silent = records["enter_ns"][ends].astype(np.int64) + patience < now_ns
        grouped = records["group"][starts] != 0
        open_: Bool = last_of_slot & grouped & ~silent & ~called
        return open_


def _join(a: Records, b: Records) -> Records:
    words = [np.ascontiguousarray(part).view(np.uint64) for part in (a, b)]
    joined: Records = np.concatenate(words).view(RECORD)
    return joined


def _by_communicator(records: Records, slots: U16) -> tuple[Records, U16]:
    """Stable order by registry row: the records of a group come to stand together."""
    if (slots[1:] >= slots[:-1]).all():
        return records, slots
    order = np.argsort(slots, kind="stable")  # radix sort on 16 bits
    return rows_of(records, order), slots[order]


def _starts(records: Records, slots: U16) -> I64:
    """First row of each operation; every ungrouped record is one."""
    group = records["group"]
    first = np.empty(len(records), np.bool_)
    first[0] = True
    first[1:] = (group[1:] != group[:-1]) | (slots[1:] != slots[:-1]) | (group[1:] == 0)
    return np.flatnonzero(first)


def _assemble(
    records: Records, slots: U16, starts: I64, lengths: I64, rules: Rules
) -> tuple[Operations, PeerBytes]:
    n = len(starts)
    first = rows_of(records, starts)
    failed = errors_of(records)
    bits: U8 = np.bitwise_or.reduceat(_FLAG_BITS[records["flags"]], starts)
    blocking = (first["flags"] & np.uint8(Flag.BLOCKING)) != 0
    bits[(first["group"] != 0) & ~blocking] |= GROUPED
    captured = (bits & CAPTURED) != 0
    evidence = evidence_of(first, rules)
    vectors = _vectors(records, starts, lengths, failed | np.repeat(captured, lengths))
    amount, duration = vectors.sent_total, np.zeros(n, np.uint64)
    if blocking.any():
        call = rows_of(records, starts + lengths - 1)
        evidence[blocking] = evidence_of(call, rules)[blocking]
        duration = np.where(evidence == BLOCKING, call["duration_ns"], duration)
        whole = blocking & (call["flags"] & np.uint8(Flag.P2P) == 0)
        amount = np.where(whole, payload_bytes(call), amount)
        # More peers than the probe tells: a part of the vector compares with nothing.
        vectors.send_shape[whole & (amount != vectors.sent_total)] = 0
    evidence[captured] = ORDER
    blocked_us = np.maximum.reduceat(records["sync_blocked_us"].astype(np.uint64), starts)
    if not blocking.all():
        total_us = np.add.reduceat(records["sync_blocked_us"].astype(np.uint64), starts)
        blocked_us = np.where(blocking, blocked_us, total_us)
    run_slots = slots[starts]
    operations = Operations(
        slot=run_slots,
        seq=np.ascontiguousarray(first["seq"]),
        lane=np.where(blocking, np.uint8(0), np.uint8(1)),
        # Lane 1: roles.classify tells all-to-alls apart, it knows n_ranks and more.
        op=np.where(blocking, np.uint8(Func.ALL_TO_ALL_V), np.uint8(Func.P2P_GROUP)),
        evidence=evidence,
        flags=bits,
        error=np.logical_or.reduceat(failed, starts),
        arrival_ns=np.ascontiguousarray(first["enter_ns"]),
        duration_ns=duration,
        bytes=amount,
        root=np.where(lengths == 1, first["peer"], np.int32(-1)),
        sync_blocked_ns=blocked_us * np.uint64(1000),
        send_shape=vectors.send_shape,
        receive_shape=vectors.receive_shape,
        uniform=vectors.uniform,
        send_peers=vectors.send_peers,
        receive_peers=vectors.receive_peers,
    )
    return operations, _traffic(vectors, run_slots)


@dataclass(frozen=True)
class _Vectors:
    """Byte vectors of n operations, sparse: one cell per (operation, peer)."""

    operation: I64
    peer: I64
    sent: U64
    received: U64
    sent_total: U64  # [n]
    send_shape: U64
    receive_shape: U64
    uniform: Bool
    send_peers: U16
    receive_peers: U16


def _vectors(records: Records, starts: I64, lengths: I64, ignored: Bool) -> _Vectors:
    n = len(starts)
    peer = records["peer"].astype(np.int64)
    ignored = ignored | (peer < 0) | (peer >= MAX_PEER)
    peer = np.where(ignored, 0, peer)
    amount = payload_bytes(records)
    amount[ignored] = 0
    sends = SENDS[records["func"]]
    operation = np.repeat(np.arange(n), lengths)
    width = int(peer.max()) + 1
    cell = operation * width + peer
    if n * width > 8 * len(records) + 65_536:  # few peers of many: number only cells that occur
        cells, cell = np.unique(cell, return_inverse=True)
        operation_of, peer_of = np.divmod(cells, width)
        size = len(cells)
    else:
        operation_of, peer_of = np.repeat(np.arange(n), width), np.tile(np.arange(width), n)
        size = n * width
    received_rows = ~sends
    counted = ~ignored
    sent = _sum_exact(cell[sends], amount[sends], size)
    received = _sum_exact(cell[received_rows], amount[received_rows], size)
    used_out = np.bincount(cell[sends & counted], minlength=size) > 0
    used_in = np.bincount(cell[received_rows & counted], minlength=size) > 0
    heads = (
        np.searchsorted(operation_of, np.arange(n)) if size != n * width else (np.arange(n) * width)
    )
    sent_total = np.add.reduceat(sent, heads)
    received_total = np.add.reduceat(received, heads)
    send_shape = shape_hash(sent, sent_total[operation_of], peer_of, heads)
    receive_shape = shape_hash(received, received_total[operation_of], peer_of, heads)
    flat = _flat(sent, sent_total, heads) & _flat(received, received_total, heads)
    return _Vectors(
        operation=operation_of,
        peer=peer_of,
        sent=sent,
        received=received,
        sent_total=sent_total,
        send_shape=send_shape,
        receive_shape=receive_shape,
        uniform=flat & (send_shape == receive_shape),
        send_peers=np.add.reduceat(used_out, heads, dtype=np.uint16),
        receive_peers=np.add.reduceat(used_in, heads, dtype=np.uint16),
    )


def _sum_exact(cell: I64, amount: U64, size: int) -> U64:
    """Sums per cell as integers: bincount adds in float64, exact only below 2^53 in total."""
    if not len(cell) or int(amount.max()) <= (1 << 53) // len(cell):
        return np.bincount(cell, weights=amount, minlength=size).astype(np.uint64)
    sums = np.zeros(size, np.uint64)
    np.add.at(sums, cell, amount)
    return sums


def shape_hash(values: U64, totals: U64, peers: I64, heads: I64) -> U64:
    """Hash of a vector's relative sizes: equal for vectors that are proportional, 0 for empty ones.

    v / sum(v) is correctly rounded, so proportional integer vectors give bit-equal quotients,
    whatever the rational factor (element sizes of 1 and 2 bytes, say). Each peer's quotient is
    mixed with the peer's number; the sum does not depend on the order of the calls.
    """
    nonzero = values != 0
    quotient = np.divide(
        values.astype(np.float64), totals.astype(np.float64), where=nonzero,
        out=np.zeros(len(values)),
    )  # fmt: skip
    mixed = quotient.view(np.uint64) + (peers.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed[~nonzero] = 0
    return np.add.reduceat(mixed, heads)


def _flat(values: U64, totals: U64, heads: I64) -> Bool:
    """True where all values that are not zero are equal."""
    largest = np.maximum.reduceat(values, heads)
    used = np.add.reduceat((values != 0).astype(np.uint64), heads)
    flat: Bool = largest * used == totals
    return flat


def _traffic(vectors: _Vectors, run_slots: U16) -> PeerBytes:
    """Per (slot, peer) sums of the operations; only cells with bytes."""
    some = (vectors.sent | vectors.received) != 0
    slot = run_slots[vectors.operation[some]]
    return merge_peers(
        PeerBytes(
            slot, vectors.peer[some].astype(np.uint32), vectors.sent[some], vectors.received[some]
        )
    )


def merge_peers(rows: PeerBytes) -> PeerBytes:
    """Rows of the same (slot, peer) added up."""
    if not len(rows):
        return rows
    code = (rows.slot.astype(np.uint64) << np.uint64(32)) | rows.peer
    top = int(rows.peer.max()) + 1
    span = (int(rows.slot.max()) + 1) * top
    if span <= 4 * len(rows) + 65_536:
        cell = rows.slot.astype(np.int64) * top + rows.peer
        present = np.flatnonzero(np.bincount(cell, minlength=span))
        sent = _sum_exact(cell, rows.sent, span)[present]
        received = _sum_exact(cell, rows.received, span)[present]
        slot, peer = np.divmod(present, top)
        return PeerBytes(slot.astype(np.uint16), peer.astype(np.uint32), sent, received)
    codes, inverse = np.unique(code, return_inverse=True)
    return PeerBytes(
        (codes >> np.uint64(32)).astype(np.uint16),
        (codes & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        _sum_exact(inverse, rows.sent, len(codes)),
        _sum_exact(inverse, rows.received, len(codes)),
    )
