"""Keeps the C library's allocator from holding on to memory that numpy gave back."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def frugal() -> bool:
    """Large arrays get pages of their own, which go back at once; threads share two arenas.

    glibc raises its threshold for such pages up to 32 MiB by itself, and after a burst the heap
    then stays at its peak. -> whether there was something to set (not with musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 18), (_M_TRIM_THRESHOLD, 1 << 20), (_M_ARENA_MAX, 2))
    return all(mallopt(option, value) == 1 for option, value in settings)
