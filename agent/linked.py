"""Which files hold an NCCL of their own under another name: frameworks and programs that link it
statically, and renamed copies; and which hold PyTorch's process groups that call it.

A file counts if it defines what only the library itself defines. A wrapper that is preloaded, or a
caller, has ncclGroupEnd at most, not pncclGroupEnd beside it; probing both the wrapper and the
library would count every call twice. Each inode is looked at once, by its string tables; a scan
looks at so many files and bytes, the rest waits for the next one.

A file with CUDA kernels of which only the text of NCCL's version is left, because its symbols were
stripped, counts, too: it cannot be probed, and is told as failed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lanterne.probes import splits
from lanterne.probes.catalog import Library

from . import libnccl
from .discover import Key, Mapped, ways_to_open
from .elf import ElfFile, open_regular
from .errors import ElfError
from .inodes import same_file
from .symbols import MAX_STRINGS, functions

MARKS = ("pncclGroupEnd", "pncclAllReduce")  # both must be defined
CALLED = b"ncclGroupEnd\0"
DEVICE_CODE = libnccl.DEVICE_CODE.encode() + b"\0"
MAX_FILES = 512  # in one scan
MAX_BYTES = 256 << 20  # of string tables in one scan; the last file may go beyond
_MAX_FILE_BYTES = 2 * MAX_STRINGS  # of one file
MAX_KNOWN = 1 << 15
_FORGET_SCANS = 600  # inode numbers are used again: what is known is not known for ever
_MAX_SECTIONS = 4096
_SECTION_BYTES = 64
_SHT_STRTAB = 3

_SECTION = np.dtype(
    {
        "names": ["type", "offset", "size"],
        "formats": ["<u4", "<u8", "<u8"],
        "offsets": [4, 24, 32],
        "itemsize": _SECTION_BYTES,
    }
)


class Linked:
    """Remembers for each inode what is in it. Not thread-safe."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._known: dict[Key, str] = {}
        self._files = self._bytes = self._scans = 0

    def begin(self) -> None:
        """A new scan, with all it may look at."""
        self._files, self._bytes = MAX_FILES, MAX_BYTES
        self._scans += 1
        if self._scans % _FORGET_SCANS == 0 or len(self._known) >= MAX_KNOWN:
            self._known.clear()

    def holds(self, pid: int, mapped: Mapped) -> str | None:
        """Library kind of what is in the file: "nccl", "torch", "" for nothing; None: not looked at
        yet, ask again in the next scan."""
        known = self._known.get(mapped.key)
        if known is not None:
            return known
        if self._files <= 0 or self._bytes <= 0:
            return None
        self._files -= 1
        fd = self._open(pid, mapped)
        if fd is None:
            return ""  # not remembered: another process may let us at it
        try:
            found = self._look(fd, mapped.path)
        except (ElfError, OSError, ValueError, IndexError, OverflowError, MemoryError):
            found = ""  # whatever it is, it is no library that could be probed
        finally:
            os.close(fd)
        self._known[mapped.key] = found
        return found

    def _open(self, pid: int, mapped: Mapped) -> int | None:
        for path in ways_to_open(self._proc, pid, mapped):
            try:
                fd = open_regular(path)
            except ElfError:
                continue
            if same_file(os.fstat(fd), mapped.key):
                return fd
            os.close(fd)
        return None

    def _look(self, fd: int, path: str) -> str:
        needle = MARKS[0].encode() + b"\0"
        tables = self._string_tables(fd)
        named = any(needle in table for table in tables)
        # The name may stand there as something that is only used.
        if named and len(functions(ElfFile(fd, path), MARKS, ())) == len(MARKS):
            return "nccl"
        # A caller has the name of what it calls; a copy without names has only its texts.
        if any(CALLED in table for table in tables):
            return str(Library.TORCH) if _has_splits(ElfFile(fd, path), tables) else ""
        kernels = any(DEVICE_CODE in table for table in tables)  # names of sections
        return "nccl" if kernels and self._stripped(ElfFile(fd, path)) else ""

    def _stripped(self, file: ElfFile) -> bool:
        """Whether an NCCL without names is in it: it cannot be probed, and that is to be told."""
        self._bytes -= sum(section.size for section in libnccl.data_sections(file))
        return libnccl.linked_version(file) is not None

    def _string_tables(self, fd: int) -> list[bytes]:
        """Read here with few instructions, since it is done for every file of a GPU process."""
        head = os.pread(fd, 64, 0)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return []
        at = int.from_bytes(head[40:48], "little")
        size, count = (int.from_bytes(head[i : i + 2], "little") for i in (58, 60))
        if not at or at >= 1 << 62 or size != _SECTION_BYTES or not 0 < count <= _MAX_SECTIONS:
            return []
        raw = os.pread(fd, count * _SECTION_BYTES, at)
        sections = np.frombuffer(raw[: len(raw) // _SECTION_BYTES * _SECTION_BYTES], _SECTION)
        tables: list[bytes] = []
        left = _MAX_FILE_BYTES
        for section in sections[sections["type"] == _SHT_STRTAB][:8]:
            length = int(section["size"])
            if 0 < length <= min(left, MAX_STRINGS):
                left -= length
                tables.append(os.pread(fd, length, int(section["offset"])))
        self._bytes -= _MAX_FILE_BYTES - left
        return tables


def _has_splits(file: ElfFile, tables: Sequence[bytes]) -> bool:
    names = splits.symbols(Library.TORCH)
    named = any(name.encode() in table for name in names for table in tables)
    return named and bool(functions(file, names, ()))
