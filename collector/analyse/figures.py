"""Shares, spans and evidence of every live communicator and member, as a snapshot shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import reasons, totals
from lanterne.collector.analyse.who import Slot

if TYPE_CHECKING:
    from lanterne.collector.analyse.engine import Engine

I64 = npt.NDArray[np.int64]


class Figures:
    """Per live communicator and per member, worked out once for both views."""

    def __init__(self, engine: Engine, live: list[tuple[int, Slot]]) -> None:
        window, registry = engine.window, engine.registry
        self.live = live
        self.slots = np.array([n for n, _ in live], dtype=np.int64)
        bases = np.array([s.base for _, s in live], dtype=np.int64)
        sizes = np.array([s.ranks for _, s in live], dtype=np.int64)
        self.comm = np.repeat(np.arange(len(live)), sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(live) else np.zeros(0, int)
        self.rank = np.arange(len(self.comm)) - np.repeat(starts, sizes)
        self.member = np.repeat(bases, sizes) + self.rank
        seen = registry.process[self.member] >= 0
        self.comm, self.rank, self.member = self.comm[seen], self.rank[seen], self.member[seen]
        self.seen = np.bincount(self.comm, minlength=len(live))
        self.outcome = window.current.outcome[self.slots] + window.closed.outcome[self.slots]
        evidence = window.current.evidence[self.slots] + window.closed.evidence[self.slots]
        # What most instances rest on; on a tie the better evidence.
        self.evidence = np.where(evidence.any(axis=1), evidence.argmax(axis=1), 0)
        self.evidence[~reasons.shown(self.outcome)] = 0
        self.span = window.spans()[self.slots]
        of = self.evidence[self.comm]
        with np.errstate(invalid="ignore", divide="ignore"):
            span = np.where(self.span > 0, self.span, np.nan)[self.comm]
            wait = window.current.wait[of, self.member] + window.closed.wait[of, self.member]
            blame = window.current.blame[of, self.member] + window.closed.blame[of, self.member]
            self.wait_share = np.where(of > 0, np.clip(wait / span, 0, 1), np.nan)
            self.blame_share = np.where(of > 0, np.clip(blame / span, 0, 1), np.nan)
        shares = np.bincount(self.comm, np.nan_to_num(self.wait_share), minlength=len(live))
        self.mean_share = shares / np.maximum(self.seen, 1)
        self.blame_known = np.nan_to_num(self.blame_share)
        self.histograms = _by_slot(engine.summaries)
        self.waits = _by_slot(engine.waits)


def _by_slot(table: totals.Grouped) -> dict[int, list[tuple[int, int, int, I64]]]:
    """slot -> (op, role, evidence, values) rows."""
    found: dict[int, list[tuple[int, int, int, I64]]] = {}
    for key, row in table.index.items():
        slot, op, role, evidence = totals.unkey(key)
        found.setdefault(slot, []).append((op, role, evidence, table.values[row]))
    return found
