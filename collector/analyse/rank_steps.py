"""Steps of single ranks over all of their communicators. Bounded.

A step of a rank spans its communicators: all-reduces of tensor parallelism, dispatches and combines
of the experts, sends to the next pipeline stage. Followed are ranks of communicators with expert
layers (see `serving`) that hold others, too; what is only one communicator's is there already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops, steps
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.scoring import Judged
from lanterne.collector.analyse.serving import KEPT_STEPS, NS, Recent, broken, view_of
from lanterne.collector.snapshot import RankSteps, StepView

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

RANKS = 16  # processes that are followed

# Columns of a row, in this order.
NAMES = ("arrival", "duration", "wait", "own", "size", "seq", "lane", "op", "role", "evidence",
         "slot")  # fmt: skip


@dataclass
class _Followed:
    recent: Recent
    rank_of: dict[int, int]  # by slot
    shown: int  # slot under which it is shown: the communicator with expert layers


class RankStepsOf:
    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}  # by process
        self._in: dict[int, list[int]] = {}  # by slot: the processes that are followed
        self.left_out = 0  # processes beyond the bound, of the last window

    def follows(self, judged: Judged) -> bool:
        """Whether `add` would keep any of the rows."""
        return bool(self._in) and not self._in.keys().isdisjoint(judged.slot.tolist())

    def add(self, judged: Judged, own: F32, seq: I64, lane: I64) -> None:
        """J judged rows with their own times [rank, J] in ns; seq, lane: [J]."""
        for slot in self._in.keys() & set(judged.slot.tolist()):
            rows = np.flatnonzero(judged.slot == slot)
            for process in self._in[slot]:
                followed = self._followed[process]
                rank = followed.rank_of[slot]
                if rank < judged.ranks:
                    followed.recent.add(_rows(judged, own, seq, lane, rows, rank))

    def forget(self, slot: int) -> None:
        """A communicator that is new: its number may have been another's."""
        for process in self._in.pop(slot, ()):
            self._followed.pop(process, None)
        self._in = {
            slot: kept
            for slot, some in self._in.items()
            if (kept := [p for p in some if p in self._followed])
        }

    def close(self, registry: Registry, layered: list[int]) -> None:
        """A window has ended: work out steps, and whom to follow. layered: slots of communicators
        with expert layers."""
        for followed in self._followed.values():
            if followed.recent.fresh:
                followed.recent.view = _view(followed.recent.settle())
        self._choose(registry, layered)

    def _choose(self, registry: Registry, layered: list[int]) -> None:
        if not layered:
            self._followed, self._in, self.left_out = {}, {}, 0
            return
        live = [(n, s) for n, s in enumerate(registry.slots) if s is not None]
        sizes = [s.ranks for _, s in live]
        rank = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
        slot = np.repeat(np.array([n for n, _ in live], np.int64), sizes)
        base = np.repeat(np.array([s.base for _, s in live], np.int64), sizes)
        process = registry.process[base + rank]
        holds = np.bincount(process[process >= 0], minlength=1)
        several = (process >= 0) & (holds[np.maximum(process, 0)] > 1)
        wanted: dict[int, int] = {}  # process -> the slot that it is shown under
        for number in layered:
            if len(wanted) >= RANKS:
                break
            for which in process[several & (slot == number)].tolist():
                wanted.setdefault(which, number)
        every = np.unique(process[several & np.isin(slot, layered)])
        self.left_out = max(0, len(every) - RANKS)
        before, self._followed, self._in = self._followed, {}, {}
        for which in list(wanted)[:RANKS]:
            rows = np.flatnonzero(process == which)
            ranks = dict(zip(slot[rows].tolist(), rank[rows].tolist(), strict=True))
            if len(ranks) < 2:  # several ranks of one communicator
                continue
            known = before.get(which)
            recent = Recent() if known is None else known.recent
            self._followed[which] = _Followed(recent, ranks, wanted[which])
            for number in ranks:
                self._in.setdefault(number, []).append(which)

    def views(self, comm_of: dict[int, int], registry: Registry) -> tuple[RankSteps, ...]:
        """comm_of: number of each slot's communicator in the snapshot."""
        found = []
        for process, followed in self._followed.items():
            view, comm = followed.recent.view, comm_of.get(followed.shown)
            if view is None or comm is None:
                continue
            found.append(
                RankSteps(
                    comm=comm,
                    rank=followed.rank_of[followed.shown],
                    pid=int(registry.process_pid[process]),
                    communicators=tuple(
                        sorted(comm_of[s] for s in followed.rank_of if s in comm_of)
                    ),
                    steps=view,
                )
            )
        return tuple(found)


def _rows(j: Judged, own: F32, seq: I64, lane: I64, rows: I64, rank: int) -> F64:
    """[k, len(NAMES)] of one rank; seconds on its own clock."""
    if j.present is not None:
        rows = rows[j.present[rank, rows]]
    timed = (j.evidence[rows] == ops.DEVICE) | (j.evidence[rows] == ops.BLOCKING)
    # What is no barrier has no wait of its own: it counts as transfer, waiting included.
    wait = np.where(j.outcome[rows] == w.ROOTED, np.float32(0), j.wait[rank, rows])
    mine = np.broadcast_to(own, j.wait.shape)[rank, rows]
    columns = (
        j.arrival[rank, rows] / NS,
        np.where(timed, j.duration[rank, rows], np.nan) / NS,
        np.where(timed, wait, np.nan) / NS,
        mine / NS,
        j.size[rank, rows],
        seq[rows],
        lane[rows],
        j.op[rows],
        j.role[rows],
        j.evidence[rows],
        j.slot[rows],
    )
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def _view(rows: F64) -> StepView | None:
    column = {name: rows[:, i] for i, name in enumerate(NAMES)}
    whole = {n: column[n].astype(np.int64) for n in ("seq", "lane", "op", "role", "slot")}
    line = whole["slot"] * 2 + whole["lane"]  # sequence numbers count in each by itself
    table = steps.Operations(
        symbol=whole["slot"] << 10 | whole["op"] << 2 | whole["role"],
        role=whole["role"],
        broken=broken(whole["seq"], line),
        slowest=np.full(len(rows), -1),
        own_most=column["own"],
        group=whole["slot"],
        **{n: column[n] for n in ("arrival", "duration", "wait", "own", "size")},
    )
    period, found = steps.split(table)
    return view_of(period, steps.until(found, _told_until(column["arrival"], line, found)),
                   column["evidence"], KEPT_STEPS)  # fmt: skip


def _told_until(arrival: F64, line: I64, found: steps.Steps) -> float:
    """Communicators are judged one sooner, one later: up to when all that belong to a step are."""
    lines, index, count = np.unique(line, return_inverse=True, return_counts=True)
    last = np.full(len(lines), -np.inf)
    np.maximum.at(last, index, arrival)
    each = count >= max(1, len(found) // 2)  # the others do not come in every step
    return float(last[each].min(initial=np.inf))
