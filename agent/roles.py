"""Which all-to-all is a dispatch and which a combine, from one rank's own byte vectors.

A combine returns what its dispatch sent: what went to a peer comes back from it, up to the factor
of the element sizes (8-bit out, 16-bit back). So where all-to-alls k and k+1 of a communicator have
send(k) proportional to receive(k+1) and receive(k) to send(k+1), k is a dispatch and k+1 its
combine.

Where several in a row match (the routing stays the same), the pairs could be read two ways. The
chain is then anchored: by what was before it, or by the communicator's beginning if that was seen.
Equal splits carry no sizes to compare: there the roles alternate from the communicator's
beginning, provided that it was seen, that nothing else ran in the lane, that sizes repeat with
period two, and that the two kinds of gap (experts between dispatch and combine, attention after
it) are told apart by their medians. Anything else is unknown; a role is never a guess.

The role of k needs k+1, so the last all-to-all of a lane may be held back, for one window at most.
"""

from __future__ import annotations

import numpy as np

from lanterne.agent.events import I64, U8, U16, U32, U64, Bool, Operations
from lanterne.probes.layout import Func

UNKNOWN, DISPATCH, COMBINE = 0, 1, 2
MIN_GAPS = 4  # of each kind in a window, to compare medians


def is_all_to_all(op: U8) -> Bool:
    mask: Bool = (op == Func.ALL_TO_ALL) | (op == Func.ALL_TO_ALL_V)
    return mask


class Roles:
    """State of each (slot, lane) across windows; `forget` a slot before it is used anew."""

    def __init__(self, slots: int):
        n = 2 * slots
        self._seen = np.zeros(n, np.bool_)  # an all-to-all before this one
        self._role = np.zeros(n, np.uint8)  # of the newest all-to-all that went out
        self._send = np.zeros(n, np.uint64)
        self._receive = np.zeros(n, np.uint64)
        self._next_seq = np.full(n, -1, np.int64)  # of the lane, all operations counted
        self._plain = np.ones(n, np.bool_)  # only equal all-to-alls so far, none missing
        self._period = np.zeros((n, 2), np.uint64)  # their bytes at even and odd numbers
        self._told = np.zeros(n, np.bool_)  # the two kinds of gap were told apart

    def forget(self, slots: U16) -> None:
        for lane in (0, 1):
            rows = slots.astype(np.int64) * 2 + lane
            self._seen[rows] = False
            self._role[rows] = UNKNOWN
            self._next_seq[rows] = -1
            self._plain[rows] = True
            self._period[rows] = 0
            self._told[rows] = False

    def assign(
        self,
        operations: Operations,
        complete: Bool,
        held_before: Bool,
        *,
        whole: Bool,
        final: bool = False,
    ) -> tuple[U8, Bool]:
        """Role of each operation, and which to hold back until their successor is known.

        `operations` are sorted by slot, in order within it; `complete` per operation: its
        communicator was seen from its creation; `held_before`: held in the last window already;
        `whole`: it reaches every rank.
        """
        role = np.zeros(len(operations), np.uint8)
        hold = np.zeros(len(operations), np.bool_)
        if not len(operations):
            return role, hold
        lane_of = operations.slot.astype(np.int64) * 2 + operations.lane
        order = _order(lane_of, operations.seq)
        if order is not None:
            operations, complete = operations.take(order), complete[order]
            lane_of, held_before = lane_of[order], held_before[order]
            whole = whole[order]
        starts = np.flatnonzero(np.r_[True, lane_of[1:] != lane_of[:-1]])
        drift = operations.seq.astype(np.int64) - np.arange(len(operations))
        follows = self._next_seq[lane_of[starts]] == operations.seq[starts]
        a2a = np.flatnonzero(is_all_to_all(operations.op) & ~operations.error)
        sorted_role = np.zeros(len(operations), np.uint8)
        sorted_hold = np.zeros(len(operations), np.bool_)
        if len(a2a):
            continues = np.zeros(len(operations), np.bool_)
            continues[starts] = follows
            roles, waits = self._chains(
                operations, a2a, lane_of, drift, continues, complete, held_before
            )
            if final:
                waits[:] = False
            sorted_role[a2a], sorted_hold[a2a] = roles, waits
        self._plain_lanes(operations, lane_of, starts, complete & whole, sorted_role)
        self._remember(operations, lane_of, a2a, sorted_role, sorted_hold, starts)
        if order is None:
            return sorted_role, sorted_hold
        role[order], hold[order] = sorted_role, sorted_hold
        return role, hold

    def _chains(
        self,
        operations: Operations,
        a2a: I64,
        lane_of: I64,
        drift: I64,
        continues: Bool,
        complete: Bool,
        held_before: Bool,
    ) -> tuple[U8, Bool]:
        """Roles of the all-to-alls at rows `a2a` by matching each with its successor."""
        lanes = lane_of[a2a]
        send, receive = operations.send_shape[a2a], operations.receive_shape[a2a]
        telling = ~operations.uniform[a2a] & ((send | receive) != 0)
        same = (lanes[1:] == lanes[:-1]) & (drift[a2a[1:]] == drift[a2a[:-1]])
        edge = same & telling[1:] & telling[:-1]
        edge &= (send[:-1] == receive[1:]) & (receive[:-1] == send[1:])
        n = len(a2a)
        first = np.r_[True, lanes[1:] != lanes[:-1]]
        last = np.r_[lanes[1:] != lanes[:-1], True]
        into = np.r_[False, edge]  # matched with the one before
        # The first of a lane may match what went out in the last window.
        carried = first & continues[a2a] & telling & self._seen[lanes]
        carried &= (self._send[lanes] == receive) & (self._receive[lanes] == send)
        head = np.flatnonzero(~into)
        chain = np.cumsum(~into) - 1
        position = np.arange(n) - head[chain]
        length = np.diff(np.append(head, n))
        # What the head of each chain is: DISPATCH if anchored, the opposite of what it continues.
        begin = np.full(len(head), DISPATCH, np.uint8)
        before = self._role[lanes[head]]
        begin[carried[head]] = np.where(before == DISPATCH, COMBINE, DISPATCH)[carried[head]]
        begin[carried[head] & (before == UNKNOWN)] = UNKNOWN
        known_start = ~first[head] | complete[a2a[head]] | (self._seen[lanes[head]])
        ends_open = last[head + length - 1]  # the successor of its last is not known yet
        begin[~carried[head] & ~known_start & ((length > 2) | ends_open)] = UNKNOWN
        start = begin[chain].astype(np.int64)
        roles = np.where(start == UNKNOWN, UNKNOWN, 1 + (start - 1 + position) % 2)
        # A dispatch without its combine is none; the newest of a lane waits for its successor.
        tail = np.zeros(n, np.bool_)
        tail[head + length - 1] = True
        lonely = tail & (roles == DISPATCH)
        waits = lonely & last & telling & ~held_before[a2a]
        roles[lonely] = UNKNOWN
        return roles.astype(np.uint8), waits

    def _plain_lanes(
        self, operations: Operations, lane_of: I64, starts: I64, complete: Bool, role: U8
    ) -> None:
        """Equal splits: alternate from the beginning where all signs agree. Writes into `role`."""
        proper = operations.uniform & is_all_to_all(operations.op) & ~operations.error
        ends = np.append(starts[1:], len(operations))
        plain = np.logical_and.reduceat(proper & complete, starts)
        lanes = lane_of[starts]
        self._plain[lanes] &= plain
        for i in np.flatnonzero(self._plain[lanes]):
            lane, rows = int(lanes[i]), slice(int(starts[i]), int(ends[i]))
            seq = operations.seq[rows].astype(np.int64)
            expected = max(int(self._next_seq[lane]), 0)
            if not (seq == np.arange(expected, expected + len(seq))).all():
                self._plain[lane] = False
                continue
            if self._alternates(lane, seq, operations.bytes[rows], operations.arrival_ns[rows]):
                role[rows] = 1 + seq % 2

    def _alternates(self, lane: int, seq: I64, sizes: U64, arrival: U64) -> bool:
        odd = seq % 2
        for kind in (0, 1):
            mine = sizes[odd == kind]
            if len(mine):
                if not self._period[lane, kind]:
                    self._period[lane, kind] = mine[0]
                if (mine != self._period[lane, kind]).any():
                    self._plain[lane] = False
                    return False
        gaps = np.diff(arrival.astype(np.int64))
        inside, between = gaps[odd[:-1] == 0], gaps[odd[:-1] == 1]
        if min(len(inside), len(between)) >= MIN_GAPS:
            middle = np.median(inside), np.median(between)
            spread = max(
                float(np.median(np.abs(inside - middle[0]))),
                float(np.median(np.abs(between - middle[1]))),
            )
            self._told[lane] = abs(middle[0] - middle[1]) > 2 * spread
        return bool(self._told[lane])

    def _remember(
        self,
        operations: Operations,
        lane_of: I64,
        a2a: I64,
        role: U8,
        hold: Bool,
        starts: I64,
    ) -> None:
        ends = np.append(starts[1:], len(operations)) - 1
        lanes = lane_of[ends]
        after = operations.seq[ends].astype(np.int64) + 1
        # What is held comes again: the lane's next number is then its own.
        held_last = hold[ends]
        after[held_last] -= 1
        self._next_seq[lanes] = after
        if len(a2a):
            out = a2a[~hold[a2a]]
            if len(out):
                newest = np.append(
                    np.flatnonzero(lane_of[out[1:]] != lane_of[out[:-1]]), len(out) - 1
                )
                rows = out[newest]
                at = lane_of[rows]
                self._seen[at] = True
                self._role[at] = role[rows]
                self._send[at] = operations.send_shape[rows]
                self._receive[at] = operations.receive_shape[rows]


def _order(lane_of: I64, seq: U32) -> I64 | None:
    """By lane, and by number in it; None where the rows are in this order already.

    Calls with vectors come by way of `groups`, later than their neighbours in the lane.
    """
    same = lane_of[1:] == lane_of[:-1]
    if not (lane_of[1:] < lane_of[:-1]).any() and not (same & (seq[1:] < seq[:-1])).any():
        return None
    return np.lexsort((seq, lane_of))


def classify(operations: Operations, n_ranks: U32, exchanging: Bool) -> tuple[U8, Bool]:
    """Tell all-to-alls from other groups of sends and receives; -> (op, all peers were touched).

    A group is an ALL_TO_ALL_V when it has sends and receives with two peers at least on each side,
    or with every (other) rank. Routing may leave a rank fewer peers at times: once a communicator
    has had a group with every rank (`exchanging`, per operation), its later groups with sends or
    receives count as well. The rest stays P2P_GROUP.
    """
    groups = (operations.op == Func.P2P_GROUP) & (operations.lane == 1)
    op = operations.op
    if not groups.any():
        return op, np.zeros(len(op), np.bool_)
    out, inward = operations.send_peers, operations.receive_peers
    others = np.maximum(n_ranks.astype(np.int64) - 1, 1)
    every = (out >= others) & (inward >= others) & (n_ranks > 1)
    grouped = operations.flags & 1 != 0
    both = (out >= 2) & (inward >= 2)
    chosen = groups & grouped & (every | both | (exchanging & ((out > 0) | (inward > 0))))
    return np.where(chosen, np.uint8(Func.ALL_TO_ALL_V), op), groups & grouped & every
