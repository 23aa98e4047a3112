"""Reading rank, size and hash from struct ncclComm in the memory of its process.

The offsets differ from version to version; where they come from is `elf`'s business. What is read
is believed only when the magic fits (2.21 and later have one) and the numbers make sense.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lanterne.agent.process import Processes

MAGIC = 0x0280028002800280
MAX_RANKS = 65_536
_SEARCHED = 2 << 20  # bytes of a structure; it takes 1.1 MB in the newest releases
_PAGE = 4096


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


Known = tuple[int, int, int]  # hash, rank, size


def find(processes: Processes, pid: int, comm: int, known: Iterable[Known]) -> Structure | None:
    """Which of the known ones the communicator at `comm` is, by searching its memory.

    In every release hash, rank and size stand side by side: 128 bits that no other memory has by
    accident. None where none or more than one is found before the next structure begins.
    """
    data = _memory(processes, pid, comm)
    if len(data) < 16 or int.from_bytes(data[:8], "little") != MAGIC:
        return None
    words = np.frombuffer(data, "<u8", len(data) // 8)
    others = np.flatnonzero(words[1:] == MAGIC)
    if len(others):
        words = words[: others[0] + 1]  # its own end has another offset than its beginning
    found = set()
    for comm_hash, rank, n_ranks in known:
        if not (1 <= n_ranks <= MAX_RANKS and 0 <= rank < n_ranks and comm_hash):
            continue
        second = np.uint64(rank | n_ranks << 32)
        at = np.flatnonzero((words[:-1] == np.uint64(comm_hash)) & (words[1:] == second))
        if len(at):
            bus = int(words[at[0] + 5]) if at[0] + 5 < len(words) else 0
            found.add(Structure(comm_hash, rank, n_ranks, bus_id_text(bus)))
    return found.pop() if len(found) == 1 else None


def _memory(processes: Processes, pid: int, address: int) -> bytes:
    """What is readable from an address on, bounded."""
    parts: list[bytes] = []
    at, size = address, 1 << 20
    while size >= _PAGE and at < address + _SEARCHED:
        part = processes.memory(pid, at, size - at % _PAGE)
        if part is None:
            size //= 2
            continue
        parts.append(part)
        at += len(part)
    return b"".join(parts)[:_SEARCHED]


def bus_id_text(value: int) -> str:
    """NCCL's int64 (hexadecimal digits without punctuation) as text: 0000:3b:00.0."""
    if not 0 < value < 1 << 52:
        return ""
    domain, bus, device = value >> 20, (value >> 12) & 0xFF, (value >> 4) & 0xFF
    return f"{domain:04x}:{bus:02x}:{device:02x}.{value & 0xF:x}"
