"""The profiler plugin's USDT probes for a reader: the mirror of ``lanterne_usdt.h``.

``tests/plugin`` compiles the header and compares every offset. Times are CLOCK_MONOTONIC
nanoseconds, all fields little-endian.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np

LIBRARY = "libnccl-profiler-lanterne.so"  # a process that maps it may also have renamed it
PROVIDER = "lanterne"
PROBES = ("comm_init", "op_done", "p2p_task", "comm_end")
OP_VERSION = 1

# OP.func of a row that is a sum and no operation: how long this rank waited for `peer`. Then `seq`
# is the number of receives, `bytes_received` their nanoseconds since the group's start, summed.
PEER_WAIT = 253

# Argument 1 of op_done points at one of these, argument 2 is its size.
OP = np.dtype(
    [
        ("comm_hash", "<u8"),
        ("seq", "<u8"),
        ("bytes", "<u8"),
        ("bytes_received", "<u8"),
        ("start_ns", "<u8"),
        ("stop_ns", "<u8"),
        ("offset_ns", "<i8"),
        ("enqueue_ns", "<u8"),
        ("rank", "<u4"),
        ("n_ranks", "<u4"),
        ("peer", "<i4"),
        ("dropped", "<u4"),
        ("channels", "<u2"),
        ("channels_expected", "<u2"),
        ("part", "<u2"),
        ("tasks", "<u2"),
        ("func", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("version", "u1"),
        ("reserved", "<u4"),
    ]
)


class OpFlag(IntFlag):
    """OP.flags."""

    PARTIAL = 1
    NO_STOP = 2
    GRAPH = 4
    LIMITED = 8
    SEQ_LOCAL = 16
    NO_SIZE = 32
