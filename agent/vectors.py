"""Bytes per peer of operations: their vectors, the shapes of these, and the
traffic matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.agent.events import (
    I64,
    SENDS,
    U16,
    U32,
    U64,
    Bool,
    CommTable,
    Operations,
    Records,
    payload_bytes,
)
from lanterne.probes.layout import Func

MAX_PEER = 1 << 16


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


@dataclass(frozen=True)
class Vectors:
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


def vectors_of(
    records: Records, starts: I64, lengths: I64, ignored: Bool, unmoved: Bool | None = None
) -> Vectors:
    """``ignored``: records that stand for nothing. ``unmoved``: those that name a peer and move no
    bytes now, since they only go into a graph."""
    n = len(starts)
    peer = records["peer"].astype(np.int64)
    ignored = ignored | (peer < 0) | (peer >= MAX_PEER)
    peer = np.where(ignored, 0, peer)
    amount = payload_bytes(records)
    amount[ignored if unmoved is None else ignored | unmoved] = 0
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
    return Vectors(
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


def traffic_of(vectors: Vectors, run_slots: U16) -> PeerBytes:
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


def take_peers(peers: PeerBytes, mask: Bool) -> PeerBytes:
    return PeerBytes(peers.slot[mask], peers.peer[mask], peers.sent[mask], peers.received[mask])


def join_peers(parts: list[PeerBytes]) -> PeerBytes:
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


def equal_splits(operations: Operations, table: CommTable) -> PeerBytes:
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
