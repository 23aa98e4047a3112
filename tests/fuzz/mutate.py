"""Damage done to valid inputs: to their bytes, and to what the bytes stand for.

Every function takes a `random.Random` and gives new bytes, so that a seed names an input for good.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_BYTES = 1 << 17
Mutator = Callable[[random.Random, bytes, Sequence[bytes]], bytes]

NUMBERS = (
    0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 4095, 4096, 65_535,
    65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 62) - 1, 1 << 62,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-308, 1e308, 1e400, -1e400, float("nan"))
TEXTS = (
    "", "0", "-1", "a" * 300, "\0", "\n", '"', "\\", "\x1b[2J", "é", "\U0001f9ff", "\udcff" * 2,
    "..", "/", "../../etc/passwd", "%s%n", "9" * 40, "1e999", "NaN", "Infinity", "0x", "{}",
)  # fmt: skip


def blind(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to eight changes of single bytes, numbers, stretches, and of length."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        rng.choice(_CHANGES)(rng, changed, others)
    return bytes(changed[:MAX_BYTES])


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    width = rng.choice((1, 2, 4, 8))
    if len(data) < width:
        return
    at = rng.randrange(len(data) - width + 1)
    order = rng.choice(("little", "big"))
    if rng.random() < 0.5:
        value = rng.choice(NUMBERS)
    else:
        value = int.from_bytes(data[at : at + width], order) + rng.randint(-16, 16)  # type: ignore[arg-type]
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, order)  # type: ignore[arg-type]


def _digits(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """A decimal number in the text becomes another."""
    places = [i for i, byte in enumerate(data[:4096]) if 48 <= byte <= 57]
    if not places:
        return
    at = rng.choice(places)
    end = at
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    data[at:end] = str(rng.choice((*NUMBERS, -1, "1e400", "9" * 5000))).encode()


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    what = rng.choice((
        rng.randbytes(rng.randrange(1, 17)),
        bytes([rng.randrange(256)]) * rng.choice((1, 8, 64, 1024)),
        rng.choice(TEXTS).encode("utf-8", "surrogatepass"),
    ))  # fmt: skip
    data[at:at] = what


def _remove(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        at = rng.randrange(len(data))
        del data[at : at + rng.choice((1, 2, 4, 8, 64, 1024))]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        at = rng.randrange(len(data))
        piece = data[at : at + rng.choice((1, 4, 16, 256))]
        data[at:at] = piece * rng.choice((1, 2, 16, 64))


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        del data[rng.randrange(len(data)) :]


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others) if others else b""
    if other and data:
        at = rng.randrange(len(other))
        data[rng.randrange(len(data)) :] = other[at:]


def _line(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """A line goes, comes twice, or moves."""
    lines = bytes(data).split(b"\n")
    at = rng.randrange(len(lines))
    line = lines[at]
    change = rng.randrange(3)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines[at:at] = [line] * rng.choice((1, 2, 100))
    else:
        lines.insert(rng.randrange(len(lines)), lines.pop(at))
    data[:] = b"\n".join(lines)


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip, _byte, _byte, _number, _number, _digits, _insert, _remove, _repeat, _cut, _splice, _line,
)  # fmt: skip


def either(first: Mutator, second: Mutator, share: float = 0.6) -> Mutator:
    """The first in that share of cases, else the second."""

    def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        return (first if rng.random() < share else second)(rng, data, others)

    return mutate


def part(cut: Callable[[bytes], tuple[int, int]]) -> Mutator:
    """Blind damage, to one stretch of the input only, whose length stays."""

    def mutate(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
        begin, end = cut(data)
        end = min(end, len(data))
        piece = bytearray(data[begin:end])
        for _turn in range(rng.choice((1, 1, 2, 4))):
            rng.choice((_flip, _byte, _byte, _number))(rng, piece, ())
        return data[:begin] + bytes(piece) + data[end:]

    return mutate


# -- Protocol buffers --------------------------------------------------------------------------


def message(kind: type[Message]) -> Mutator:
    """Fields of the decoded message are set, emptied, repeated or damaged; it stays one."""

    def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        made = kind()
        try:
            made.ParseFromString(data)
        except DecodeError:
            return blind(rng, data, others)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            _field(rng, made)
        return made.SerializeToString()[:MAX_BYTES]

    return mutate


def _field(rng: random.Random, made: Message) -> None:
    fields: Any = made.DESCRIPTOR.fields
    field: FieldDescriptor = rng.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _map(rng, getattr(made, field.name), field)
    elif field.is_repeated:
        _repeated(rng, getattr(made, field.name), field)
    elif field.message_type is not None:
        if rng.random() < 0.1:
            made.ClearField(field.name)
        else:
            _field(rng, getattr(made, field.name))
    elif rng.random() < 0.1:
        made.ClearField(field.name)
    else:
        setattr(made, field.name, _value(rng, field, getattr(made, field.name)))


def _map(rng: random.Random, found: Any, field: FieldDescriptor) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[n] for n in ("key", "value"))
    for _ in range(rng.choice((1, 1, 3, 100))):
        found[_value(rng, key, None)] = _value(rng, value, None)


def _repeated(rng: random.Random, found: Any, field: FieldDescriptor) -> None:
    change = rng.randrange(4)
    if change == 0 and len(found):
        del found[rng.randrange(len(found)) :]
    elif change == 1 and len(found):
        found.extend([found[rng.randrange(len(found))]] * rng.choice((1, 2, 20)))
    elif field.message_type is not None:
        chosen = found[rng.randrange(len(found))] if len(found) else found.add()
        _field(rng, chosen)
    else:
        found.append(_value(rng, field, None))


def _value(rng: random.Random, field: FieldDescriptor, old: Any) -> Any:
    kind = field.cpp_type
    if field.type == FieldDescriptor.TYPE_BYTES:
        return blind(rng, old or rng.randbytes(8), ())
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice((*TEXTS, (old or "x") * 3)).encode("utf-8", "ignore").decode()
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((*FLOATS, rng.random() * 1e9))
    wide = kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
    bits = 64 if wide else 32
    value = rng.choice(NUMBERS) if rng.random() < 0.6 else (old or 0) + rng.randint(-3, 3)
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return value % (1 << bits)
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


# -- JSON --------------------------------------------------------------------------------------


def as_json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One or more values of the document become others; it stays JSON, nearly always."""
    try:
        holder = [json.loads(data)]
    except (ValueError, RecursionError):
        return blind(rng, data, others)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if holder:
            _node(rng, holder)
    if not holder:
        return b""
    if rng.random() < 0.01:
        depth = rng.choice((100, 2000, 50_000))
        return b"[" * depth + json.dumps(holder[0]).encode()[:1000]
    return json.dumps(holder[0]).encode()[:MAX_BYTES]


def _node(rng: random.Random, holder: Any) -> None:
    """Walks down from a container, and changes what it stops at."""
    keys = list(range(len(holder))) if isinstance(holder, list) else list(holder)
    if not keys:
        return
    key = rng.choice(keys)
    value = holder[key]
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        _node(rng, value)
        return
    change = rng.randrange(4)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, list):
        holder[key:key] = [value] * rng.choice((1, 2, 50))
    elif change == 1:
        holder[rng.choice(TEXTS)] = value
    elif change == 2 and isinstance(value, str):
        holder[key] = blind(rng, value.encode("utf-8", "replace"), ()).decode("utf-8", "replace")
    else:
        holder[key] = rng.choice((
            None, True, [], {}, [[]], {"": {}}, rng.choice(TEXTS), rng.choice(NUMBERS), -1,
            rng.choice(FLOATS), [rng.choice(NUMBERS)] * 5,
        ))  # fmt: skip


# -- Containers with checksums -------------------------------------------------------------------


def archive(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One member of a zip file is damaged, and the archive made anew around it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            members = [(info.filename, old.read(info)) for info in old.infolist()]
    except Exception:
        return blind(rng, data, others)
    if not members:
        return data
    at = rng.randrange(len(members))
    name, content = members[at]
    members[at] = (name, blind(rng, content, [other for _, other in members]))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()[:MAX_BYTES]


def framed(unframe: Callable[[bytes], bytes], frame: Callable[[bytes], bytes],
           inner: Mutator = blind) -> Mutator:  # fmt: skip
    """What is inside is damaged, and checksum and length around it are made right again."""

    def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        try:
            content = unframe(data)
        except (ValueError, IndexError, StopIteration):
            return blind(rng, data, others)
        return frame(inner(rng, content, others))

    return mutate
