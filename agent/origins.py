"""Which operations the collector gets where it asks for a sample of them.

All ranks of a communicator must tell the same ones: those whose number is a multiple of the stride.
Where a communicator was met running, a rank's numbers begin when the agent attached. The collector,
which aligns the ranks, answers with what to add to them; or it wants every operation for a while,
to align them by. Of what it has told nothing, numbers count as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from lanterne.agent.events import I64, U8, U16, U32, Bool
from lanterne.agent.identity import Communicator
from lanterne.proto import telemetry_pb2 as pb

MAX_ROWS = 16_384
COLUMNS = (("comm_hash", "<u8"), ("rank", "<u4"), ("lane", "u1"), ("offset", "<i8"),
           ("whole", "u1"))  # fmt: skip
LANES = 2


@dataclass(frozen=True)
class Origin:
    """Of one rank: what to add to its numbers, by lane, or that all of them are wanted."""

    offset: tuple[int, int] = (0, 0)
    whole: bool = False


@dataclass(frozen=True)
class Origins:
    """As the collector told them last, of the agent run `epoch`."""

    epoch: int = 0
    of: Mapping[tuple[int, int], Origin] = field(default_factory=dict)  # by hash and rank


UNTOLD = Origins()


def read(message: pb.Origins) -> Origins:
    """What cannot be understood tells nothing: numbers then count as they are."""
    rows = message.rows
    if rows > MAX_ROWS or any(
        len(getattr(message, name)) != rows * np.dtype(kind).itemsize for name, kind in COLUMNS
    ):
        return UNTOLD
    columns = [np.frombuffer(getattr(message, name), kind).tolist() for name, kind in COLUMNS]
    found: dict[tuple[int, int], Origin] = {}
    for comm_hash, rank, lane, offset, whole in zip(*columns, strict=True):
        if lane >= LANES:
            continue
        before = found.get((comm_hash, rank), Origin())
        offsets = (offset, before.offset[1]) if lane == 0 else (before.offset[0], offset)
        found[comm_hash, rank] = Origin(offsets, before.whole or bool(whole))
    return Origins(message.epoch, found)


@dataclass(frozen=True)
class Sampling:
    """What to tell of each communicator."""

    stride: int
    offset: I64  # [lane, slot], from 0 to below the stride
    whole: Bool  # [slot] every operation

    def wanted(self, slot: U16, lane: U8, seq: U32) -> Bool:
        """[row] whether to tell an operation."""
        number = seq.astype(np.int64) + self.offset[lane, slot]
        found: Bool = self.whole[slot] | (number % self.stride == 0)
        return found

    def strides(self, slots: U16) -> U32:
        """Of communicators."""
        return np.where(self.whole[slots], 1, self.stride).astype(np.uint32)


def sampling(
    stride: int, slots: int, origins: Origins = UNTOLD, communicators: Iterable[Communicator] = ()
) -> Sampling:
    """`communicators`: all that may have operations, of `slots` numbers."""
    offset = np.zeros((LANES, slots), np.int64)
    whole = np.zeros(slots, np.bool_)
    if stride > 1 and origins.of:
        for comm in communicators:
            told = origins.of.get((comm.comm_hash, comm.rank))
            if told is not None:
                offset[:, comm.slot] = [value % stride for value in told.offset]
                whole[comm.slot] = told.whole
    return Sampling(stride, offset, whole)
