"""Giving up what is not needed after the programs are loaded.

Linux capabilities belong to a thread: call `drop` from the main thread before others are started,
they inherit from their creator. What stays: CAP_BPF and CAP_PERFMON to attach to libraries that
show up later, CAP_SYS_PTRACE to read maps and memory of other users' processes,
CAP_DAC_READ_SEARCH to open their files, CAP_CHECKPOINT_RESTORE (5.9) for those that are deleted or
replaced while mapped, which only map_files leads to. Where only perf events can carry uprobes,
CAP_SYS_ADMIN too: kernels since 6.16, and older ones with that fix, ask for it at every such event.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CAP_DAC_READ_SEARCH = 2
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21
CAP_PERFMON = 38
CAP_BPF = 39
CAP_CHECKPOINT_RESTORE = 40
KEPT = (CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_PERFMON, CAP_BPF, CAP_CHECKPOINT_RESTORE)
KEPT_FOR_PERF = (*KEPT, CAP_SYS_ADMIN)
KEPT_WITHOUT_PROBES = (CAP_DAC_READ_SEARCH,)  # for files of engines that [experts] names
LAST_CAPABILITY = 63

_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_libc = ctypes.CDLL(None, use_errno=True)


def effective() -> int:
    """The calling thread's effective capabilities as a bit mask."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    if _libc.capget(ctypes.create_string_buffer(header, len(header)), data) != 0:
        raise _failed("capget")
    low, _, _, high, _, _ = struct.unpack("<6I", data.raw)
    return int(low | high << 32)


def drop(keep: tuple[int, ...] = KEPT) -> int:
    """Keep at most `keep`, for this thread and what it starts from now on; -> the mask kept.

    Raises OSError. Capabilities that were not there are not missed.
    """
    before = effective()
    mask = before & sum(1 << capability for capability in keep)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # The bounding set first: afterwards CAP_SETPCAP is gone. Without it there is nothing to regain.
    for capability in range(LAST_CAPABILITY + 1):
        if not mask >> capability & 1:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _failed("prctl(PR_SET_NO_NEW_PRIVS)")
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = ctypes.create_string_buffer(struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("<6I", low, low, 0, high, high, 0), 24)
    if _libc.capset(header, data) != 0:
        raise _failed("capset")
    return mask


def _failed(call: str) -> OSError:
    number = ctypes.get_errno() or errno.EPERM
    return OSError(number, f"{call}: {os.strerror(number)}")
