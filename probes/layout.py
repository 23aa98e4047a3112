"""The kernel records as numpy dtypes: the mirror of ``bpf/record.h``.

``tests/contract`` compiles the header and compares every offset and size with what stands here.
All fields are little-endian, times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

from .nccl_profiler.usdt import OP

RING_HEADER_BYTES = 8

RECORD = np.dtype(
    [
        ("enter_ns", "<u8"),
        ("duration_ns", "<u8"),
        ("comm", "<u8"),
        ("count", "<u8"),
        ("stream", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("seq", "<u4"),
        ("group", "<u4"),
        ("peer", "<i4"),
        ("sync_age_us", "<u4"),
        ("sync_blocked_us", "<u4"),
        ("launches", "<u2"),
        ("rc", "<i2"),
        ("probe", "<u2"),
        ("func", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("top_k", "u1"),
        ("pad", "u1", (2,)),
    ]
)

COMM_EVENT = np.dtype(
    [
        ("time_ns", "<u8"),
        ("duration_ns", "<u8"),
        ("comm", "<u8"),
        ("parent", "<u8"),
        ("slot", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("n_ranks", "<i4"),
        ("rank", "<i4"),
        ("color", "<i4"),
        ("key", "<i4"),
        ("rc", "<i4"),
        ("probe", "<u2"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("id", "u1", (128,)),
        ("name", "S64"),
    ]
)

# Fields of the plugin's own record behind the thread that told it.
DEVICE = np.dtype([("tgid", "<u4"), ("tid", "<u4"), *((n, OP[n]) for n in OP.names or ())])

SYNC_BINS = 32
CUDA_KEY = np.dtype([("tgid", "<u4"), ("device", "<u2"), ("stream", "u1"), ("pad", "u1")])
CUDA = np.dtype(
    [
        ("launches", "<u8"),
        ("graph_launches", "<u8"),
        ("syncs", "<u8"),
        ("sync_ns", "<u8"),
        ("sync_bins", "<u8", (SYNC_BINS,)),
    ]
)

# Order of enum lanterne_counter.
COUNTERS = (
    "submitted",
    "comm_submitted",
    "lost_ring",
    "lost_comm_ring",
    "lost_scratch",
    "lost_state",
    "lost_read",
    "nested",
    "orphan_return",
    "lost_cuda",
    "device_submitted",
    "lost_device_ring",
    "lost_device_version",
    "kernels_submitted",
    "lost_kernel_ring",
    "lost_kernel_names",
)


class Flag(IntFlag):
    """RECORD.flags."""

    PAIR = 1
    GROUP = 2
    CAPTURE = 4
    P2P = 8
    BLOCKING = 16
    SYNCED = 32
    FIRST = 64
    BYTES = 128


class Stream(IntEnum):
    """CUDA_KEY.stream: kinds of stream."""

    NONE = 0
    LEGACY = 1
    PER_THREAD = 2
    NAMED = 3
    UNREAD = 4


class CommKind(IntEnum):
    """COMM_EVENT.kind."""

    INIT = 1
    INIT_ALL = 2
    SPLIT = 3
    SHRINK = 4
    GROW = 5
    DESTROY = 6
    ABORT = 7
    FINALIZE = 8
    REVOKE = 9
    FIRST_USE = 10
    CONNECT = 11


class CommFlag(IntFlag):
    """COMM_EVENT.flags."""

    ID = 1
    RANK = 2
    PENDING = 4
    NAME = 8


class Func(IntEnum):
    """RECORD.func: ncclFunc_t as of NCCL 2.29, above 31 Lanterne's own."""

    BROADCAST = 0
    REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_REDUCE = 4
    SEND_RECV = 5
    SEND = 6
    RECV = 7
    ALL_TO_ALL = 8
    SCATTER = 9
    GATHER = 10
    ALL_GATHER_V = 11
    PUT_SIGNAL = 12
    SIGNAL = 13
    WAIT_SIGNAL = 14
    ALL_TO_ALL_V = 32
    BARRIER = 33
    P2P_GROUP = 34
    DISPATCH = 35
    COMBINE = 36
    REDUCE_SCATTER_V = 37
    SPLITS = 38
    UNKNOWN = 255
