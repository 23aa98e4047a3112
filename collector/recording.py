"""The file format of a recording: frames as agents sent them, in blocks that stand for themselves.

    file    blocks, the first of kind HEADER
    block   4 bytes magic, u8 kind, 3 zero bytes, u32 length of the body before compression,
            u32 stored length, u32 CRC-32 of kind, lengths and what follows: the body, compressed
            by zlib
    HEADER  JSON: version, boot_id, created_ns (CLOCK_REALTIME), monotonic_ns, engine settings
    FRAMES  records: u32 length, u64 received_ns (the collector's CLOCK_MONOTONIC), u8 flags, and
            that many bytes: an encoded lanterne.v1.Frame

All numbers are little-endian. A file that ends in the middle of a block, or holds a damaged one,
is read up to there and from the next block on; what was passed over is counted.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lanterne.collector.errors import RecordingError

VERSION = 1
MAGIC = b"LTR\x01"
HEADER, FRAMES = 0, 1
CLOCK, BATCH = 1, 2  # flags: what of the frame the collector used
MOST_BODY = 64 << 20
MOST_FRAME = (1 << 28) + (64 << 10)
LEVEL = 3

_BLOCK = struct.Struct("<4sB3xIII")
_CHECKED = struct.Struct("<BII")
_RECORD = struct.Struct("<IQB")


class Received(NamedTuple):
    received_ns: int
    flags: int
    frame: bytes


@dataclass(frozen=True)
class Header:
    boot_id: str  # of the collector's machine: nodes that report the same share its clock
    created_ns: int
    monotonic_ns: int
    version: str  # of the collector
    engine: Mapping[str, float] = field(default_factory=dict)  # EngineConfig, by field


@dataclass
class Damage:
    """What could not be read."""

    torn_bytes: int = 0  # at the end of the file
    blocks: int = 0  # with a wrong checksum, or with contents that do not fit

    def __bool__(self) -> bool:
        return bool(self.torn_bytes or self.blocks)


def block(kind: int, body: bytes) -> bytes:
    stored = zlib.compress(body, LEVEL)
    crc = _checksum(kind, len(body), stored)
    return _BLOCK.pack(MAGIC, kind, len(body), len(stored), crc) + stored


def _checksum(kind: int, length: int, stored: bytes) -> int:
    return zlib.crc32(stored, zlib.crc32(_CHECKED.pack(kind, length, len(stored))))


def header_block(header: Header) -> bytes:
    values = {"format": "lanterne-recording", "schema": VERSION, **header.__dict__}
    return block(HEADER, json.dumps(values, sort_keys=True).encode())


def record(received: Received) -> bytes:
    return _RECORD.pack(len(received.frame), received.received_ns, received.flags) + received.frame


def frames_block(records: Iterable[bytes]) -> bytes:
    return block(FRAMES, b"".join(records))


def is_recording(path: Path) -> bool:
    """Whether the file begins like one. Raises RecordingError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror})") from error


def read_header(path: Path) -> Header:
    """Raises RecordingError."""
    try:
        with path.open("rb") as file:
            for kind, body in _blocks(file, Damage()):
                if kind == HEADER:
                    return _header(path, body)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror})") from error
    raise RecordingError(
        f"{path}: not a recording; name a file made by lanterne-collector record or --record"
    )


def read(path: Path, damage: Damage) -> Iterator[Received]:
    """The frames, in the order in which they came; what cannot be read is counted in `damage`.

    Raises RecordingError where the file cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        for kind, body in _blocks(file, damage):
            if kind == FRAMES:
                yield from _records(body, damage)


def _blocks(file: BinaryIO, damage: Damage) -> Iterator[tuple[int, bytes]]:
    while True:
        at = file.tell()
        head = file.read(_BLOCK.size)
        if not head:
            return
        if len(head) < _BLOCK.size:
            damage.torn_bytes += len(head)
            return
        magic, kind, length, stored_length, crc = _BLOCK.unpack(head)
        sound = magic == MAGIC and length <= MOST_BODY and stored_length <= 2 * MOST_BODY
        stored = file.read(stored_length) if sound else b""
        if sound and len(stored) == stored_length and _checksum(kind, length, stored) == crc:
            body = zlib.decompressobj().decompress(stored, MOST_BODY + 1)
            if len(body) == length:
                yield kind, body
                continue
        if not _seek_block(file, at + 1):
            if sound and len(stored) < stored_length:
                damage.torn_bytes += len(head) + len(stored)
            else:
                damage.blocks += 1
            return
        damage.blocks += 1


def _seek_block(file: BinaryIO, at: int) -> bool:
    """Move to the next magic from `at` on; False where there is none."""
    file.seek(at)
    before = b""
    while piece := file.read(1 << 20):
        found = (before + piece).find(MAGIC)
        if found >= 0:
            file.seek(at - len(before) + found)
            return True
        before = (before + piece)[-(len(MAGIC) - 1) :]
        at = file.tell()
    return False


def _records(body: bytes, damage: Damage) -> Iterator[Received]:
    at = 0
    while at < len(body):
        if len(body) - at < _RECORD.size:
            damage.blocks += 1
            return
        length, received_ns, flags = _RECORD.unpack_from(body, at)
        at += _RECORD.size
        if length > min(MOST_FRAME, len(body) - at):
            damage.blocks += 1
            return
        yield Received(received_ns, flags, body[at : at + length])
        at += length


def _header(path: Path, body: bytes) -> Header:
    try:
        values = json.loads(body)
        if values["schema"] != VERSION:
            raise RecordingError(
                f"{path}: recording of format {values['schema']}, this version reads {VERSION}"
            )
        return Header(
            boot_id=str(values["boot_id"]),
            created_ns=int(values["created_ns"]),
            monotonic_ns=int(values["monotonic_ns"]),
            version=str(values["version"]),
            engine={str(k): float(v) for k, v in values["engine"].items()},
        )
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise RecordingError(f"{path}: the recording's header does not read: {error}") from error


def parts(path: Path) -> list[Path]:
    """The files of one recording, oldest first: FILE.2, FILE.1, FILE. Those of an earlier boot of
    the machine, whose clock is another, are left out. Raises RecordingError.
    """
    found = [path]
    header = read_header(path)
    number = 1
    while (older := path.with_name(f"{path.name}.{number}")).exists():
        if read_header(older).boot_id != header.boot_id:
            break
        found.insert(0, older)
        number += 1
    return found
