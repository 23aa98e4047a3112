"""Totals from the summaries and the traffic of every window: every operation counted once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import traffic
from lanterne.collector.batch import HISTOGRAM_BINS

I64 = npt.NDArray[np.int64]

MATRIX_RANKS = 64  # largest communicator whose rank-to-rank matrix is kept
HOLD_NS = 5 * 10**9  # traffic to a peer whose node is not known yet waits this long
HOLD_ROWS = 1 << 16


class Grouped:
    """Growing table of rows, one per distinct key (slot, op, role, evidence)."""

    def __init__(self, width: int, limit: int) -> None:
        self.index: dict[int, int] = {}
        self.values = np.zeros((256, width), np.int64)
        self._free: list[int] = []
        self._limit = limit
        self.dropped = 0

    def rows(self, keys: I64) -> I64:
        """Row numbers of the keys, made on first sight; -1 beyond the limit."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        numbers = np.array([self._row(int(k)) for k in distinct], dtype=np.int64)
        return numbers[inverse] if len(numbers) else np.zeros(0, np.int64)

    def _row(self, key: int) -> int:
        number = self.index.get(key)
        if number is None:
            if len(self.index) >= self._limit:
                self.dropped += 1
                return -1
            number = self._free.pop() if self._free else len(self.index)
            if number >= len(self.values):
                self.values = np.concatenate([self.values, np.zeros_like(self.values)])
            self.values[number] = 0
            self.index[key] = number
        return number

    def add(self, keys: I64, values: I64) -> None:
        """values [R, width] summed into their keys."""
        rows = self.rows(keys)
        good = rows >= 0
        np.add.at(self.values, rows[good], values[good])

    def forget(self, slot: int) -> None:
        for key in [k for k in self.index if unkey(k)[0] == slot]:
            self._free.append(self.index.pop(key))


def key(slot: I64, op: I64, role: I64, evidence: I64) -> I64:
    return (slot << 12) | (op << 4) | (role << 2) | evidence


def unkey(value: int) -> tuple[int, int, int, int]:
    """-> (slot, op, role, evidence)"""
    return value >> 12, value >> 4 & 255, value >> 2 & 3, value & 3


# Columns of the summaries' table before the histogram.
COUNT, ERRORS, BYTES, DURATION, HISTOGRAM = 0, 1, 2, 3, 4
SUMMARY_WIDTH = HISTOGRAM + HISTOGRAM_BINS
WAIT_WIDTH = 1 + HISTOGRAM_BINS  # sum ns, bins


@dataclass
class TrafficRows:
    slot: I64
    base: I64
    rank: I64
    peer: I64
    sent: I64
    since_ns: I64


class TrafficTotals:
    """Bytes per rank and domain, and for small communicators from rank to rank in the span."""

    def __init__(self, members: int) -> None:
        self.by_domain = np.zeros((members, traffic.DOMAINS), np.int64)
        self.known: set[int] = set()
        self.matrices: dict[int, tuple[I64, I64]] = {}
        self._held: list[TrafficRows] = []

    def add(
        self,
        parts: list[TrafficRows],
        ranks: dict[int, int],
        node: npt.NDArray[np.int32],
        gpu: I64,
        now_ns: int,
    ) -> None:
        """Fold rows whose peers are known; keep the others a while, their nodes may report yet.

        `ranks`: size of each live slot; `node` and `gpu` [member].
        """
        held, self._held = self._held, []
        rows = _join([*held, *parts])
        alive = np.isin(rows.slot, np.fromiter(ranks, np.int64, len(ranks)))
        if not alive.all():
            rows = _take(rows, alive)
        member, peer = rows.base + rows.rank, rows.base + rows.peer
        where = traffic.domain(
            rows.rank, rows.peer, node[member], node[peer], gpu[member], gpu[peer]
        )
        wait = (where == traffic.UNKNOWN) & (now_ns - rows.since_ns < HOLD_NS)
        if wait.any():
            room = np.cumsum(wait) <= HOLD_ROWS
            wait &= room
            self._held.append(_take(rows, wait))
        done = _take(rows, ~wait)
        np.add.at(self.by_domain, (done.base + done.rank, where[~wait]), done.sent)
        for slot in np.unique(done.slot).tolist():
            self.known.add(slot)
            if ranks[slot] <= MATRIX_RANKS:
                self._matrix(slot, ranks[slot], _take(done, done.slot == slot))

    def _matrix(self, slot: int, ranks: int, rows: TrafficRows) -> None:
        if slot not in self.matrices:
            empty = np.zeros((ranks, ranks), np.int64)
            self.matrices[slot] = (empty, empty.copy())
        np.add.at(self.matrices[slot][0], (rows.rank, rows.peer), rows.sent)

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def close(self) -> None:
        """A window has ended: the span's matrix keeps this window and drops the one before."""
        for slot, (current, _) in self.matrices.items():
            self.matrices[slot] = (np.zeros_like(current), current)

    def matrix(self, slot: int) -> I64 | None:
        pair = self.matrices.get(slot)
        return None if pair is None else pair[0] + pair[1]

    def forget(self, slot: int, base: int, ranks: int) -> None:
        self.by_domain[base : base + ranks] = 0
        self.known.discard(slot)
        self.matrices.pop(slot, None)


def _take(rows: TrafficRows, pick: npt.NDArray[np.bool_]) -> TrafficRows:
    return TrafficRows(
        rows.slot[pick],
        rows.base[pick],
        rows.rank[pick],
        rows.peer[pick],
        rows.sent[pick],
        rows.since_ns[pick],
    )


def _join(parts: list[TrafficRows]) -> TrafficRows:
    return TrafficRows(
        *(
            np.concatenate([getattr(p, name) for p in parts])
            for name in ("slot", "base", "rank", "peer", "sent", "since_ns")
        )
    )
