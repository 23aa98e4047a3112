"""Giving up every privilege: the collector reads sockets and writes its own files.

Linux capabilities belong to a thread: call `drop` before others are started, they inherit from
their creator; so does the ingest process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CAP_NET_BIND_SERVICE = 10  # to listen below port 1024
LAST_CAPABILITY = 63

_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_libc = ctypes.CDLL(None, use_errno=True)


def drop(keep: tuple[int, ...] = ()) -> int:
    """Keep at most `keep`; -> the mask kept. Raises OSError."""
    header = ctypes.create_string_buffer(struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), 8)
    data = ctypes.create_string_buffer(24)
    _checked(_libc.capget(header, data), "capget")
    low, _, _, high, _, _ = struct.unpack("<6I", data.raw)
    mask = int(low | high << 32) & sum(1 << capability for capability in keep)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # The bounding set first: afterwards CAP_SETPCAP is gone. Without it there is nothing to regain.
    for capability in range(LAST_CAPABILITY + 1):
        if not mask >> capability & 1:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = ctypes.create_string_buffer(struct.pack("<6I", low, low, 0, high, high, 0), 24)
    _checked(_libc.capset(header, data), "capset")
    return mask


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, f"{call}: {os.strerror(number)}")
