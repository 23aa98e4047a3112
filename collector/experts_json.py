"""Expert load and engine readings of a Snapshot as JSON. Unknown numbers are null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lanterne.collector.snapshot import EngineView, ExpertView, Snapshot

MAX_CELLS = 1 << 18  # of one matrix; larger ones are left out, measures and top stay


def experts_json(snapshot: Snapshot) -> bytes:
    """Everything known of experts: load, measures, the hour, placement; and the engines."""
    return msgspec.json.encode(
        {
            "taken_at": snapshot.taken_at,
            "experts": [_experts(view) for view in snapshot.experts],
            "engines": [_engine(engine) for engine in snapshot.engines],
        },
        enc_hook=_plain,
    )


def _experts(view: ExpertView) -> dict[str, object]:
    return {
        "workload": view.workload,
        "engine": view.engine,
        "source": view.source,
        "model": view.model,
        "unit": view.unit,
        "primary": view.primary,
        "experts": view.load.shape[1],
        "layers": view.layer,
        "window_end": view.window_end,
        "summary": view.summary,
        "measures": view.measures,
        "tokens": view.tokens,
        "load": _matrix(view.load),
        "physical_load": _matrix(view.physical_load),
        "rank_of_expert": _matrix(view.rank_of_expert),
        "logical_of_physical": _matrix(view.logical_of_physical),
        "hour_seconds": view.hour_seconds,
        "hour": _matrix(view.hour),
        "top": view.top,
        "hot": view.hot,
    }


def _engine(engine: EngineView) -> dict[str, object]:
    return {
        "workload": engine.workload,
        "engine": engine.engine,
        "address": engine.address,
        "values": dict(engine.values),
    }


def _matrix(values: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    return None if values is None or values.size > MAX_CELLS else values


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} of expert load cannot be written as JSON")
