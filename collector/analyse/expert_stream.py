"""What one source tells of the experts of one model: window, hour, placement. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import layers, moe
from lanterne.collector.analyse.load_history import History
from lanterne.collector.reports import MAX_EXPERTS, MAX_LAYERS, PHYSICAL, RANK, UNITS, ExpertLoad
from lanterne.collector.snapshot import ExpertView

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

TOP = 5
HOT_SHARE = 0.1


class Key(NamedTuple):
    """Sources are never added up: two of them may tell of the same tokens."""

    workload: str
    engine: str
    source: str
    model: str
    unit: int


class Stream:
    """Loads of one Key. `experts` counts columns: logical, physical, or ranks, as `unit` says."""

    def __init__(self, key: Key, layer: tuple[int, ...], experts: int) -> None:
        self.key = key
        self.layer = layer
        self.experts = experts
        rows = len(layer)
        self.load: F64 = np.zeros((rows, experts))
        self.tokens: F64 = np.zeros(rows)
        self.local: F64 = np.zeros((2, rows))  # stayed on their rank; with known source
        self.rank_of: I32 = np.full((rows, experts), -1, np.int32)
        self.logical_of: I32 = np.full((rows, experts), -1, np.int32)
        self.history: History | None = None
        self.dirty = False
        self.last_ns = 0
        self.view: ExpertView | None = None

    @property
    def nbytes(self) -> int:
        history = 0 if self.history is None else self.history.nbytes
        return int(self.load.nbytes) * 3 + int(self.rank_of.nbytes) * 2 + history

    def add(self, told: ExpertLoad) -> int:
        """Take a load of the same `experts`; -> layers that did not fit."""
        rows, taken = self._rows(told.layer)
        counts = told.counts[taken]
        self.load[rows] += counts
        if told.tokens is not None:
            self.tokens[rows] += told.tokens[taken]
        for kept, given in (
            (self.rank_of, told.rank_of_expert), (self.logical_of, told.logical_of_physical)
        ):  # fmt: skip
            if given is not None:
                kept[rows] = given if given.ndim == 1 else given[taken]
        if told.source_rank >= 0:
            where = self.rank_of[rows]
            known = (where >= 0).all(axis=1)
            own = np.where(where == told.source_rank, counts, 0.0).sum(axis=1)
            self.local[0, rows[known]] += own[known]
            self.local[1, rows[known]] += counts[known].sum(axis=1)
        self.dirty = True
        return len(told.layer) - int(taken.sum())

    def _rows(self, wanted: tuple[int, ...]) -> tuple[I64, npt.NDArray[np.bool_]]:
        """-> (own rows, which of the wanted they are); new layers are made room for."""
        if wanted != self.layer:
            new = sorted(set(wanted) - set(self.layer))[: max(0, MAX_LAYERS - len(self.layer))]
            if new:
                self._widen(tuple(sorted((*self.layer, *new))))
        have = np.array(self.layer)
        asked = np.array(wanted)
        rows = np.searchsorted(have, asked)
        taken = (rows < len(have)) & (have[np.minimum(rows, len(have) - 1)] == asked)
        return rows[taken], taken

    def _widen(self, layer: tuple[int, ...]) -> None:
        old = np.searchsorted(np.array(layer), np.array(self.layer))
        wide = Stream(self.key, layer, self.experts)
        for name in ("load", "tokens", "rank_of", "logical_of"):
            getattr(wide, name)[old] = getattr(self, name)
        wide.local[:, old] = self.local
        self.load, self.tokens, self.local = wide.load, wide.tokens, wide.local
        self.rank_of, self.logical_of = wide.rank_of, wide.logical_of
        self.layer = layer
        if self.history is not None:
            self.history = self.history.with_layers(old, len(layer))

    def close(self, now: float) -> None:
        """A window has ended: what came in it becomes the view, and part of the hour."""
        if not self.dirty and self.view is None:
            return
        if self.dirty:
            self._view_window(now)
        elif self.history is not None and self.view is not None:
            self.view = self._with_hour(self.view, now)

    def _view_window(self, now: float) -> None:
        load, tokens, local = self.load, self.tokens, self.local
        self.load, self.tokens = np.zeros_like(load), np.zeros_like(tokens)
        self.local = np.zeros_like(local)
        self.dirty = False
        rank_of = self._rank_of()
        logical_of = self._logical_of()
        with np.errstate(divide="ignore", invalid="ignore"):
            stayed = np.where(local[1] > 0, local[0] / local[1], np.nan)
        measured = layers.measure(
            load, rank_of_expert=rank_of, logical_of_physical=logical_of, local=stayed
        )
        logical = load if logical_of is None else moe.logical_loads(load, logical_of)
        if self.history is None or self.history.ring.shape[1:] != logical.shape:
            self.history = History(*logical.shape)
        self.history.add(logical, now)
        measures = {n: getattr(measured, n) for n in layers.LayerMeasures.__dataclass_fields__}
        if self.key.unit == RANK:  # columns are ranks: nothing is known of experts
            measures = {n: measures[n] for n in ("assignments", "balancedness")}
        self.view = self._with_hour(
            ExpertView(
                workload=self.key.workload,
                engine=self.key.engine,
                source=self.key.source,
                model=self.key.model,
                unit=UNITS[self.key.unit] if logical_of is None else UNITS[1],
                layer=self.layer,
                load=logical,
                tokens=np.where(tokens > 0, tokens, np.nan),
                physical_load=load if logical_of is not None else None,
                rank_of_expert=rank_of,
                logical_of_physical=logical_of,
                measures=measures,
                summary=_summary(measured, self.key.unit),
                window_end=now,
            ),
            now,
        )

    def _with_hour(self, view: ExpertView, now: float) -> ExpertView:
        if self.history is None:
            return view
        hour, seconds = self.history.hour(now)
        return view.with_hour(hour, seconds, moe.top(hour, TOP), moe.hot_set(hour, HOT_SHARE))

    def _rank_of(self) -> I64 | None:
        """[layers, experts], where known of all."""
        if self.key.unit == RANK:
            return np.broadcast_to(np.arange(self.experts), self.load.shape)
        return self.rank_of.astype(np.int64) if bool((self.rank_of >= 0).all()) else None

    def _logical_of(self) -> I64 | None:
        if self.key.unit != PHYSICAL or bool((self.logical_of < 0).any()):
            return None
        return self.logical_of.astype(np.int64)

    # -- over a restart of the collector ------------------------------------------------------

    def export(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
        """-> facts and arrays of the history; None where there is none."""
        if self.history is None:
            return None
        facts, arrays = self.history.export()
        shape = list(self.history.ring.shape[1:])
        facts |= {"key": list(self.key), "layer": list(self.layer), "experts": self.experts}
        return facts | {"shape": shape}, arrays

    @classmethod
    def restored(cls, facts: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Stream:
        """Raises ValueError, KeyError or TypeError where `export` cannot have given this."""
        workload, engine, source, model, unit = facts["key"]
        key = Key(str(workload), str(engine), str(source), str(model), int(unit))
        layer = tuple(int(n) for n in facts["layer"])
        rows, columns = (int(n) for n in facts["shape"])
        experts = int(facts["experts"])
        if rows != len(layer) or list(layer) != sorted(set(layer)) or not 1 <= rows <= MAX_LAYERS:
            raise ValueError(f"{rows} rows of layers {layer[:8]}")
        if not (1 <= experts <= MAX_EXPERTS and 1 <= columns <= MAX_EXPERTS):
            raise ValueError(f"{experts} experts, {columns} columns")
        made = cls(key, layer, experts)
        made.history = History.restored(facts, arrays, shape=(rows, columns))
        return made


def _summary(measured: layers.LayerMeasures, unit: int) -> dict[str, float]:
    found = measured.summary()
    if unit == RANK:
        found = {name: value for name, value in found.items() if name.startswith("balancedness")}
    return found
