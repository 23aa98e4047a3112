"""Sends and receives of one group become one operation with a byte vector per peer.

Between ncclGroupStart and ncclGroupEnd a rank posts one send and one receive for each peer; that is
how frameworks express all-to-all with unequal parts. All records of one group on one communicator
form one operation (lane 1). A send or receive outside any group is one by itself.

Gloo's all-to-all with unequal parts is one call. The probe tells the bytes per peer in records of
their own at entry, and the call itself at its return; they share a group number, and become one
operation of the collective lane.

Several may be under way at once on one communicator, from several threads.

A group may straddle two drains. Its records are held until a later group appears on the same
communicator, or until it has been silent for `grace_ns`: by the records drained, not by the clock,
and for longer than a thread is off its CPU within a group. Those of a blocking call are held until
it returns, or for a minute. The memory held is bounded: beyond `max_records` every open group is
closed, and counted in `forced`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lanterne.agent.events import (
    _FLAG_BITS,
    BLOCKING,
    CAPTURED,
    GROUPED,
    I64,
    ORDER,
    U8,
    U16,
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
from lanterne.agent.unique import unique
from lanterne.agent.vectors import PeerBytes, empty_peers, traffic_of, vectors_of
from lanterne.probes.layout import RECORD, Flag, Func

CALL_GRACE_NS = 60 * 10**9


# (records, slots, first row of each run, their lengths, rules) -> operations and traffic.
Assemble = Callable[[Records, U16, I64, I64, Rules], tuple[Operations, PeerBytes]]


class Groups:
    """Holds the open groups between drains; not thread-safe."""

    def __init__(
        self,
        rules: Rules,
        *,
        grace_ns: int = 100_000_000,
        max_records: int = 1 << 17,
        assemble: Assemble | None = None,
    ):
        """`assemble` makes the operations of complete runs; None: those of sends and receives."""
        self._rules = rules
        self._assemble = assemble or _assemble
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

        now_ns: up to which all records are here, on their clock. `close` ends every open group.
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
            return self._assemble(records, slots, starts, lengths, self._rules)
        self._records, self._slots = rows_of(records, rows), slots[rows]
        done = ~rows
        if not done.any():
            return empty_operations(), empty_peers()
        lengths = lengths[~open_]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        return self._assemble(rows_of(records, done), slots[done], starts, lengths, self._rules)

    def _open(self, records: Records, slots: U16, starts: I64, now_ns: int) -> Bool:
        """Of each run: may more of its records come? A thread has one group at a time, so only the
        newest of a communicator may grow; blocking calls of several threads overlap."""
        last_of_slot = np.empty(len(starts), np.bool_)
        run_slots = slots[starts]
        last_of_slot[:-1] = run_slots[1:] != run_slots[:-1]
        last_of_slot[-1] = True
        ends = np.append(starts[1:], len(records)) - 1
        flags = records["flags"][ends]
        blocking = (flags & np.uint8(Flag.BLOCKING)) != 0
        # The call itself: nothing comes after it.
        called = blocking & ((flags & np.uint8(Flag.P2P)) == 0)
        patience = np.where(blocking, CALL_GRACE_NS, self._grace_ns)
        silent = records["enter_ns"][ends].astype(np.int64) + patience < now_ns
        grouped = records["group"][starts] != 0
        open_: Bool = (last_of_slot | blocking) & grouped & ~silent & ~called
        return open_


def _join(a: Records, b: Records) -> Records:
    words = [np.ascontiguousarray(part).view(np.uint64) for part in (a, b)]
    joined: Records = np.concatenate(words).view(RECORD)
    return joined


def _by_communicator(records: Records, slots: U16) -> tuple[Records, U16]:
    """Stable order by registry row: the records of a group come to stand together."""
    if not (slots[1:] >= slots[:-1]).all():
        order = np.argsort(slots, kind="stable")  # radix sort on 16 bits
        records, slots = rows_of(records, order), slots[order]
    return _untangled(records, slots)


def _untangled(records: Records, slots: U16) -> tuple[Records, U16]:
    """Groups of several threads on one communicator one after the other, by their first record."""
    key = (slots.astype(np.uint64) << np.uint64(32)) | records["group"]
    starts = _starts(records, slots)
    runs = key[starts][records["group"][starts] != 0]
    if len(unique(runs)) == len(runs):
        return records, slots  # no group is in pieces
    grouped = np.flatnonzero(records["group"])
    _, first, number = np.unique(key[grouped], return_index=True, return_inverse=True)
    place = np.arange(len(records))
    place[grouped] = grouped[first[number]]
    order = np.argsort(place, kind="stable")
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
    vectors = vectors_of(records, starts, lengths, failed, np.repeat(captured, lengths))
    amount, duration = vectors.sent_total, np.zeros(n, np.uint64)
    if blocking.any():
        call = rows_of(records, starts + lengths - 1)
        evidence[blocking] = evidence_of(call, rules)[blocking]
        duration = np.where(evidence == BLOCKING, call["duration_ns"], duration)
        whole = blocking & (call["flags"] & np.uint8(Flag.P2P) == 0)
        amount = np.where(whole, payload_bytes(call), amount)
        # More peers than the probe tells: a part of a vector compares with nothing.
        partial = whole & (amount != vectors.sent_total)
        vectors.send_shape[partial] = vectors.receive_shape[partial] = 0
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
    return operations, traffic_of(vectors, run_slots)
