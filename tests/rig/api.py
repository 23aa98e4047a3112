"""ctypes bindings of the rig's libraries, for tests that are themselves a rank.

Loading happens by path, so several builds can be used by different processes of one test.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: dict[str, int] = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8,
}  # fmt: skip
SUM, PROD, MAX, MIN, AVG = range(5)
IN_PROGRESS = 7


class UniqueId(c.Structure):
    _fields_ = (("internal", c.c_ubyte * 128),)


class NcclError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


def dtype_of(array: Array) -> int:
    return DTYPES[array.dtype.name]


def pointer(array: Array) -> c.c_void_p:
    return c.c_void_p(array.ctypes.data)


class Library:
    """Calls by name; a nonzero result is an NcclError. int arguments are C ints unless wrapped."""

    def __init__(self, path: Path) -> None:
        self.lib = c.CDLL(str(path), mode=c.RTLD_GLOBAL)

    def code(self, name: str, *args: Any) -> int:
        return int(getattr(self.lib, name)(*args))

    def __call__(self, name: str, *args: Any) -> None:
        code = self.code(name, *args)
        if code:
            raise NcclError(name, code)


class Rank:
    """One rank: its libraries, its stream, and the collectives as methods on numpy arrays."""

    def __init__(self, root: Path) -> None:
        self.cuda = Library(root / "libcuda.so.1")
        self.nccl = Library(root / "libnccl.so.2")
        self.stream = c.c_void_p()
        self.cuda("cuInit", 0)
        self.cuda("cuStreamCreate", c.byref(self.stream), 1)
        self.comm = c.c_void_p()

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.nccl("ncclGetUniqueId", c.byref(made))
        return bytes(made.internal)

    def init(self, ranks: int, rank: int, uid: bytes) -> None:
        made = UniqueId.from_buffer_copy(uid)
        self.nccl("ncclCommInitRank", c.byref(self.comm), ranks, made, rank)

    def split(self, color: int, key: int) -> c.c_void_p:
        out = c.c_void_p()
        self.nccl("ncclCommSplit", self.comm, color, key, c.byref(out), None)
        return out

    def comm_hash(self, comm: c.c_void_p) -> int:
        fn = self.nccl.lib.rigNcclHash
        fn.restype = c.c_uint64
        return int(fn(comm))

    def number(self, name: str, comm: c.c_void_p) -> int:
        out = c.c_int()
        self.nccl(name, comm, c.byref(out))
        return out.value

    def sync(self) -> None:
        self.cuda("cuStreamSynchronize", self.stream)

    def call(self, name: str, send: Array, recv: Array | None, count: int, *middle: int,
             comm: c.c_void_p | None = None) -> None:  # fmt: skip
        """Collectives: send, recv, count, type, then what `middle` holds (op, root), comm, stream.

        `recv` None: the forms with one buffer (Send, Recv, Bcast), where `middle` is the peer.
        """
        buffers = [pointer(send)] if recv is None else [pointer(send), pointer(recv)]
        self.nccl(name, *buffers, c.c_size_t(count), dtype_of(send), *middle,
                  self.comm if comm is None else comm, self.stream)  # fmt: skip

    def group(self) -> _Group:
        return _Group(self)


class _Group:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        self._rank.nccl("ncclGroupStart")

    def __exit__(self, *error: object) -> None:
        self._rank.nccl("ncclGroupEnd")


def ramp(rank: int, count: int, dtype: str) -> Array:
    """Small whole numbers that differ by rank, so sums and products stay exact in every type."""
    return ((np.arange(count) + rank) % 3 + 1).astype(dtype)
