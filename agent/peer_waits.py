"""How long a rank waited for each peer in groups of sends and receives: sums that plugins tell.

A row counts receives from one peer and sums, over them, the time from the group's start on this
rank until all of it was there. Beside its bytes it is a row of the matrix of waits.
No IO, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.agent.events import U16, U32, U64, Bool, CommTable, Records
from lanterne.agent.unique import unique
from lanterne.agent.vectors import PeerBytes
from lanterne.probes.nccl_profiler.usdt import PEER_WAIT

MAX_NS = np.uint64(7 * 86_400 * 10**9)


@dataclass(frozen=True)
class PeerWaits:
    slot: U16
    peer: U32
    receives: U64
    wait_ns: U64

    def __len__(self) -> int:
        return len(self.slot)


def is_sum(records: Records) -> Bool:
    """Mask of the layout.DEVICE rows that are sums and no operations."""
    mask: Bool = records["func"] == PEER_WAIT
    return mask


def of_records(records: Records, slots: U16) -> PeerWaits:
    """Rows that `is_sum` picked, with their slots; nonsense is left out."""
    good = (records["peer"] >= 0) & (records["seq"] > 0) & (records["bytes_received"] <= MAX_NS)
    rows = records[good]
    return PeerWaits(
        slots[good], rows["peer"].astype(np.uint32), rows["seq"].copy(), rows["bytes_received"]
    )


def left_out(parts: list[PeerWaits], table: CommTable) -> int:
    """How many of them `beside` leaves out."""
    return sum(int((~_known(p.slot, p.peer, table)).sum()) for p in parts)


def _known(slot: U16, peer: U32, table: CommTable) -> Bool:
    known: Bool = table.resolved[slot] & (peer < table.n_ranks[slot])
    return known


def beside(
    traffic: PeerBytes, parts: list[PeerWaits], table: CommTable
) -> tuple[PeerBytes, U64, U64]:
    """-> traffic, with a row for every pair that is waited for, and each row's receives and ns.

    Pairs that move bytes come first, as they were. Waits on communicators that are not known, or
    for peers that these do not have, are left out.
    """
    n = len(traffic)
    receives, wait_ns = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
    if not parts:
        return traffic, receives, wait_ns
    slot = np.concatenate([p.slot for p in parts])
    peer = np.concatenate([p.peer for p in parts])
    good = _known(slot, peer, table)
    codes = (slot.astype(np.uint64) << np.uint64(32) | peer)[good]
    have = traffic.slot.astype(np.uint64) << np.uint64(32) | traffic.peer
    asked = unique(codes)
    new = asked[~np.isin(asked, have)]
    every = np.concatenate([have, new])
    order = np.argsort(every)
    row = order[np.searchsorted(every, codes, sorter=order)]
    receives, wait_ns = np.zeros((2, len(every)), np.uint64)
    np.add.at(receives, row, np.concatenate([p.receives for p in parts])[good])
    np.add.at(wait_ns, row, np.concatenate([p.wait_ns for p in parts])[good])
    none = np.zeros(len(new), np.uint64)
    joined = PeerBytes(
        (every >> np.uint64(32)).astype(np.uint16),
        (every & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        np.concatenate([traffic.sent, none]),
        np.concatenate([traffic.received, none]),
    )
    return joined, receives, wait_ns
