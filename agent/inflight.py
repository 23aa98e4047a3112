"""What has been begun and is not over: who stands in an operation.

Records come out when a call returns, or when the GPU has left an operation. In a job that hangs
neither happens, so the collector is told of what outlasts a window: of calls that block their host,
and, where a profiler plugin tells, of the oldest operation that a GPU was given and has not left.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lanterne.agent.events import BLOCKING, DEVICE, I64, NO_SLOT, ORDER, U8, U16, U32, U64, Records
from lanterne.probes.layout import RECORD, Flag, Func

MAX_PENDING = 4096
IN_CALL, LAUNCHED, STARTED = range(3)  # state; the latter two are the GPU's


@dataclass(frozen=True)
class InFlight:
    """Columns; `slot` is the row of the communicator registry."""

    slot: U16
    seq: U32
    lane: U8
    op: U8
    evidence: U8
    state: U8
    entered_ns: U64  # began the call, or of the GPU's: was launched, or has started

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
        state=np.full(len(pick), IN_CALL, np.uint8),
        entered_ns=records["enter_ns"][pick].astype(np.uint64),
    )


def on_device(rows: np.ndarray, slots: U16, quiet: I64, told: I64, before_ns: int) -> InFlight:
    """plugin_memory.OPEN rows of what was launched before `before_ns` in the slots that are quiet.

    told: [slot, lane] number of the operation that the plugin told of last. Operations of a
    communicator run in order, so the oldest that is not over is the next one.
    """
    pick = np.flatnonzero((rows["enqueue_ns"] < before_ns) & np.isin(slots, quiet))
    rows, slots = rows[pick], slots[pick]
    p2p = np.isin(rows["func"], (Func.SEND, Func.RECV, Func.SEND_RECV, Func.P2P_GROUP))
    lane = p2p.astype(np.uint8)
    return InFlight(
        slot=slots,
        seq=(told[slots, lane] + 1).astype(np.uint32),
        lane=lane,
        op=np.where(p2p, np.uint8(Func.P2P_GROUP), rows["func"]),
        evidence=np.full(len(rows), DEVICE, np.uint8),
        state=np.where(rows["started"], np.uint8(STARTED), np.uint8(LAUNCHED)),
        entered_ns=rows["since_ns"].astype(np.uint64),
    )


def joined(first: InFlight, second: InFlight) -> InFlight:
    """Both, within the bound; the first before the second."""
    return InFlight(
        **{
            f.name: np.concatenate([getattr(first, f.name), getattr(second, f.name)])[:MAX_PENDING]
            for f in fields(InFlight)
        }
    )


NOTHING = in_flight(np.zeros(0, RECORD), np.zeros(0, np.uint16), 0)
