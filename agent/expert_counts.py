"""Expert load that engines tell, checked and gathered until the window closes. No IO.

Several threads add, one takes. Everything is bounded; what does not fit is dropped and counted.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]

# What the collector accepts.
MAX_LAYERS = 512
MAX_EXPERTS = 4096
MAX_NUMBER = 65_535  # of a layer or rank
MAX_COUNT = float(1 << 47)
MAX_TEXT = 128
UNITS = ("logical", "physical", "rank")

MAX_PENDING = 64  # different loads in one window
MAX_PENDING_BYTES = 32 << 20
MAX_BASELINES = 256


@dataclass(frozen=True)
class Load:
    """One proto ExpertLoad, from `load`, which checks it."""

    workload: str
    engine: str
    source: str
    model: str
    unit: str
    layer: tuple[int, ...]
    counts: F64  # [layers, experts]
    tokens: F64 | None = None  # [layers]
    rank_of_expert: U32 | None = None  # [experts] or [layers, experts]
    logical_of_physical: U32 | None = None
    source_rank: int = -1

    @property
    def key(self) -> tuple[object, ...]:
        return (self.workload, self.engine, self.source, self.model, self.unit, self.layer,
                self.counts.shape[1], self.source_rank)  # fmt: skip

    @property
    def nbytes(self) -> int:
        parts = (self.counts, self.tokens, self.rank_of_expert, self.logical_of_physical)
        return sum(part.nbytes for part in parts if part is not None)


def load(
    counts: Any,
    *,
    source: str,
    workload: str = "",
    engine: str = "",
    model: str = "",
    unit: str = "logical",
    layers: Sequence[int] | None = None,
    tokens: Any = None,
    rank_of_expert: Any = None,
    logical_of_physical: Any = None,
    source_rank: int | None = None,
) -> Load:
    """A checked load. Raises ValueError that names the field and what is allowed."""
    values = _numbers("counts", counts)
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or not values.size:
        raise ValueError(f"counts has shape {values.shape}; it must be [layers][experts]")
    rows, experts = values.shape
    if rows > MAX_LAYERS or experts > MAX_EXPERTS:
        raise ValueError(
            f"counts has {rows} layers of {experts} experts; at most {MAX_LAYERS} of {MAX_EXPERTS}"
        )
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    if rank_of_expert is not None and unit == "rank":
        raise ValueError("rank_of_expert has no meaning where unit is rank")
    if logical_of_physical is not None and unit != "physical":
        raise ValueError("logical_of_physical has a meaning only where unit is physical")
    if source_rank is not None and not 0 <= source_rank <= MAX_NUMBER:
        raise ValueError(f"source_rank is {source_rank}, not 0 to {MAX_NUMBER}")
    told = None
    if tokens is not None:
        told = _numbers("tokens", tokens)
        if told.shape != (rows,):
            raise ValueError(f"tokens has shape {told.shape}; it must be [{rows}], one a layer")
    return Load(
        workload=_text("workload", workload),
        engine=_text("engine", engine),
        source=source,
        model=_text("model", model),
        unit=unit,
        layer=_layers(layers, rows),
        counts=values,
        tokens=told,
        rank_of_expert=_places("rank_of_expert", rank_of_expert, values.shape, MAX_NUMBER),
        logical_of_physical=_places(
            "logical_of_physical", logical_of_physical, values.shape, MAX_EXPERTS - 1
        ),
        source_rank=-1 if source_rank is None else source_rank,
    )


def _numbers(name: str, given: Any) -> F64:
    try:
        values = np.array(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no array of numbers with equally long rows") from error
    if values.size and not (values.min() >= 0 and values.max() <= MAX_COUNT):  # NaN fails both
        raise ValueError(f"{name} must hold numbers from 0 to 2^47, no NaN")
    return values


def _layers(given: Sequence[int] | None, rows: int) -> tuple[int, ...]:
    layers = tuple(range(rows)) if given is None else tuple(int(n) for n in given)
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if len(layers) != rows or not ascending or not 0 <= layers[0] <= layers[-1] <= MAX_NUMBER:
        raise ValueError(f"layers must be {rows} ascending numbers from 0 to {MAX_NUMBER}")
    return layers


def _places(name: str, given: Any, shape: tuple[int, ...], most: int) -> U32 | None:
    if given is None:
        return None
    values = np.asarray(given)
    if values.dtype.kind not in "iu" or values.shape not in (shape, shape[1:]):
        raise ValueError(f"{name} must be whole numbers, one an expert: [experts], or as counts")
    if int(values.min()) < 0 or int(values.max()) > most:
        raise ValueError(f"{name} must hold numbers from 0 to {most}")
    return values.astype(np.uint32)


def _text(name: str, given: str) -> str:
    if len(given) > MAX_TEXT or not given.isprintable():
        raise ValueError(f"{name} must be at most {MAX_TEXT} printable characters")
    return given


class ExpertCounts:
    """Loads between two windows. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[tuple[object, ...], Load] = {}
        self._bytes = 0
        self._baselines: dict[tuple[object, ...], F64] = {}
        self.taken: Counter[str] = Counter()  # loads, by source
        self.dropped: Counter[str] = Counter()  # by cause

    def add(self, told: Load, *, cumulative: bool = False) -> None:
        """cumulative: `told.counts` are totals since the engine began. The first totals that are
        seen count nothing, since nobody knows when what they hold happened."""
        with self._lock:
            if cumulative:
                grown = self._grown(told)
                if grown is None:
                    return
                told = replace(told, counts=grown)
            self.taken[told.source] += 1
            before = self._pending.get(told.key)
            if before is not None:
                self._pending[told.key] = _merged(before, told)
            elif (
                len(self._pending) < MAX_PENDING and self._bytes + told.nbytes <= MAX_PENDING_BYTES
            ):
                self._pending[told.key] = told
                self._bytes += told.nbytes
            else:
                self.dropped["too_many"] += 1

    def _grown(self, told: Load) -> F64 | None:
        before = self._baselines.pop(told.key, None)
        if before is None and len(self._baselines) >= MAX_BASELINES:
            self._baselines.pop(next(iter(self._baselines)))  # asked for longest ago
        self._baselines[told.key] = told.counts
        if before is None:
            return None
        # One counter that fell means that the engine began anew: all of its totals are new.
        fell = bool((told.counts < before).any())
        return told.counts if fell else told.counts - before

    def take(self) -> list[Load]:
        """Everything since it was last asked."""
        with self._lock:
            found = list(self._pending.values())
            self._pending, self._bytes = {}, 0
            return found


def _merged(before: Load, told: Load) -> Load:
    tokens = before.tokens
    if told.tokens is not None:
        tokens = told.tokens if tokens is None else tokens + told.tokens
    return replace(
        told,
        counts=np.minimum(before.counts + told.counts, MAX_COUNT),
        tokens=tokens,
        rank_of_expert=before.rank_of_expert if told.rank_of_expert is None
        else told.rank_of_expert,
        logical_of_physical=before.logical_of_physical if told.logical_of_physical is None
        else told.logical_of_physical,
    )  # fmt: skip
