"""Judged rows -> the running figures of their communicators and ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import Tables
from lanterne.collector.analyse import ops, scoring, totals
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.longest import Longest
from lanterne.collector.analyse.rank_steps import RankStepsOf
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.scoring import Judged
from lanterne.collector.analyse.serving import Serving
from lanterne.collector.analyse.who import KINDS
from lanterne.collector.batch import HISTOGRAM_BINS

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

# Own times of one communicator in one window that are kept for its medians: so many cells, but
# not fewer or more rows than this. Medians of more would cost time and say no more.
OWN_CELLS, OWN_ROWS_LEAST, OWN_ROWS_MOST = 1 << 20, 96, 384


class Accounts:
    def __init__(
        self, tables: Tables, window: w.Window, waits: totals.Grouped, registry: Registry
    ) -> None:
        self._tables, self._window = tables, window
        self._waits, self._registry = waits, registry
        self.serving = Serving()
        self.rank_steps = RankStepsOf()
        self.longest = Longest()

    def add(self, j: Judged, base_of: I64) -> None:
        """Account for J rows, sorted by communicator; `base_of` [slot] is its first member."""
        self._count(j, base_of)
        own, blocked = scoring.own_times(self._tables, j)
        follows = [s for s in (self.serving, self.rank_steps) if s.follows(j)]
        if follows:
            seq = self._tables.tag[j.rows]
            lane = (self._tables.table_of[j.rows] % 2).astype(np.int64)
            for each in follows:
                each.add(j, own, seq, lane)
        timed = (j.outcome == w.SCORED) | (j.outcome == w.CLOCK)
        if not timed.any():
            return
        blame = scoring.blames(j, own)
        for evidence in (ops.DEVICE, ops.BLOCKING, ops.ENQUEUE):
            pick = np.flatnonzero((j.outcome == w.SCORED) & (j.evidence == evidence))
            if len(pick):
                self._sum(j, evidence, pick, blame, base_of)
        self._sum_own(j, own, np.flatnonzero(timed), base_of)
        self._keep_own(j, own, blocked, np.flatnonzero(timed))

    def _count(self, j: Judged, base_of: I64) -> None:
        window, pane = self._window, self._window.current
        starts = _starts(j.slot)
        slots = j.slot[starts]

        def count(chosen: Bool) -> I64:
            counted: I64 = np.add.reduceat(chosen, starts, dtype=np.int64)
            return counted

        for outcome in np.unique(j.outcome).tolist():
            pane.outcome[slots, outcome] += count(j.outcome == outcome)
        scored = j.outcome == w.SCORED
        for evidence in np.unique(j.evidence[scored]).tolist():
            pane.evidence[slots, evidence] += count(scored & (j.evidence == evidence))
        rows, whole = np.diff(np.append(starts, len(j.slot))), count(j.complete)
        pane.rows[slots] += rows
        pane.complete[slots] += whole
        window.instances[slots] += rows
        window.complete_total[slots] += whole
        self._time_line(j, starts, slots, base_of)

    def _time_line(self, j: Judged, starts: I64, slots: I64, base_of: I64) -> None:
        """First and last arrival, of each communicator's first known rank: so of one clock."""
        window, pane = self._window, self._window.current
        members = base_of[slots][:, None] + np.arange(j.ranks)
        first = (self._registry.process[members] >= 0).argmax(axis=1)
        lane = np.repeat(first, np.diff(np.append(starts, len(j.slot))))
        columns = np.arange(len(j.rows))
        at, end = j.arrival[lane, columns], j.duration[lane, columns].astype(np.int64)
        end += at
        early = at
        if j.present is not None:
            there = j.present[lane, columns]
            early = np.where(there, at, np.iinfo(np.int64).max)
            at, end = np.where(there, at, -1), np.where(there, end, 0)
        pane.first_ns[slots] = np.minimum(pane.first_ns[slots], np.minimum.reduceat(early, starts))
        pane.last_ns[slots] = np.maximum(pane.last_ns[slots], np.maximum.reduceat(at, starts))
        window.last_end[slots] = np.maximum(
            window.last_end[slots], np.maximum.reduceat(end, starts)
        )

    def _sum(self, j: Judged, evidence: int, pick: I64, blame: F64, base_of: I64) -> None:
        pane, window = self._window.current, self._window
        whole = len(pick) == len(j.rows)
        wait = j.wait if whole else j.wait[:, pick]
        slot = j.slot[pick]
        self._histogram(j, wait, pick, evidence)
        missing = np.isnan(wait)
        if missing.any():
            wait = np.where(missing, np.float32(0), wait)
        starts, members = _runs(slot, base_of, j.ranks)
        summed = np.add.reduceat(wait, starts, axis=1, dtype=np.float64)
        pane.wait[evidence][members] += summed
        window.wait_total[evidence][members] += summed
        charged = np.nan_to_num(blame[pick], nan=0.0)
        culprit = base_of[slot] + j.last[pick]
        low = int(culprit.min())
        per_member = np.bincount(culprit - low, weights=charged)
        span = slice(low, low + len(per_member))
        pane.blame[evidence][span] += per_member
        window.blame_total[evidence][span] += per_member
        if evidence != ops.ENQUEUE:
            transfer = np.broadcast_to(j.transfer[pick], wait.shape)
            summed = np.add.reduceat(np.where(missing, 0.0, transfer), starts, axis=1)
            before = window.comm_total[members]
            window.comm_total[members] = np.where(np.isnan(before), 0.0, before) + summed

    def _histogram(self, j: Judged, wait: F32, pick: I64, evidence: int) -> None:
        """Waits binned by [2^b, 2^(b+1)) ns, per communicator, operation and evidence.

        wait: [rank, pick] of the rows `pick`.
        """
        slot, op = j.slot[pick], j.op[pick]
        same = np.full(len(slot), evidence, np.int64)
        keys = totals.key(slot, op.astype(np.int64), np.zeros_like(same), same)
        distinct, code = np.unique(keys, return_inverse=True)
        exponent = (np.maximum(wait, np.float32(1)).view(np.int32) >> 23) - 127
        missing = np.isnan(wait)
        # NaN has the largest exponent: its bin is one past the last and cut off below.
        bins = np.minimum(exponent, HISTOGRAM_BINS - 1)
        bins[missing] = HISTOGRAM_BINS
        width = HISTOGRAM_BINS + 1
        flat = np.bincount((bins + code * width).ravel(), minlength=len(distinct) * width)
        values = np.zeros((len(distinct), totals.WAIT_WIDTH), np.int64)
        values[:, 1:] = flat.reshape(len(distinct), width)[:, :HISTOGRAM_BINS]
        per_row: F64 = np.asarray(np.nansum(wait, axis=0, dtype=np.float64))
        values[:, 0] = np.bincount(code, weights=per_row, minlength=len(distinct)).astype(np.int64)
        self._waits.add(distinct, values)
        seq, last = self._tables.tag[j.rows[pick]], j.last[pick]
        self.longest.add(distinct, code, per_row, wait, seq, last, j.arrival[last, pick])

    def _sum_own(self, j: Judged, own: F32, pick: I64, base_of: I64) -> None:
        part = own if len(pick) == len(j.rows) else own[:, pick]
        part = np.where(np.isnan(part), np.float32(0), part)
        starts, members = _runs(j.slot[pick], base_of, j.ranks)
        summed = np.add.reduceat(part, starts, axis=1, dtype=np.float64)
        self._window.compute_total[members] += summed

    def _keep_own(self, j: Judged, own: F32, blocked: F32, pick: I64) -> None:
        """Remember own times by kind of operation for the window's medians."""
        whole = len(pick) == len(j.rows)
        op, role, evidence = j.op[pick], j.role[pick], j.evidence[pick]
        keys = totals.key(
            j.slot[pick], op.astype(np.int64), role.astype(np.int64), evidence.astype(np.int64)
        )
        distinct, code = np.unique(keys, return_inverse=True)
        groups = np.array([self._kind(int(k)) for k in distinct])[code]
        known = (groups >= 0) & self._sampled(j, pick)
        if not known.all():
            pick, groups, whole = pick[known], groups[known], False
        if not len(pick):
            return
        blocked = np.broadcast_to(blocked, own.shape)
        self._window.store(
            w.OwnBlock(
                ranks=j.ranks,
                group=groups,
                own=own if whole else own[:, pick],
                blocked=blocked if whole else blocked[:, pick],
                size=j.size if whole else j.size[:, pick],
            )
        )

    def _sampled(self, j: Judged, pick: I64) -> Bool:
        """Rows to keep: at random where a window brings more than its medians need."""
        most = min(max(OWN_CELLS // j.ranks, OWN_ROWS_LEAST), OWN_ROWS_MOST)
        slot = j.slot[pick]
        every = np.maximum(-(-self._window.expected(slot) // most), 1)
        # Hashed, not counted: operations alternate, a fixed step would always meet the same kind.
        mixed = (self._tables.tag[j.rows[pick]] * 2_654_435_761 & 0xFFFFFFFF) >> 12
        sampled: Bool = mixed % every == 0
        return sampled

    def _kind(self, value: int) -> int:
        """slot * KINDS + number of this kind of operation; -1 beyond KINDS kinds."""
        number, op, role, evidence = totals.unkey(value)
        slot = self._registry.slots[number]
        if slot is None:
            return -1
        kind = slot.kinds.get((op, role, evidence))
        if kind is None:
            if len(slot.kinds) >= KINDS:
                return -1
            kind = slot.kinds[(op, role, evidence)] = len(slot.kinds)
        return number * KINDS + kind


def _starts(slot: I64) -> I64:
    """Where each communicator's rows begin; rows are sorted by communicator."""
    return np.flatnonzero(np.concatenate([[True], slot[1:] != slot[:-1]]))


def _runs(slot: I64, base_of: I64, ranks: int) -> tuple[I64, I64]:
    """Where each communicator's rows begin, and its members: -> starts [S], members [rank, S]."""
    starts = _starts(slot)
    return starts, base_of[slot[starts]] + np.arange(ranks)[:, None]
