"""What one rank alone can show: `python -m tests.rig.solo ROOT` prints it as JSON.

A process of its own, because a process can hold only one library of a soname.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.rig.api import IN_PROGRESS, SUM, Rank, UniqueId

VECTOR = bytes((37 * i + 11) & 255 for i in range(128))


def errors(me: Rank) -> dict[str, int]:
    a = c.c_void_p(np.zeros(8).ctypes.data)
    n, out, comm, stream = c.c_size_t(1), c.c_int(), me.comm, me.stream
    nothing = c.c_void_p()
    wrong = c.create_string_buffer(2_000_000)
    call = me.nccl.code
    return {
        "null comm": call("ncclAllReduce", a, a, n, 7, 0, nothing, stream),
        "not a comm": call("ncclAllReduce", a, a, n, 7, 0, wrong, stream),
        "bad type": call("ncclAllReduce", a, a, n, 99, 0, comm, stream),
        "bad op": call("ncclAllReduce", a, a, n, 7, 40, comm, stream),
        "bad root": call("ncclBroadcast", a, a, n, 7, 5, comm, stream),
        "bad peer": call("ncclSend", a, n, 7, -1, comm, stream),
        "null buffer": call("ncclAllReduce", nothing, a, n, 7, 0, comm, stream),
        "getter": call("ncclCommUserRank", nothing, c.byref(out)),
        "rank": call("ncclCommInitRank", c.byref(nothing), 2, UniqueId(), 2),
        "group end": call("ncclGroupEnd"),
        "group start": call("ncclGroupStart"),
        "in group": call("ncclAllReduce", a, a, n, 99, 0, comm, stream),
        "its group end": call("ncclGroupEnd"),
        "after": call("ncclAllReduce", a, a, n, 7, 0, comm, stream),
    }


def non_blocking(me: Rank) -> list[int]:
    """With config.blocking = 0 init returns in progress, and the state ends in success."""
    # size (64 bits), magic, version, blocking = 0; 96 bytes of it in all
    config = (c.c_uint32 * 24)(96, 0, 0xCAFEBEEF, 22809, 0)
    comm, uid, state = c.c_void_p(), UniqueId.from_buffer_copy(me.unique_id()), c.c_int(7)
    first = me.nccl.code("ncclCommInitRankConfig", c.byref(comm), 1, uid, 0, config)
    end = time.monotonic() + 5
    while state.value == IN_PROGRESS and time.monotonic() < end:
        me.nccl("ncclCommGetAsyncError", comm, c.byref(state))
        time.sleep(0.001)
    return [first, state.value, me.nccl.code("ncclCommDestroy", comm)]


def addresses(me: Rank) -> dict[str, bool]:
    """Whether cuGetProcAddress gives the export, and the per-thread twin is another address."""
    out: dict[str, bool] = {}
    for name in ("cuLaunchKernel", "cuLaunchKernelEx", "cuStreamSynchronize", "cuGraphLaunch"):
        found = []
        for flags in (0, 2):
            fn, status = c.c_void_p(), c.c_int()
            me.cuda("cuGetProcAddress_v2", name.encode(), c.byref(fn), 12080, c.c_uint64(flags),
                    c.byref(status))  # fmt: skip
            found.append(fn.value)
        exports = [
            c.cast(getattr(me.cuda.lib, symbol), c.c_void_p).value
            for symbol in (name, f"{name}_ptsz")
        ]
        out[name] = found == exports and found[0] != found[1]
    return out


def through_cudart(root: Path) -> dict[str, Any]:
    """A kernel of 30 ms launched through the runtime: the launch returns, the sync waits."""
    runtime = c.CDLL(str(root / "libcudart.so.12"))
    driver = c.CDLL(str(root / "libcuda.so.1"))
    driver.rigKernelCreate.restype = c.c_void_p
    kernel = c.c_void_p(driver.rigKernelCreate(b"sleep"))
    one = (c.c_uint * 3)(1, 1, 1)

    class Dim3(c.Structure):
        _fields_ = (("x", c.c_uint), ("y", c.c_uint), ("z", c.c_uint))

    dim, ns, stream = Dim3(*one), c.c_uint64(30_000_000), c.c_void_p()
    params = (c.c_void_p * 1)(c.cast(c.pointer(ns), c.c_void_p))
    codes = [runtime.cudaStreamCreate(c.byref(stream))]
    begin = time.monotonic()
    codes.append(runtime.cudaLaunchKernel(kernel, dim, dim, params, c.c_size_t(0), stream))
    launched = time.monotonic() - begin
    codes.append(runtime.cudaStreamSynchronize(stream))
    return {"codes": codes, "returned first": launched < 0.02 < time.monotonic() - begin}


def one_rank_copy(me: Rank) -> bool:
    """Out of place, a communicator of one rank still copies."""
    a, b = np.arange(5.0), np.zeros(5)
    me.call("ncclAllReduce", a, b, 5, SUM)
    me.sync()
    return bool(np.array_equal(a, b))


def main(root: Path) -> None:
    os.environ["LD_LIBRARY_PATH"] = str(root)
    me = Rank(root)
    me.init(1, 0, VECTOR)
    version = c.c_int()
    me.nccl("ncclGetVersion", c.byref(version))
    print(json.dumps({
        "version": version.value,
        "hash": me.comm_hash(me.comm),
        "errors": errors(me),
        "non_blocking": non_blocking(me),
        "addresses": addresses(me),
        "cudart": through_cudart(root),
        "copy": one_rank_copy(me),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
