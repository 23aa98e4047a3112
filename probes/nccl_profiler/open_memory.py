"""Operations that the plugin has open, as they lie in a process's memory: the mirror of ``open.h``
and of what ``context.h`` asserts. All fields little-endian, addresses of the process."""

from __future__ import annotations

import numpy as np

from .usdt import OP

SECTION = "lanterne_open"
MAGIC = 0x4E504F4C
VERSION = 1
MAX_CONTEXTS = 4096

OPEN = np.dtype([("magic", "<u4"), ("version", "<u4"), ("newest", "<u8")])

CONTEXT = np.dtype(
    [
        ("made_before", "<u8"),
        ("hash", "<u8"),
        ("oldest", "<u8"),
        ("newest", "<u8"),
        ("rank", "<i4"),
        ("ranks", "<i4"),
        ("done_enqueue", [("latest", "<u8"), ("others", "<u8", (3,))]),
        ("live", "?"),
    ]
)

SLOT = np.dtype(
    [
        ("out", OP),
        ("owner", "<u8"),
        ("older", "<u8"),
        ("newer", "<u8"),
        ("gpu_start", "<u8"),
        ("gpu_stop", "<u8"),
        ("active_ns", "<u8"),
        ("expected", "<u4"),
        ("started", "<u4"),
        ("done", "<u4"),
        ("bad_stops", "<u4"),
        ("limit", "<u4"),
        ("generation", "u1"),
        ("open", "?"),
        ("stopped", "?"),
        ("self_only", "?"),
    ]
)
