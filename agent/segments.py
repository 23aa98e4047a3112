"""The bytes of a spool segment: records, each found and checked by itself. Pure.

Record: a head of 36 bytes, then the payload. Head, little-endian: MAGIC (4 bytes), kind (u8), zero
(3 bytes), length of the payload (u32), epoch (u64), sequence (u64), CRC-32 of the payload (u32),
CRC-32 of the head before it (u32). The head has its own checksum, so that a damaged length cannot
lead astray: behind damage, the next sound head is looked for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

MAGIC = b"LnSp"
BATCH, DONE = 1, 2  # an encoded batch; ranges of batches that are no longer wanted
_HEAD = struct.Struct("<4sB3xIQQI")
_CHECK = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CHECK.size
_RANGE = struct.Struct("<QQQ")

Key = tuple[int, int]  # epoch, sequence


@dataclass(frozen=True, slots=True)
class Record:
    kind: int
    epoch: int
    sequence: int
    at: int  # of the head
    length: int  # of the payload

    @property
    def end(self) -> int:
        return self.at + HEAD_BYTES + self.length


@dataclass
class Scan:
    records: list[Record] = field(default_factory=list)
    damaged: int = 0  # stretches that hold no sound record
    end: int = 0  # of the last sound record: behind it is nothing worth keeping


def frame(kind: int, epoch: int, sequence: int, payload: bytes) -> bytes:
    head = _HEAD.pack(MAGIC, kind, len(payload), epoch, sequence, zlib.crc32(payload))
    return head + _CHECK.pack(zlib.crc32(head)) + payload


def done(keys: Iterable[Key]) -> bytes:
    """A record that says of these batches that they need not be kept; b"" for none."""
    ranges: list[list[int]] = []
    for epoch, sequence in sorted(keys):
        if ranges and ranges[-1][0] == epoch and ranges[-1][2] == sequence - 1:
            ranges[-1][2] = sequence
        else:
            ranges.append([epoch, sequence, sequence])
    if not ranges:
        return b""
    return frame(DONE, 0, 0, b"".join(_RANGE.pack(*r) for r in ranges))


def ranges_of(payload: bytes) -> list[tuple[int, int, int]]:
    """(epoch, first, last) of a DONE record."""
    whole = len(payload) // _RANGE.size * _RANGE.size
    return list(_RANGE.iter_unpack(payload[:whole]))


def payload_of(record: bytes, key: Key) -> bytes | None:
    """The batch in these bytes of a whole record; None where they are not what was written."""
    found = _head(record, 0)
    if found is None or (found.epoch, found.sequence) != key or found.end != len(record):
        return None
    payload = record[HEAD_BYTES:]
    return payload if _sound(record, found) else None


def scan(data: bytes) -> Scan:
    """Every sound record, in order."""
    result = Scan()
    at = 0
    while at < len(data):
        found = _head(data, at)
        if found is not None and _sound(data, found):
            result.records.append(found)
            result.end = at = found.end
            continue
        result.damaged += 1
        at = _next(data, at)
    return result


def _next(data: bytes, at: int) -> int:
    """Where the next sound record behind the damage at `at` begins, or the end."""
    while at < len(data):
        found = _head(data, at)
        # A sound head says where its damaged payload ends: nothing in between is a record, whatever
        # a job may have written there.
        at = found.end if found is not None else data.find(MAGIC, at + 1)
        if at < 0:
            break
        found = _head(data, at)
        if found is not None and _sound(data, found):
            return at
    return len(data)


def _head(data: bytes, at: int) -> Record | None:
    if len(data) - at < HEAD_BYTES:
        return None
    magic, kind, length, epoch, sequence, _ = _HEAD.unpack_from(data, at)
    (check,) = _CHECK.unpack_from(data, at + _HEAD.size)
    if magic != MAGIC or check != zlib.crc32(memoryview(data)[at : at + _HEAD.size]):
        return None
    return Record(kind, epoch, sequence, at, length)


def _sound(data: bytes, record: Record) -> bool:
    """Whether the payload is there and is what was written."""
    if record.end > len(data):
        return False
    expected = _HEAD.unpack_from(data, record.at)[5]
    begin = record.at + HEAD_BYTES
    return bool(zlib.crc32(memoryview(data)[begin : record.end]) == expected)
