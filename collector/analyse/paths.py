"""Matrices of waits per communicator, and the slow senders, receivers and paths that they show.

Agents tell, for each receiver and sender, how long receives took since the receiver began. What of
it was waiting for a sender that came late is known from the arrivals, and is taken off: a rank that
is late is no slow sender. What is left is how long the transfer took once both were there.
Without such times the class of a fault of this kind is `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.transfers import MATRIX_RANKS, Transfers
from lanterne.collector.analyse.wait_matrix import WaitDiagnosis, diagnose_wait_matrix
from lanterne.collector.analyse.who import Resolved
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.snapshot import CLASSES

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

SLOW_SENDER, SLOW_RECEIVER, SLOW_PATH = map(
    CLASSES.index, ("slow_sender", "slow_receiver", "slow_path")
)
UNKNOWN = CLASSES.index("unknown")

MAX_CELLS = 1 << 20  # of all matrices together, 16 bytes each
LEAST_RECEIVES = 5  # in a window, or a cell says nothing
NAME_AFTER, CLEAR_AFTER = 2, 2  # windows
DEARER = 2.5  # times the least gain for own times: in a matrix some cells are always the slowest
UNEXPLAINED = 0.05  # of the time, of which the rank has nearly all: named, though not why
MOST_OF_IT = 0.6
NO_MATRIX = (
    "no times of single receives: slow senders, receivers and paths are unknown "
    "(the NCCL profiler plugin tells them, on communicators of at most 64 ranks)"
)


class Matrix:
    """Receives of one window; [receiver, sender]."""

    def __init__(self, ranks: int) -> None:
        self.wait_ns = np.zeros((ranks, ranks), np.int64)
        self.receives = np.zeros((ranks, ranks), np.int64)

    def mean(self) -> F64:
        few = self.receives < LEAST_RECEIVES
        mean: F64 = np.where(few, np.nan, self.wait_ns / np.maximum(self.receives, 1))
        return mean


@dataclass(frozen=True)
class Finding:
    """A member that transfers are slow with."""

    klass: int
    share: float  # of the time, that would come back
    why: str
    other: int = -1  # the sending rank of a slow path
    confidence: float = 0.9


@dataclass
class _Verdict:
    finding: Finding
    seen: int = 1  # windows in a row with it
    missed: int = 0  # windows in a row without it, once named
    named: bool = False


class Paths:
    def __init__(self, min_gain: float) -> None:
        self._min_gain = min_gain
        self._filling: dict[int, Matrix] = {}
        self.closed: dict[int, F64] = {}  # slot -> [receiver, sender] ns, lateness taken off
        self._cells = 0
        self.wanted: set[int] = set()  # communicators whose lateness `Transfers` must know
        self._verdicts: dict[int, _Verdict] = {}  # by member
        self.dropped = 0  # rows of matrices beyond the bound

    def add(self, group: Iterable[tuple[DecodedBatch, Resolved]], ranks_of: dict[int, int]) -> None:
        """What the batches tell of single receives. `ranks_of`: size of each live slot."""
        for batch, r in group:
            t = batch.traffic
            if not t.waits.size:
                continue
            slot, rank = r.slot[t.communicator].astype(np.int64), r.rank[t.communicator]
            timed = (slot >= 0) & (t.receives > 0)
            for number in np.unique(slot[timed]).tolist():
                rows = timed & (slot == number)
                matrix = self._matrix(number, ranks_of.get(number, 0))
                if matrix is None:
                    self.dropped += int(rows.sum())
                    continue
                cell = rank[rows], t.peer[rows].astype(np.int64)
                np.add.at(matrix.wait_ns, cell, t.wait_ns[rows])
                np.add.at(matrix.receives, cell, t.receives[rows])

    def _matrix(self, slot: int, ranks: int) -> Matrix | None:
        found = self._filling.get(slot)
        if found is None and 2 <= ranks <= MATRIX_RANKS:
            if self._cells + ranks * ranks > MAX_CELLS:
                return None
            self._cells += ranks * ranks
            found = self._filling[slot] = Matrix(ranks)
            self.wanted.add(slot)
        return found

    def forget(self, slot: int, base: int, ranks: int) -> None:
        self._filling.pop(slot, None)
        self.closed.pop(slot, None)
        self.wanted.discard(slot)
        for member in range(base, base + ranks):
            self._verdicts.pop(member, None)

    def named(self) -> dict[int, Finding]:
        """By member."""
        return {m: v.finding for m, v in self._verdicts.items() if v.named}

    def close(
        self, transfers: Transfers, live: Iterable[Span], node: npt.NDArray[np.int32]
    ) -> None:
        """A window has ended: judge its matrices. `node` [member]."""
        matrices, self._filling, self._cells = self._filling, {}, 0
        self.closed = {}
        found: dict[int, Finding] = {}
        for span in live:
            matrix = matrices.get(span.slot)
            if matrix is not None:
                late = transfers.lateness.get(span.slot)
                mean = None if late is None else late.mean()
                if mean is not None:
                    self.closed[span.slot] = np.maximum(matrix.mean() - mean, 0.0)
                    where = node[span.base : span.base + span.ranks]
                    diagnosis = diagnose_wait_matrix(self.closed[span.slot], where)
                    found.update(findings(diagnosis, matrix, span, self._min_gain))
            else:
                found.update(_unexplained(transfers, span))
        self._settle(found)
        self.wanted.clear()
        self.wanted.update(matrices)

    def _settle(self, found: dict[int, Finding]) -> None:
        for member, finding in found.items():
            v = self._verdicts.get(member)
            if v is None or (v.finding.klass != finding.klass and not v.named):
                self._verdicts[member] = _Verdict(finding)
                continue
            v.seen, v.missed = v.seen + 1, 0
            v.finding = finding
            v.named = v.named or v.seen >= NAME_AFTER
        for member in [m for m in self._verdicts if m not in found]:
            v = self._verdicts[member]
            v.missed += 1
            if not v.named or v.missed >= CLEAR_AFTER:
                del self._verdicts[member]


@dataclass(frozen=True)
class Span:
    """One communicator in the closed window."""

    slot: int
    base: int  # its first member
    ranks: int
    rows: int  # timed operations
    span_ns: float
    timed: bool  # on durations, not on arrivals alone


def findings(d: WaitDiagnosis, matrix: Matrix, span: Span, min_gain: float) -> dict[int, Finding]:
    """By member: what the diagnosis of a communicator's matrix is worth naming its ranks for.

    min_gain: share of the time, see DEARER.
    """
    found: dict[int, Finding] = {}
    if not d or span.span_ns <= 0:
        return found
    per_ns = float(np.median(matrix.receives[matrix.receives > 0])) / span.span_ns

    def add(rank: int, klass: int, delay: float, why: str, other: int = -1) -> None:
        """Of several of one rank the one that costs most."""
        old = found.get(span.base + rank)
        if old is None or old.share < delay * per_ns:
            found[span.base + rank] = Finding(klass, delay * per_ns, why, other)

    for rank, delay in zip(d.slow_receivers, d.receiver_delay, strict=True):
        why = f"whatever it receives takes {delay / 1e6:.3g} ms longer (slow receiver, or incast)"
        add(rank, SLOW_RECEIVER, delay, why)
    for rank, delay in zip(d.slow_senders, d.sender_delay, strict=True):
        add(rank, SLOW_SENDER, delay, f"whatever it sends arrives {delay / 1e6:.3g} ms later")
    for (receiver, sender), delay in zip(d.slow_paths, d.path_delay, strict=True):
        why = f"receiving from rank {sender} takes {delay / 1e6:.3g} ms longer than other pairs"
        add(receiver, SLOW_PATH, delay, why, sender)
    return {m: f for m, f in found.items() if f.share >= DEARER * min_gain}


def _unexplained(transfers: Transfers, span: Span) -> dict[int, Finding]:
    """The rank that nearly all lateness without own time is due to: named, not known why."""
    sampled = int(transfers.rows[span.slot])
    if not span.timed or sampled < LEAST_RECEIVES or span.span_ns <= 0:
        return {}
    late = transfers.unexplained[span.base : span.base + span.ranks]
    worst, total = int(late.argmax()), float(late.sum())
    share = float(late[worst]) / sampled * span.rows / span.span_ns
    if share < UNEXPLAINED or float(late[worst]) < MOST_OF_IT * total:
        return {}
    why = f"the others wait for it, though its own time is no longer than theirs; {NO_MATRIX}"
    return {span.base + worst: Finding(UNKNOWN, share, why, confidence=0.5)}
