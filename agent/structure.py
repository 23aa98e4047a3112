"""Reading rank, size and hash from struct ncclComm in the memory of its process.

The offsets differ from version to version; where they come from is `elf`'s business. What is read
is believed only when the magic fits (2.21 and later have one) and the numbers make sense.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

from lanterne.agent.process import Processes

MAGIC = 0x0280028002800280
MAX_RANKS = 65_536


class Offsets(Protocol):
    """Byte offsets in struct ncclComm (agent.attach.CommOffsets)."""

    @property
    def comm_hash(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def n_ranks(self) -> int: ...
    @property
    def bus_id(self) -> int: ...
    @property
    def has_magic(self) -> bool: ...


@dataclass(frozen=True)
class Structure:
    comm_hash: int
    rank: int
    n_ranks: int
    bus_id: str  # "0000:3b:00.0" as NCCL prints it, "" where it makes no sense


def read(processes: Processes, pid: int, comm: int, offsets: Offsets) -> Structure | None:
    """The communicator at `comm`, or None if there is none (yet) that makes sense."""
    if comm == 0:
        return None
    if offsets.has_magic:
        head = processes.memory(pid, comm, 8)
        if head is None or int.from_bytes(head, "little") != MAGIC:
            return None
    places = (offsets.comm_hash, offsets.rank, offsets.n_ranks)
    low, high = min(places), max(places) + 8
    if min(places) < 0 or high - low > 4096:
        return None
    data = processes.memory(pid, comm + low, high - low)
    if data is None:
        return None
    (comm_hash,) = struct.unpack_from("<Q", data, offsets.comm_hash - low)
    (rank,) = struct.unpack_from("<i", data, offsets.rank - low)
    (n_ranks,) = struct.unpack_from("<i", data, offsets.n_ranks - low)
    if not (1 <= n_ranks <= MAX_RANKS and 0 <= rank < n_ranks and comm_hash):
        return None
    bus = processes.memory(pid, comm + offsets.bus_id, 8) if offsets.bus_id > 0 else None
    return Structure(comm_hash, rank, n_ranks, bus_id_text(int.from_bytes(bus or b"", "little")))


def bus_id_text(value: int) -> str:
    """NCCL's int64 (hexadecimal digits without punctuation) as text: 0000:3b:00.0."""
    if not 0 < value < 1 << 52:
        return ""
    domain, bus, device = value >> 20, (value >> 12) & 0xFF, (value >> 4) & 0xFF
    return f"{domain:04x}:{bus:02x}:{device:02x}.{value & 0xF:x}"
