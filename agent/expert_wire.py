"""Loads and readings of one window -> the messages of its batches, each batch small. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lanterne.agent.expert_counts import U32, Load
from lanterne.proto import telemetry_pb2 as pb

PART_BYTES = 1 << 20  # of one batch: the rest of it must fit below what gRPC takes, too
PART_LOADS = 32
MAX_READINGS = 64
_UNIT = {"logical": pb.UNIT_LOGICAL, "physical": pb.UNIT_PHYSICAL, "rank": pb.UNIT_RANK}


@dataclass(frozen=True)
class Reading:
    """One proto EngineReading."""

    workload: str
    engine: str
    address: str
    values: Mapping[str, float]


@dataclass
class Part:
    """What goes with one batch."""

    loads: list[pb.ExpertLoad] = field(default_factory=list)
    readings: list[pb.EngineReading] = field(default_factory=list)
    size: int = 0


def parts(loads: Iterable[Load], readings: Sequence[Reading]) -> list[Part]:
    """[] where there is nothing to tell."""
    found: list[Part] = []
    for message in (piece for one in loads for piece in _pieces(one)):
        size = message.ByteSize()
        if not found or found[-1].size + size > PART_BYTES or len(found[-1].loads) >= PART_LOADS:
            found.append(Part())
        found[-1].loads.append(message)
        found[-1].size += size
    for at in range(0, len(readings), MAX_READINGS):
        part = at // MAX_READINGS
        if part >= len(found):
            found.append(Part())
        found[part].readings = [
            pb.EngineReading(
                workload=r.workload, engine=r.engine, address=r.address, values=dict(r.values)
            )
            for r in readings[at : at + MAX_READINGS]
        ]
    return found


def _pieces(one: Load) -> Iterable[pb.ExpertLoad]:
    """The layers of a load, as many a message as fit."""
    rows, experts = one.counts.shape
    step = max(1, PART_BYTES // (24 * experts + 64))
    for low in range(0, rows, step):
        cut = slice(low, min(low + step, rows))
        message = pb.ExpertLoad(
            workload=one.workload,
            engine=one.engine,
            source=one.source,
            model=one.model,
            unit=_UNIT[one.unit],
            rows=cut.stop - cut.start,
            experts=experts,
            layer=np.array(one.layer[cut], "<u4").tobytes(),
            counts=one.counts[cut].astype("<f8", copy=False).tobytes(),
        )
        if one.tokens is not None:
            message.tokens = one.tokens[cut].astype("<f8", copy=False).tobytes()
        if one.rank_of_expert is not None:
            message.rank_of_expert = _places(one.rank_of_expert, cut)
        if one.logical_of_physical is not None:
            message.logical_of_physical = _places(one.logical_of_physical, cut)
        if one.source_rank >= 0:
            message.source_rank = one.source_rank
        yield message


def _places(values: U32, cut: slice) -> bytes:
    cells = values if values.ndim == 1 else values[cut]
    return bytes(cells.astype("<u4", copy=False).tobytes())
