"""commHash exactly as NCCL computes it: every rank, NCCL's logs and RAS agree on the key.

Two generations. Up to 2.25: DJB2a over the 128 bytes of the unique id, bytes taken as signed. From
2.26: a two-accumulator hash. A child's hash is made from its parent's:

    split   2.18-2.23  DJB2a of "%016lx-%d" (parent, color), padded with zeros to 128 bytes
            2.24-2.25  DJB2a of "%016lx-%d-%d" (parent, count, color), padded likewise
            2.26-      the new hash over parent (8 bytes), count (4), color (4), one after the other
    shrink  as a split with count 0 and color 0: it does not count
    grow    2.29-      the new hash over a magic (8) and the new number of ranks (8)

`count` is the number of split and grow calls on the parent so far, this one included; a rank that
passes a negative color gets no communicator, yet its call counts. Versions are NCCL's own numbers:
major * 10000 + minor * 100 + patch.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

MASK = (1 << 64) - 1
UNIQUE_ID_BYTES = 128
NEW_HASH_SINCE = 22600
COUNT_SINCE = 22400


def djb2a(data: bytes) -> int:
    """The hash of NCCL up to 2.25."""
    value = 5381
    for byte in data:
        value = ((value * 33) ^ (byte - 256 if byte > 127 else byte)) & MASK
    return value


def chained(*parts: bytes) -> int:
    """The hash of NCCL from 2.26 over several values, each of which mixes in its length first."""
    a, b = 1, 1
    for part in parts:
        a ^= len(part)
        for start in range(0, len(part), 8):
            a = (a + b) & MASK
            b ^= a
            a ^= a >> 31
            a = (a * 0x9DE62BBC8CEF3CE3) & MASK
            b ^= b >> 32
            b = (b * 0x485CD6311B599E79) & MASK
            a = (a + int.from_bytes(part[start : start + 8], "little")) & MASK
    value = a ^ (a >> 31)
    value = (value * 0xBAC3BD562846DE6B) & MASK
    value = (value + b) & MASK
    value ^= value >> 32
    return (value * 0x995A187A14E7B445) & MASK


def unique_id_hash(unique_id: bytes, version: int | None) -> int:
    """Hash of a communicator that was made from a unique id of 128 bytes.

    Where the version is not known the newer hash stands in: the ranks of one job use one library,
    so it still joins them; it only differs from what an older NCCL prints.
    """
    if version is not None and version < NEW_HASH_SINCE:
        return djb2a(unique_id)
    return chained(unique_id)


def split_hash(parent: int, count: int, color: int, version: int | None) -> int:
    if version is None or version >= NEW_HASH_SINCE:
        return chained(
            struct.pack("<Q", parent), struct.pack("<i", count), struct.pack("<i", color)
        )
    text = f"{parent:016x}-{count}-{color}" if version >= COUNT_SINCE else f"{parent:016x}-{color}"
    return djb2a(text.encode().ljust(UNIQUE_ID_BYTES, b"\0"))


def combine(base: int, value: int) -> int:
    """Of two 64-bit values; grow uses it for its magic and for the hash itself."""
    return chained(struct.pack("<Q", base), struct.pack("<Q", value))


def stable_hash(*parts: str) -> int:
    """64 bits of BLAKE2b over the parts, each ended by a zero byte; never 0.

    For communicators that have no commHash (Gloo), the same on every host and in every release.
    """
    digest = blake2b(digest_size=8, person=b"lanterne")
    for part in parts:
        digest.update(part.encode("utf-8", "replace") + b"\0")
    return int.from_bytes(digest.digest(), "little") or 1
