"""Blocking calls that have been entered and have not returned: who stands in an operation.

Their records come out when they return. In a job that hangs they never do, so the collector is told
of calls that outlast a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.agent.events import BLOCKING, NO_SLOT, ORDER, U8, U16, U32, U64, Records
from lanterne.probes.layout import RECORD, Flag

MAX_PENDING = 4096


@dataclass(frozen=True)
class InFlight:
    """Columns; `slot` is the row of the communicator registry."""

    slot: U16
    seq: U32
    lane: U8
    op: U8
    evidence: U8
    entered_ns: U64

    def __len__(self) -> int:
        return len(self.slot)


def in_flight(records: Records, slots: U16, before_ns: int) -> InFlight:
    """Calls entered before `before_ns`, the oldest first."""
    pick = np.flatnonzero((records["enter_ns"] < before_ns) & (slots != NO_SLOT))
    pick = pick[np.argsort(records["enter_ns"][pick], kind="stable")][:MAX_PENDING]
    flags = records["flags"][pick].astype(np.int64)
    return InFlight(
        slot=slots[pick],
        seq=records["seq"][pick].astype(np.uint32),
        lane=((flags & int(Flag.P2P)) != 0).astype(np.uint8),
        op=records["func"][pick].astype(np.uint8),
        evidence=np.where(flags & int(Flag.BLOCKING), BLOCKING, ORDER).astype(np.uint8),
        entered_ns=records["enter_ns"][pick].astype(np.uint64),
    )


NOTHING = in_flight(np.zeros(0, RECORD), np.zeros(0, np.uint16), 0)
