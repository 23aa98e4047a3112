"""Plain values and tensors from a file of torch.save, without ever running anything in it.

The file is a zip of stored members: `data.pkl`, a pickle, and `data/N`, the memory of one tensor
storage each. Pickles are programs; this reader knows the few instructions that dictionaries, lists,
numbers, texts and tensors are made of, and the one function that makes a tensor. Anything else is
refused by name. The instructions are decoded with pickletools, which executes nothing.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_FILE_BYTES = 256 << 20
MAX_PICKLE_BYTES = 16 << 20
MAX_STEPS = 4_000_000  # instructions
MAX_MEMBERS = 65_536
MAX_TENSOR_BYTES = 64 << 20  # 1,000 steps of 61 layers of 256 experts

# torch's storage classes -> numpy; bfloat16 has no type there and is widened.
_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "bf16",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1",
    "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED = ("collections", "OrderedDict")


class TorchFileError(ValueError):
    """The file is no such file, or holds what is not read; the message says what."""


class _Global:
    """An allowed name, not yet called."""

    def __init__(self, module: str, name: str) -> None:
        self.pair = (module, name)


class _Mark:
    pass


class _Storage:
    def __init__(self, dtype: str, key: str, count: int) -> None:
        self.dtype, self.key, self.count = dtype, key, count


def read(path: Path) -> Any:
    """The saved object; tensors are numpy arrays. Raises TorchFileError or OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TorchFileError(f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        with zipfile.ZipFile(path) as archive:
            return _Archive(archive).load()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise TorchFileError(f"is no file of torch.save: {error}") from None


class _Archive:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        if len(archive.infolist()) > MAX_MEMBERS:
            raise TorchFileError(f"has more than {MAX_MEMBERS} members")
        for member in archive.infolist():
            # Stored only: nothing unpacks to more than the file itself is.
            if member.compress_type != zipfile.ZIP_STORED:
                raise TorchFileError(f"member {member.filename[:64]!r} is compressed")
            self._members[member.filename.partition("/")[2]] = member
        self._left = MAX_FILE_BYTES

    def load(self) -> Any:
        if "data.pkl" not in self._members:
            raise TorchFileError("has no data.pkl: is it from torch.save?")
        if "byteorder" in self._members and self._bytes("byteorder", 16) != b"little":
            raise TorchFileError("is not little-endian")
        return Machine(self._tensor).run(self._bytes("data.pkl", MAX_PICKLE_BYTES))

    def _bytes(self, name: str, limit: int) -> bytes:
        member = self._members.get(name)
        if member is None:
            raise TorchFileError(f"has no member {name!r}")
        # Members that overlap could be read again and again.
        limit = min(limit, self._left)
        with self._archive.open(member) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise TorchFileError(f"member {name!r} is larger than {limit} bytes")
        self._left -= len(data)
        return data

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any) -> npt.NDArray[Any]:
        shape, steps = _whole(size), _whole(stride)
        if len(shape) != len(steps) or offset < 0 or not re.fullmatch(r"[0-9]{1,9}", storage.key):
            raise TorchFileError("holds a tensor of impossible shape")
        wide = storage.dtype == "bf16"
        dtype = np.dtype("<u2" if wide else storage.dtype)
        if math.prod(shape) * dtype.itemsize > MAX_TENSOR_BYTES:
            raise TorchFileError(f"holds a tensor of {shape}, which is too large")
        data = self._bytes(f"data/{storage.key}", MAX_TENSOR_BYTES)
        flat = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
        empty = math.prod(shape) == 0
        last = offset + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        if not empty and not last < min(len(flat), storage.count):
            raise TorchFileError("holds a tensor beyond the end of its storage")
        values = np.zeros(shape, dtype)
        if not empty:
            jumps = [s * dtype.itemsize for s in steps]
            values = np.lib.stride_tricks.as_strided(flat[offset:], shape, jumps, writeable=False)
        return (values.astype("<u4") << 16).view("<f4") if wide else values


def _whole(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > 16:
        raise TorchFileError("holds a tensor whose shape is no tuple")
    if any(type(n) is not int or n < 0 or n > 1 << 40 for n in values):
        raise TorchFileError("holds a tensor of impossible shape")
    return values


class Machine:
    """The stack machine of a pickle, with the allowed instructions only."""

    def __init__(self, tensor: Callable[[_Storage, int, Any, Any], npt.NDArray[Any]]) -> None:
        self._tensor = tensor
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Raises TorchFileError."""
        import pickletools  # for those who have such files: every agent would keep it in memory

        steps = 0
        try:
            for op, argument, _ in pickletools.genops(data):
                steps += 1
                if steps > MAX_STEPS:
                    raise TorchFileError(f"has more than {MAX_STEPS} instructions")
                if op.name == "STOP":
                    return self._end()
                self._step(op.name, argument)
        except TorchFileError:
            raise
        # Python only warns of an escape that it does not know, where warnings are no errors.
        except (
            *(ValueError, IndexError, KeyError, TypeError, AttributeError),
            DeprecationWarning,
        ) as error:
            raise TorchFileError(f"its pickle is damaged: {error}") from None
        raise TorchFileError("its pickle has no end")

    def _end(self) -> Any:
        value = self._stack.pop()
        if self._stack or isinstance(value, _Global | _Mark | _Storage):
            raise TorchFileError("its pickle does not end in a value")
        return value

    def _step(self, name: str, argument: Any) -> None:
        if name in _PUSH:
            self._stack.append(argument)
        elif name in _MAKE:
            self._stack.append(_MAKE[name]())
        elif name in ("PROTO", "FRAME"):
            return
        elif name in _HANDLERS:
            _HANDLERS[name](self, argument)
        else:
            raise TorchFileError(f"its pickle has the instruction {name}, which is not read")

    # -- instructions ---------------------------------------------------------------------

    def _mark(self) -> list[Any]:
        """What was pushed since the last mark, taken off with it."""
        at = len(self._stack) - 1
        while not isinstance(self._stack[at], _Mark):
            at -= 1
            if at < 0:
                raise TorchFileError("its pickle misses a mark")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _tuple(self, count: int) -> None:
        if count > len(self._stack):
            raise TorchFileError("its pickle takes more than it has")
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._stack.append(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TorchFileError("its pickle appends to what is no list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TorchFileError("its pickle sets items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | float | bool | tuple | None):
                raise TorchFileError(f"its pickle has a {type(key).__name__} as a key")
            target[key] = value

    def _name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._allow(module, name)

    def _allow(self, module: str, name: str) -> None:
        known = (module, name) in (_REBUILD, _ORDERED)
        if not known and not (module == "torch" and name in _STORAGES):
            raise TorchFileError(f"its pickle names {module[:64]}.{name[:64]}, which is not read")
        self._stack.append(_Global(module, name))

    def _stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TorchFileError("its pickle names something by no text")
        self._allow(module, name)

    def _call(self) -> None:
        given, what = self._stack.pop(), self._stack.pop()
        if not isinstance(what, _Global) or not isinstance(given, tuple):
            raise TorchFileError("its pickle calls what is no function")
        if what.pair == _ORDERED and given == ():
            self._stack.append({})
        elif what.pair == _REBUILD and len(given) in (6, 7) and isinstance(given[0], _Storage):
            if type(given[1]) is not int:
                raise TorchFileError("holds a tensor of impossible offset")
            self._stack.append(self._tensor(given[0], *given[1:4]))
        else:
            raise TorchFileError(f"its pickle calls {'.'.join(what.pair)} in an unknown way")

    def _persistent(self) -> None:
        given = self._stack.pop()
        if not (
            isinstance(given, tuple)
            and len(given) == 5
            and given[0] == "storage"
            and isinstance(given[1], _Global)
            and given[1].pair[0] == "torch"
            and isinstance(given[2], str)
            and type(given[4]) is int
        ):
            raise TorchFileError("its pickle refers to what is no tensor storage")
        self._stack.append(_Storage(_STORAGES[given[1].pair[1]], given[2], given[4]))

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[number])


_PUSH = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
)
_MAKE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "MARK": _Mark,
}  # fmt: skip
_HANDLERS: dict[str, Callable[[Machine, Any], None]] = {
    "TUPLE": lambda m, _: m._stack.append(tuple(m._mark())),
    "TUPLE1": lambda m, _: m._tuple(1),
    "TUPLE2": lambda m, _: m._tuple(2),
    "TUPLE3": lambda m, _: m._tuple(3),
    "APPEND": lambda m, _: m._append([m._stack.pop()]),
    "APPENDS": lambda m, _: m._append(m._mark()),
    "SETITEM": lambda m, _: m._set([m._stack.pop(-2), m._stack.pop()]),
    "SETITEMS": lambda m, _: m._set(m._mark()),
    "GLOBAL": lambda m, a: m._name(a),
    "STACK_GLOBAL": lambda m, _: m._stack_name(),
    "REDUCE": lambda m, _: m._call(),
    "BINPERSID": lambda m, _: m._persistent(),
    "BINPUT": lambda m, a: m._put(a),
    "LONG_BINPUT": lambda m, a: m._put(a),
    "MEMOIZE": lambda m, _: m._put(len(m._memo)),
    "BINGET": lambda m, a: m._get(a),
    "LONG_BINGET": lambda m, a: m._get(a),
}
