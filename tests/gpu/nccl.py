"""A communicator of one rank on whichever libnccl is there, by ctypes."""

from __future__ import annotations

import ctypes as c
from typing import Any

from tests.gpu.cuda import Cuda

FLOAT32, SUM = 7, 0
COUNT = 1 << 16


class UniqueId(c.Structure):
    _fields_ = (("internal", c.c_ubyte * 128),)


class NcclError(Exception):
    pass


class Nccl:
    def __init__(self, path: str, cuda: Cuda) -> None:
        self.lib = c.CDLL(path, mode=c.RTLD_GLOBAL)
        self._cuda = cuda
        self._send, self._receive = cuda.memory(4 * COUNT), cuda.memory(4 * COUNT)

    def call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self.lib, name)(*arguments))
        if code:
            raise NcclError(f"{name} returned {code}")

    def version(self) -> int:
        found = c.c_int()
        self.call("ncclGetVersion", c.byref(found))
        return found.value

    def create(self) -> c.c_void_p:
        identity, comm = UniqueId(), c.c_void_p()
        self.call("ncclGetUniqueId", c.byref(identity))
        self.call("ncclCommInitRank", c.byref(comm), 1, identity, 0)
        return comm

    def split(self, comm: c.c_void_p) -> c.c_void_p:
        child = c.c_void_p()
        self.call("ncclCommSplit", comm, 0, 0, c.byref(child), None)
        return child

    def hash(self, comm: c.c_void_p) -> int | None:
        """Only the CPU stand-in tells it; NCCL prints it (NCCL_DEBUG=INFO)."""
        if not hasattr(self.lib, "rigNcclHash"):
            return None
        self.lib.rigNcclHash.restype = c.c_uint64
        return int(self.lib.rigNcclHash(comm))

    def everything(self, comm: c.c_void_p) -> None:
        """One of each: five collectives, and a send and a receive to itself in one group."""
        count, stream = c.c_size_t(COUNT), self._cuda.stream
        two = (self._send, self._receive, count, FLOAT32)
        self.call("ncclAllReduce", *two, SUM, comm, stream)
        self.call("ncclAllGather", *two, comm, stream)
        self.call("ncclReduceScatter", *two, SUM, comm, stream)
        self.call("ncclBroadcast", *two, 0, comm, stream)
        self.call("ncclReduce", *two, SUM, 0, comm, stream)
        self.call("ncclGroupStart")
        self.call("ncclSend", self._send, count, FLOAT32, 0, comm, stream)
        self.call("ncclRecv", self._receive, count, FLOAT32, 0, comm, stream)
        self.call("ncclGroupEnd")

    def all_reduce(self, comm: c.c_void_p) -> None:
        self.call("ncclAllReduce", self._send, self._receive, c.c_size_t(COUNT), FLOAT32, SUM,
                  comm, self._cuda.stream)  # fmt: skip

    def destroy(self, comm: c.c_void_p) -> None:
        self.call("ncclCommDestroy", comm)
