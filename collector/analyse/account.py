"""Judged rows -> the running figures of their communicators and ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import Tables
from lanterne.collector.analyse import ops, scoring, totals
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.registry import KINDS, Registry
from lanterne.collector.analyse.scoring import Judged
from lanterne.collector.batch import HISTOGRAM_BINS

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Accounts:
    def __init__(
        self, tables: Tables, window: w.Window, waits: totals.Grouped, registry: Registry
    ) -> None:
        self._tables, self._window = tables, window
        self._waits, self._registry = waits, registry

    def add(self, j: Judged, base_of: I64) -> None:
        """Account for J rows, sorted by communicator; `base_of` [slot] is its first member."""
        self._count(j, base_of)
        own, blocked = scoring.own_times(self._tables, j)
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
        np.add.at(pane.outcome, (j.slot, j.outcome), 1)
        scored = j.outcome == w.SCORED
        np.add.at(pane.evidence, (j.slot[scored], j.evidence[scored]), 1)
        np.add.at(pane.rows, j.slot, 1)
        np.add.at(window.instances, j.slot, 1)
        whole = j.slot[j.complete]
        np.add.at(pane.complete, whole, 1)
        np.add.at(window.complete_total, whole, 1)
        # The communicator's own time line: arrivals of its first known rank, so of one clock.
        reference = np.zeros(len(base_of), np.int64)
        for slot in np.unique(j.slot).tolist():
            known = self._registry.process[base_of[slot] : base_of[slot] + j.ranks] >= 0
            reference[slot] = int(known.argmax())
        columns = np.arange(len(j.rows))
        lane = reference[j.slot]
        at, end = j.arrival[lane, columns], j.duration[lane, columns].astype(np.int64)
        if j.present is not None:
            there = j.present[lane, columns]
            at, end, slots = at[there], end[there], j.slot[there]
        else:
            slots = j.slot
        np.minimum.at(pane.first_ns, slots, at)
        np.maximum.at(pane.last_ns, slots, at)
        np.maximum.at(window.last_end, slots, at + end)

    def _sum(self, j: Judged, evidence: int, pick: I64, blame: F64, base_of: I64) -> None:
        pane, window = self._window.current, self._window
        whole = len(pick) == len(j.rows)
        wait = j.wait if whole else j.wait[:, pick]
        slot = j.slot[pick]
        self._histogram(wait, slot, j.op[pick], evidence)
        missing = np.isnan(wait)
        if missing.any():
            wait = np.where(missing, np.float32(0), wait)
        starts, members = _runs(slot, base_of, j.ranks)
        summed = np.add.reduceat(wait, starts, axis=1, dtype=np.float64)
        pane.wait[evidence][members] += summed
        window.wait_total[evidence][members] += summed
        charged = np.nan_to_num(blame[pick], nan=0.0)
        culprit = base_of[slot] + j.last[pick]
        np.add.at(pane.blame[evidence], culprit, charged)
        np.add.at(window.blame_total[evidence], culprit, charged)
        if evidence != ops.ENQUEUE:
            transfer = np.broadcast_to(j.transfer[pick], wait.shape)
            summed = np.add.reduceat(np.where(missing, 0.0, transfer), starts, axis=1)
            before = window.comm_total[members]
            window.comm_total[members] = np.where(np.isnan(before), 0.0, before) + summed

    def _histogram(self, wait: F32, slot: I64, op: npt.NDArray[np.uint8], evidence: int) -> None:
        """Waits binned by [2^b, 2^(b+1)) ns, per communicator, operation and evidence."""
        keys = totals.key(slot, op.astype(np.int64), np.int64(0), np.int64(evidence))
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
        per_row = np.nansum(wait, axis=0, dtype=np.float64)
        values[:, 0] = np.bincount(code, weights=per_row, minlength=len(distinct)).astype(np.int64)
        self._waits.add(distinct, values)

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
        known = groups >= 0
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


def _runs(slot: I64, base_of: I64, ranks: int) -> tuple[I64, I64]:
    """Where each communicator's rows begin, and its members: -> starts [S], members [rank, S]."""
    starts = np.flatnonzero(np.concatenate([[True], slot[1:] != slot[:-1]]))
    return starts, base_of[slot[starts]] + np.arange(ranks)[:, None]
