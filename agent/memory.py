"""Keeps the C library's allocator from holding on to memory that numpy gave back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def frugal() -> bool:
    """Very large arrays get pages of their own, which go back at once, and of the heap 8 MiB at
    most are kept free; threads share two arenas.

    glibc raises both thresholds by itself, and after a burst the heap then stays at its peak. With
    lower ones the arrays of every drain and window are new pages: where 2 MiB are kept free,
    20,000 events/s come to up to 1,800 page faults a second and half as much CPU again, for no more
    than 3 MB less. -> whether there was something to set (not with musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, 4 << 20), (_M_TRIM_THRESHOLD, 8 << 20), (_M_ARENA_MAX, 2))
    return all(mallopt(option, value) == 1 for option, value in settings)


def let_go(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Give back what only the start needed: freed heap, and pages of program files.

    Most of what grpc, numpy, capstone and the interpreter bring in runs once. Mappings that are
    not writable and hold no page of their own (no relocation was applied there) are dropped from
    this process; what is used again comes back from the page cache. -> bytes dropped.
    """
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    dropped = 0
    for start, end, resident in _clean_files(smaps.read_text(errors="replace")):
        if libc.madvise(start, end - start, _MADV_DONTNEED) == 0:
            dropped += resident
    return dropped


def _clean_files(smaps: str) -> Iterator[tuple[int, int, int]]:
    """(start, end, resident bytes) of private, read-only file mappings without private pages."""
    start = end = resident = 0
    eligible = False
    for line in smaps.splitlines():
        head, _, rest = line.partition(" ")
        if head == "Rss:":
            resident = int(rest.split()[0]) * 1024
        elif head == "Anonymous:":
            if eligible and resident and int(rest.split()[0]) == 0:
                yield start, end, resident
        elif not head.endswith(":"):
            low, _, high = head.partition("-")
            start, end = int(low, 16), int(high, 16)
            fields = rest.split(maxsplit=4)
            eligible = (
                len(fields) == 5
                and fields[4].startswith("/")
                and fields[0][1] == "-"
                and fields[0][3] == "p"
            )
