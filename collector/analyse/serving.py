"""Recent operations of each communicator with expert layers, and the steps that they make. Bounded.

Only communicators whose dispatches and combines are told apart are followed, and only while every
operation is sampled: of every second operation nobody can say what a step is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops, steps
from lanterne.collector.analyse.scoring import Judged
from lanterne.collector.snapshot import EVIDENCE, StepView

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

ROWS = 2048  # operations kept of each communicator
COMMUNICATORS = 128
KEPT_STEPS = 64  # of each, in the view
NS = 1e9

# Columns of a row, in this order.
NAMES = ("arrival", "duration", "wait", "own", "own_most", "slowest", "size", "seq", "symbol",
         "evidence")  # fmt: skip


@dataclass
class Recent:
    """Rows in order of arrival, which is their first column; new ones may come out of order."""

    rows: F64 | None = None
    fresh: list[F64] = field(default_factory=list)
    view: StepView | None = None

    def add(self, rows: F64) -> None:
        self.fresh.append(rows[-ROWS:])
        if sum(map(len, self.fresh)) > ROWS:
            self.settle()

    def settle(self) -> F64:
        if self.rows is None:
            self.rows = np.zeros((0, self.fresh[0].shape[1])) if self.fresh else np.zeros((0, 0))
        if self.fresh:
            self.rows = np.concatenate([self.rows, *self.fresh])
            self.fresh = []
            self.rows = self.rows[np.argsort(self.rows[:, 0], kind="stable")][-ROWS:]
        return self.rows


class Serving:
    def __init__(self) -> None:
        self._recent: dict[int, Recent] = {}
        self.dropped = 0  # communicators beyond the bound, counted once a block of rows

    def follows(self, judged: Judged) -> bool:
        """Whether `add` would keep any of the rows."""
        if judged.role.any():
            return True
        return bool(self._recent) and not self._recent.keys().isdisjoint(judged.slot.tolist())

    def add(self, judged: Judged, own: F32, seq: I64, lane: I64) -> None:
        """J judged rows with their own times [rank, J] in ns; seq, lane: [J]."""
        with_layers = set(np.unique(judged.slot[judged.role != 0]).tolist())
        for slot in np.unique(judged.slot).tolist():
            if slot in self._recent or slot in with_layers:
                pick = np.flatnonzero((judged.slot == slot) & judged.complete)
                if len(pick):
                    self._keep(slot, _rows(judged, own, seq, lane, pick))

    def _keep(self, slot: int, rows: F64) -> None:
        recent = self._recent.get(slot)
        if recent is None:
            if len(self._recent) >= COMMUNICATORS:
                self.dropped += 1
                return
            recent = self._recent[slot] = Recent()
        recent.add(rows)

    @property
    def slots(self) -> list[int]:
        """Those that are followed, in the order in which they were met."""
        return list(self._recent)

    def forget(self, slot: int) -> None:
        self._recent.pop(slot, None)

    def close(self) -> None:
        """A window has ended: work out the steps of what is new."""
        for recent in self._recent.values():
            if recent.fresh:
                recent.view = _view(recent.settle())

    def of(self, slot: int) -> StepView | None:
        """The steps of a communicator; None where none are known."""
        recent = self._recent.get(slot)
        return None if recent is None else recent.view


def _rows(j: Judged, own: F32, seq: I64, lane: I64, pick: I64) -> F64:
    """Means over ranks, seconds. Clocks of nodes differ by constants: differences are right."""
    rows: I64 | slice = slice(None) if len(pick) == len(j.rows) else pick
    arrival = j.arrival[:, rows]
    duration = j.duration[:, rows].mean(axis=0, dtype=np.float64)
    timed = (j.evidence[rows] == ops.DEVICE) | (j.evidence[rows] == ops.BLOCKING)
    mean, most, slowest = _own(np.broadcast_to(own, j.wait.shape)[:, rows])
    return np.stack(
        [
            (arrival[0] + (arrival - arrival[0]).mean(axis=0)) / NS,
            np.where(timed, duration, np.nan) / NS,
            j.wait[:, rows].mean(axis=0, dtype=np.float64) / NS,
            mean / NS,
            most / NS,
            slowest,
            j.size[:, rows].sum(axis=0, dtype=np.float64),
            seq[rows] * 2.0 + lane[rows],
            j.op[rows] * 4.0 + j.role[rows],
            j.evidence[rows].astype(np.float64),
        ],
        axis=1,
    )


def _own(part: F32) -> tuple[F64, F64, F64]:
    """[rank, J] own times -> [J] mean and largest of the known ones, and whose that is."""
    missing = np.isnan(part)
    if not missing.any():
        return (
            part.mean(axis=0, dtype=np.float64),
            part.max(axis=0).astype(np.float64),
            part.argmax(axis=0).astype(np.float64),
        )
    known = np.maximum((~missing).sum(axis=0), 1)
    filled = np.where(missing, np.float32(-np.inf), part)
    none = missing.all(axis=0)
    mean = np.where(missing, np.float32(0), part).sum(axis=0, dtype=np.float64) / known
    return (
        np.where(none, np.nan, mean),
        np.where(none, np.nan, filled.max(axis=0)),
        np.where(none, -1.0, filled.argmax(axis=0)),
    )


def _view(rows: F64) -> StepView | None:
    column = {name: rows[:, i] for i, name in enumerate(NAMES)}
    whole = {name: column[name].astype(np.int64) for name in ("slowest", "seq", "symbol")}
    table = steps.Operations(
        symbol=whole["symbol"],
        role=whole["symbol"] % 4,
        broken=broken(whole["seq"] // 2, whole["seq"] % 2),
        slowest=whole["slowest"],
        group=None,  # all of one communicator
        **{n: column[n] for n in ("arrival", "duration", "wait", "own", "own_most", "size")},
    )
    return view_of(*steps.split(table), column["evidence"], KEPT_STEPS)


def view_of(period: int, found: steps.Steps, evidence: F64, kept: int) -> StepView | None:
    """evidence: [n] of the operations that they are made of. None where no step is known."""
    if not len(found):
        return None
    usual = steps.usual(found)
    rests_on = np.bincount(evidence.astype(np.int64), minlength=len(EVIDENCE))
    rests_on[[ops.NO_EVIDENCE, ops.ENQUEUE]] = 0  # no step has such an operation
    recent = {n: getattr(found, n)[-kept:] for n in steps.Steps.__dataclass_fields__}
    return StepView(
        period=period,
        evidence=EVIDENCE[int(rests_on.argmax())],
        steps=recent,
        usual=usual[-kept:],
        medians=steps.medians(found, usual),
    )


def broken(seq: I64, lane: I64) -> npt.NDArray[np.bool_]:
    """Where an operation is missing before this one, in its lane."""
    found = np.zeros(len(seq), bool)
    for one in np.unique(lane).tolist():
        at = np.flatnonzero(lane == one)
        found[at[1:]] = np.diff(seq[at]) != 1
    return found
