"""How far the sequence numbers of two ranks of a communicator are apart.

The ranks leave a barrier together (or arrive at it within a fraction of a period), so the shift
between two ranks is the one under which the times of equal numbers agree. It must be clearly better
than its neighbours. Shifts that would set different operations against each other (a dispatch
against a combine) are none: beside a rank that is late by a large part of the period, the one after
could else seem nearer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops
from lanterne.collector.analyse.gather import Flow

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Series = tuple[I64, I64, I64]  # seq, time, kind: operation and role

LEAST = 8  # operations to tell a shift by
REACH = 6  # shifts tried to either side of the nearest in time
CLEARLY = 0.4  # of the second best's disagreement
FAR = np.int64(1 << 62)
UNLIKE = 0.2  # of the pairs that may be of different operations: what is told of them may be wrong


@dataclass(frozen=True)
class Rows:
    """Columns of operations of one table, in the order in which they were told."""

    member: I64
    seq: I64
    time: I64  # when the ranks were together, ns
    kind: I64
    every: Bool  # told among all of its rank, not among a sample

    def __len__(self) -> int:
        return len(self.member)

    def take(self, index: I64) -> Rows:
        return Rows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def rows_of(f: Flow) -> Rows:
    # The end of a call that waits, else its arrival.
    time = f.arrival + np.where(f.evidence == ops.ENQUEUE, 0, f.duration)
    every = np.broadcast_to(np.equal(f.stride, 1), len(f.seq))
    return Rows(f.member, f.seq, time, f.op.astype(np.int64) << 8 | f.role, every)


def joined(parts: list[Rows]) -> Rows:
    columns = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Rows)}
    return Rows(**columns)


def newest(rows: Rows, each: int) -> Rows:
    """The last so many of each member."""
    order = np.argsort(rows.member, kind="stable")
    _, first, counts = np.unique(rows.member[order], return_index=True, return_counts=True)
    ends = np.repeat(first + counts, counts)
    return rows.take(np.sort(order[ends - np.arange(len(order)) <= each]))


def series(rows: Rows) -> tuple[dict[int, Series], dict[int, bool]]:
    """-> what each member told, and whether that is every operation of a time."""
    order = np.lexsort((rows.seq, rows.member))
    rows = rows.take(order)
    members, first, counts = np.unique(rows.member, return_index=True, return_counts=True)
    ends = (first + counts).tolist()
    of: dict[int, Series] = {}
    whole: dict[int, bool] = {}
    for m, begin, end in zip(members.tolist(), first.tolist(), ends, strict=True):
        mine = np.arange(begin, end)
        every = mine[rows.every[begin:end]]
        whole[m] = len(every) >= LEAST
        if whole[m]:
            mine = every
        of[m] = rows.seq[mine], rows.time[mine], rows.kind[mine]
    return of, whole


def shift(mine: Series, reference: Series) -> int | None:
    """What to add to a rank's numbers to get the reference's; None where it is not clear."""
    seq, time, kind = mine
    ref_seq, ref_time, ref_kind = reference
    if len(seq) < LEAST or len(ref_seq) < LEAST:
        return None
    at = int(np.abs(time - ref_time[len(ref_time) // 2]).argmin())
    nearest = int(np.abs(ref_time - time[at]).argmin())
    step = max(1, min(int(np.diff(seq).min()), int(np.diff(ref_seq).min())))
    by = int(ref_seq[nearest] - seq[at]) + step * np.arange(-REACH, REACH + 1)
    # [shift, operation]: all shifts at once.
    wanted = seq + by[:, None]
    place = np.searchsorted(ref_seq, wanted).clip(0, len(ref_seq) - 1)
    match = ref_seq[place] == wanted
    count = match.sum(axis=1)
    unlike = (match & _differ(kind, ref_kind[place])).sum(axis=1)
    can = np.flatnonzero((count >= LEAST) & (unlike <= UNLIKE * count))
    if len(can) < 2:
        return None
    apart = np.sort(np.where(match, np.abs(time - ref_time[place]), FAR)[can], axis=1)
    middle = count[can] // 2
    lower = np.take_along_axis(apart, (count[can, None] - 1) // 2, axis=1)[:, 0]
    cost = (lower + apart[np.arange(len(can)), middle]) / 2
    best, second = np.argsort(cost, kind="stable")[:2]
    return int(by[can[best]]) if cost[best] <= CLEARLY * cost[second] else None


def _differ(one: I64, other: I64) -> Bool:
    """Whether operations, or roles where both are known, differ."""
    roles = (one & 0xFF > 0) & (other & 0xFF > 0)
    differ: Bool = np.where(roles, one != other, one >> 8 != other >> 8)
    return differ
