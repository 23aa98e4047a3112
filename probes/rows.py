"""Catalog rows and kernel state as numpy dtypes: the mirror of ``bpf/row.h``.

``tests/contract`` compiles the header and compares every offset and size with what stands here.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np


class SourceKind(IntEnum):
    """Where one value is found at function entry."""

    NONE = 0
    REGISTER = 1
    STACK = 2
    STACK_ADDRESS = 3
    MEMORY = 4
    CHAIN = 5
    CONSTANT = 6
    WORD = 7
    WORD_MEMORY = 8


class Field(IntEnum):
    """Index into ROW.source."""

    COMM = 0
    COUNT = 1
    SCALE = 2
    DTYPE = 3
    PEER = 4
    STREAM = 5
    SLOT = 6
    N_RANKS = 7
    RANK = 8
    COLOR = 9
    KEY = 10
    ID = 11
    CONFIG = 12
    VECTOR = 13
    RECEIVE_VECTOR = 14
    TOP_K = 15
    UNIT = 16
    HALVED = 17
    PHASES = 18
    WORST = 19
    OUT_RANK = 20
    OUT_RANKS = 21


class Trait(IntFlag):
    """ROW.traits."""

    PER_PEER = 1
    GLOO = 2
    GRAPH = 4
    FREES = 8
    EXPERTS = 16
    NOTIFIED = 32
    TENSOR = 64
    PER_THREAD = 128


class ContextCall(IntEnum):
    """ROW.func of a row about CUDA contexts."""

    MADE = 1
    ENTERED = 2
    SET = 3
    PUSHED = 4
    POPPED = 5
    ENDED = 6
    ASKED = 7


SOURCE = np.dtype(
    [
        ("kind", "u1"),
        ("reg", "u1"),
        ("width", "u1"),
        ("pad", "u1"),
        ("first", "<i4"),
        ("second", "<i4"),
    ]
)

ROW = np.dtype(
    [
        ("func", "u1"),
        ("flags", "u1"),
        ("traits", "u1"),
        ("pad", "u1"),
        ("source", SOURCE, (len(Field),)),
    ]
)

THREAD = np.dtype(
    [
        ("id", "<u8"),
        ("sync_return_ns", "<u8"),
        ("sync_enter_ns", "<u8"),
        ("blocked_ns", "<u8"),
        ("launches", "<u4"),
        ("group", "<u4"),
        ("depth", "<u4"),
        ("capture", "<u2"),
        ("sync_stream", "u1"),
        ("pad", "u1"),
        ("pending", "<u4"),
        ("device", "<u2"),
        ("under", "<u2"),
        ("notified_ns", "<u8"),
    ]
)

COMM = np.dtype(
    [
        ("key", "<u8"),
        ("seq", "<u8"),
        ("p2p", "<u8"),
        ("p2p_group", "<u4"),
        ("tgid", "<u4"),
        ("n_ranks", "<u4"),
        ("rank", "<i4"),
    ]
)

PROCESS = np.dtype(
    [
        ("tgid", "<u8"),
        ("open", "<u8"),
        ("replays", "<u4"),
        ("seen", "<u4"),
        ("launches", "<u8"),
        ("steps", "<u8"),
        ("silent_steps", "<u8"),
        ("replay_steps", "<u8"),
        ("captured_ops", "<u8"),
    ]
)

MAX_THREADS = 16384
MAX_COMMS = 16384
MAX_PROCESSES = 4096
MAX_ROWS = 256
DERIVED_ROWS = 128  # from here on: rows that are derived from a library's own symbols
MAX_PEERS = 64
MAX_PENDING = 64
