"""What engines told of themselves: checked when it comes in, read when it is applied.

Both kinds stay encoded until the analysis takes them, because they cross from the ingest process
to it as bytes anyway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.collector.checks import Limits, refuse, text
from lanterne.proto import telemetry_pb2 as pb

MAX_LAYERS = 512
MAX_EXPERTS = 4096
MAX_NUMBER = 65_536  # of a layer or a rank
COUNT_LIMIT = float(1 << 48)
MAX_VALUES = 64
UNITS = ("", "logical", "physical", "rank")
LOGICAL, PHYSICAL, RANK = 1, 2, 3

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """One proto ExpertLoad; arrays are read-only views."""

    workload: str
    engine: str
    source: str
    model: str
    unit: int  # LOGICAL, PHYSICAL or RANK
    layer: tuple[int, ...]  # number of each row in the model, ascending
    counts: F64  # [layers, experts]
    tokens: F64 | None  # [layers]
    rank_of_expert: I64 | None  # [experts] or [layers, experts]
    logical_of_physical: I64 | None  # likewise
    source_rank: int  # -1: of all ranks, or unknown


@dataclass(frozen=True, slots=True)
class EngineReading:
    workload: str
    engine: str
    address: str
    values: Mapping[str, float]


def check_expert_load(m: pb.ExpertLoad, limits: Limits) -> bytes:
    """-> the load, encoded. Raises BatchRefused."""
    for field in ("workload", "engine", "source", "model"):
        text(f"expert_load.{field}", getattr(m, field), limits.text)
    rows, experts = m.rows, m.experts
    if not 1 <= rows <= MAX_LAYERS:
        refuse("rows", f"expert_load.rows is {rows}, not 1 to {MAX_LAYERS} layers")
    if not 1 <= experts <= MAX_EXPERTS:
        refuse("rows", f"expert_load.experts is {experts}, not 1 to {MAX_EXPERTS}")
    if not 1 <= m.unit <= 3:
        refuse("enumeration", f"expert_load.unit {m.unit} is not 1 to 3")
    if m.source_rank >= MAX_NUMBER:
        refuse("rank", f"expert_load.source_rank {m.source_rank} is beyond {MAX_NUMBER - 1}")
    layer = _column(m, "layer", "<u4", (rows,))
    if int(layer[-1]) >= MAX_NUMBER or bool((layer[1:] <= layer[:-1]).any()):
        refuse("number", f"expert_load.layer does not ascend, or goes beyond {MAX_NUMBER - 1}")
    _check_counts("counts", _column(m, "counts", "<f8", (rows, experts)))
    if m.tokens:
        _check_counts("tokens", _column(m, "tokens", "<f8", (rows,)))
    _check_places(m, "rank_of_expert", MAX_NUMBER, m.unit != pb.UNIT_RANK)
    _check_places(m, "logical_of_physical", MAX_EXPERTS, m.unit == pb.UNIT_PHYSICAL)
    return m.SerializeToString()


def check_engine_reading(m: pb.EngineReading, limits: Limits) -> bytes:
    """-> the reading, encoded. Raises BatchRefused."""
    for field in ("workload", "engine", "address"):
        text(f"engine_reading.{field}", getattr(m, field), limits.text)
    if len(m.values) > MAX_VALUES:
        refuse("rows", f"engine_reading.values has more than {MAX_VALUES} entries")
    for name, value in m.values.items():
        if not _NAME.match(name):
            refuse("text", f"engine_reading.values: {name[:64]!r} is not a name like ttft_p50")
        if not math.isfinite(value):
            refuse("number", f"engine_reading.values: {name} is {value}")
    return m.SerializeToString()


def _check_counts(name: str, values: F64) -> None:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high < COUNT_LIMIT):  # NaN fails both
        refuse("number", f"expert_load.{name} holds {low} to {high}, not 0 to 2^48")


def _check_places(m: pb.ExpertLoad, field: str, below: int, allowed: bool) -> None:
    if not getattr(m, field):
        return
    if not allowed:
        refuse("column", f"expert_load.{field} has no meaning where unit is {m.unit}")
    highest = int(_places(m, field).max())
    if highest >= below:
        refuse("number", f"expert_load.{field} holds {highest}, the limit is {below - 1}")


def _places(m: pb.ExpertLoad, field: str) -> npt.NDArray[Any]:
    rows, experts = m.rows, m.experts
    one = len(getattr(m, field)) == 4 * experts
    return _column(m, field, "<u4", (experts,) if one else (rows, experts))


def _column(m: pb.ExpertLoad, field: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    data: bytes = getattr(m, field)
    want = math.prod(shape) * int(dtype[2])
    if len(data) != want:
        refuse("column", f"expert_load.{field} is {len(data)} bytes, not {want}")
    return np.frombuffer(data, dtype).reshape(shape)


def expert_load_of(data: bytes) -> ExpertLoad:
    """A load that `check_expert_load` has passed."""
    m = pb.ExpertLoad.FromString(data)
    rows, experts = m.rows, m.experts
    places = {
        field: _places(m, field).astype(np.int64) if getattr(m, field) else None
        for field in ("rank_of_expert", "logical_of_physical")
    }
    return ExpertLoad(
        workload=m.workload,
        engine=m.engine,
        source=m.source,
        model=m.model,
        unit=int(m.unit),
        layer=tuple(_column(m, "layer", "<u4", (rows,)).tolist()),
        counts=_column(m, "counts", "<f8", (rows, experts)),
        tokens=_column(m, "tokens", "<f8", (rows,)) if m.tokens else None,
        rank_of_expert=places["rank_of_expert"],
        logical_of_physical=places["logical_of_physical"],
        source_rank=m.source_rank if m.HasField("source_rank") else -1,
    )


def engine_reading_of(data: bytes) -> EngineReading:
    """A reading that `check_engine_reading` has passed."""
    m = pb.EngineReading.FromString(data)
    return EngineReading(m.workload, m.engine, m.address, dict(m.values))
