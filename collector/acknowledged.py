"""What is known of acknowledged batches, as bytes: the format of the journal. Pure.

A file is MAGIC, then records, each u32 length, u32 CRC-32, payload; little-endian. A payload is one
applied batch (b"B", epoch u64, sequence u64, node), or all that is known of one node (b"N"). What
comes later counts.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator

from lanterne.collector.seen import EPOCHS, FORGOTTEN, RANGES, Epoch, NodeSeen, Seen

MAGIC = b"lanterne acknowledged 1\n"
MAX_RECORD = 1 << 20
_BATCH_KIND, _NODE_KIND = b"B", b"N"
_HEAD = struct.Struct("<II")
_PAIR = struct.Struct("<QQ")
_NODE = struct.Struct("<HQHH")  # length of the name, floor, epochs, forgotten epochs
_EPOCH = struct.Struct("<QIH")  # epoch, closed gaps, ranges


def _record(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def pack_batch(node: str, epoch: int, sequence: int) -> bytes:
    return _record(_BATCH_KIND + _PAIR.pack(epoch, sequence) + node.encode())


def pack(seen: Seen) -> bytes:
    """A whole file."""
    return MAGIC + b"".join(_record(_pack_node(*item)) for item in seen.items())


def _pack_node(node: str, entry: NodeSeen) -> bytes:
    name = node.encode()
    head = _NODE.pack(len(name), entry.floor, len(entry.epochs), len(entry.forgotten))
    parts = [_NODE_KIND, head, name]
    for epoch, known in entry.epochs.items():
        parts.append(_EPOCH.pack(epoch, min(known.closed_gaps, 0xFFFFFFFF), len(known.ranges)))
        parts += [_PAIR.pack(*r) for r in known.ranges]
    parts.append(struct.pack(f"<{len(entry.forgotten)}Q", *entry.forgotten))
    return b"".join(parts)


def unpack(data: bytes, seen: Seen) -> int:
    """Put a file's records into `seen` -> where the last sound one ends.

    Raises ValueError where it is no such file.
    """
    if not data.startswith(MAGIC):
        raise ValueError("is no journal that this collector knows")
    end = len(MAGIC)
    for payload, end in _records(data):  # noqa: B007
        _replay(payload, seen)
    return end


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """(payload, where it ends) up to the first that is not sound."""
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        payload = data[at + _HEAD.size : end]
        if not 0 < length <= MAX_RECORD or end > len(data) or zlib.crc32(payload) != check:
            return
        yield payload, end
        at = end


def _replay(payload: bytes, seen: Seen) -> None:
    kind, body = payload[:1], payload[1:]
    try:
        if kind == _BATCH_KIND:
            epoch, sequence = _PAIR.unpack_from(body)
            node = body[_PAIR.size :].decode()
            if seen.verdict(node, epoch, sequence) == "new":
                seen.add(node, epoch, sequence)
        elif kind == _NODE_KIND:
            seen.restore(*_unpack_node(body))
        else:
            raise ValueError(f"has a record of an unknown kind, {kind!r}")
    except struct.error as error:
        raise ValueError(f"is not as it was written: {error}") from None


def _unpack_node(body: bytes) -> tuple[str, NodeSeen]:
    size, floor, epochs, forgotten = _NODE.unpack_from(body)
    at = _NODE.size + size
    node, entry = body[_NODE.size : at].decode(), NodeSeen(floor=floor)
    if epochs > EPOCHS or forgotten > FORGOTTEN:
        raise ValueError(f"knows more of node {node} than is kept")
    for _ in range(epochs):
        epoch, gaps, ranges = _EPOCH.unpack_from(body, at)
        at += _EPOCH.size
        if ranges > RANGES:
            raise ValueError(f"knows more of node {node} than is kept")
        known = entry.epochs[epoch] = Epoch()
        known.closed_gaps = gaps
        known.ranges = [list(_PAIR.unpack_from(body, at + _PAIR.size * n)) for n in range(ranges)]
        at += _PAIR.size * ranges
    entry.forgotten = OrderedDict.fromkeys(struct.unpack_from(f"<{forgotten}Q", body, at))
    return node, entry
