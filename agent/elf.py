"""Reads what probing needs from an ELF file that may be broken or made to harm.

Everything is read with pread in sizes that are bounded before, never mapped: a file that shrinks
under a mapping kills the reader with SIGBUS. Tables are numpy arrays, so half a million symbols
cost milliseconds. Layouts: System V ABI, ELF-64, little-endian.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import code
from .errors import ElfError

MAX_SECTIONS = 4096
MAX_SEGMENTS = 1024
MAX_SYMBOLS = 1 << 20
MAX_STRINGS = 48 << 20
MAX_FILE = 1 << 40
_MAX_HITS = 64  # places where one name may occur inside the string table
_MAX_NOTES = 1 << 16
_VERSION_CHUNK = 4 << 20
_MAX_VERSION_BYTES = 64 << 20

_MACHINES = {"x86_64": 62, "aarch64": 183}
_MACHINE_NAMES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv"}

_HEADER = np.dtype(
    [
        ("ident", "u1", (16,)),
        ("type", "<u2"),
        ("machine", "<u2"),
        ("version", "<u4"),
        ("entry", "<u8"),
        ("phoff", "<u8"),
        ("shoff", "<u8"),
        ("flags", "<u4"),
        ("ehsize", "<u2"),
        ("phentsize", "<u2"),
        ("phnum", "<u2"),
        ("shentsize", "<u2"),
        ("shnum", "<u2"),
        ("shstrndx", "<u2"),
    ]
)
_SEGMENT = np.dtype(
    [
        ("type", "<u4"),
        ("flags", "<u4"),
        ("offset", "<u8"),
        ("vaddr", "<u8"),
        ("paddr", "<u8"),
        ("filesz", "<u8"),
        ("memsz", "<u8"),
        ("align", "<u8"),
    ]
)
_SECTION = np.dtype(
    [
        ("name", "<u4"),
        ("type", "<u4"),
        ("flags", "<u8"),
        ("addr", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("link", "<u4"),
        ("info", "<u4"),
        ("align", "<u8"),
        ("entsize", "<u8"),
    ]
)
_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("shndx", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
_PT_LOAD, _PT_NOTE = 1, 4
_PF_X = 1
_SHT_SYMTAB, _SHT_NOTE, _SHT_DYNSYM = 2, 7, 11
_STT_FUNC, _STT_IFUNC = 2, 10


@dataclass(frozen=True)
class Symbol:
    """A function: virtual address, size in bytes (0: unknown), file offset."""

    name: str
    address: int
    size: int
    offset: int


def open_regular(path: str | Path) -> int:
    """Opens a file for reading only if it is a regular one; never blocks on a FIFO or device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ElfError(f"{path}: cannot be opened: {error.strerror}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise ElfError(f"{path}: not a regular file")
    return fd


class ElfFile:
    """An open ELF file of this machine's architecture; ``fd`` stays the caller's."""

    def __init__(self, fd: int, path: str, *, machine: str | None = None) -> None:
        self._fd = fd
        self.path = path
        self.size = os.fstat(fd).st_size
        header = self._table(0, 1, _HEADER, "ELF header")[0]
        self._check(header, machine or platform.machine())
        self._segments = self._table(
            int(header["phoff"]),
            self._bounded(header["phnum"], MAX_SEGMENTS, "segments"),
            _SEGMENT,
            "program headers",
        )
        self._sections = self._table(
            int(header["shoff"]),
            self._bounded(header["shnum"], MAX_SECTIONS, "sections"),
            _SECTION,
            "section headers",
        )
        loads = self._segments["type"] == _PT_LOAD
        self._text = self._segments[loads & ((self._segments["flags"] & _PF_X) != 0)]
        if not len(self._text):
            raise self._error("has no executable segment")

    def _error(self, what: str) -> ElfError:
        return ElfError(f"{self.path}: {what}")

    def _check(self, header: np.void, machine: str) -> None:
        ident = header["ident"]
        if ident[:4].tobytes() != b"\x7fELF":
            raise self._error("not an ELF file")
        if ident[4] != 2 or ident[5] != 1:
            raise self._error("not a 64-bit little-endian ELF file")
        number = int(header["machine"])
        if number != _MACHINES.get(machine):
            name = _MACHINE_NAMES.get(number, f"number {number}")
            raise self._error(f"built for architecture {name}, this machine is {machine}")
        if header["phentsize"] != _SEGMENT.itemsize:
            raise self._error(f"program headers of {header['phentsize']} bytes instead of 56")
        if header["shnum"] and header["shentsize"] != _SECTION.itemsize:
            raise self._error(f"section headers of {header['shentsize']} bytes instead of 64")

    def _bounded(self, number: int, limit: int, what: str) -> int:
        if number > limit:
            raise self._error(f"claims {number} {what}, more than the {limit} that are looked at")
        return int(number)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Exactly ``size`` bytes, or ElfError."""
        if offset < 0 or size < 0 or offset > MAX_FILE or offset + size > self.size:
            raise self._error(f"{what} at {offset} (+{size}) is outside the file ({self.size})")
        parts = []
        while size:
            try:
                part = os.pread(self._fd, min(size, 16 << 20), offset)
            except OSError as error:
                raise self._error(f"{what}: {error.strerror}") from error
            if not part:
                raise self._error(f"{what}: the file became shorter while it was read")
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)

    def _table(self, offset: int, count: int, dtype: np.dtype, what: str) -> np.ndarray:
        return np.frombuffer(self.read(offset, count * dtype.itemsize, what), dtype)

    def file_offset(self, address: int) -> int:
        """Of a virtual address in an executable segment; ElfError outside."""
        inside = (self._text["vaddr"] <= address) & (
            address - self._text["vaddr"].astype(object) < self._text["filesz"].astype(object)
        )
        which = np.flatnonzero(inside)
        if not which.size:
            raise self._error(f"address {address:#x} is in no executable segment")
        segment = self._text[which[0]]
        offset = address - int(segment["vaddr"]) + int(segment["offset"])
        if offset >= self.size:
            raise self._error(f"address {address:#x} is behind the end of the file")
        return offset

    def build_id(self) -> str:
        """Lower-case hex; empty if there is none."""
        for segment in self._segments[self._segments["type"] == _PT_NOTE]:
            size = int(segment["filesz"])
            if size > _MAX_NOTES:
                continue
            found = _find_build_id(self.read(int(segment["offset"]), size, "notes"))
            if found:
                return found
        for section in self._sections[self._sections["type"] == _SHT_NOTE]:
            size = int(section["size"])
            if size > _MAX_NOTES:
                continue
            found = _find_build_id(self.read(int(section["offset"]), size, "notes"))
            if found:
                return found
        return ""

    def functions(self, exported: Collection[str], local: Collection[str]) -> dict[str, Symbol]:
        """Those of the names that the file defines as functions in executable segments.

        ``exported`` names are looked for in .dynsym, and in .symtab if there is no .dynsym entry
        at all (an executable); ``local`` ones in .symtab. A name with two addresses is left out.
        """
        found: dict[str, Symbol] = {}
        kinds = self._sections["type"]
        if not ((kinds == _SHT_DYNSYM) | (kinds == _SHT_SYMTAB)).any():
            raise self._error("has no symbol table")
        for section in self._sections[kinds == _SHT_DYNSYM][:2]:
            found |= self._search(section, exported)
        wanted = set(local) if found else set(local) | set(exported)
        if wanted:
            for section in self._sections[kinds == _SHT_SYMTAB][:2]:
                found |= self._search(section, wanted - set(found))
        return found

    def _search(self, section: np.void, names: Collection[str]) -> dict[str, Symbol]:
        if section["entsize"] != _SYMBOL.itemsize:
            raise self._error(f"symbols of {section['entsize']} bytes instead of 24")
        count = self._bounded(int(section["size"]) // _SYMBOL.itemsize, MAX_SYMBOLS, "symbols")
        if int(section["link"]) >= len(self._sections):
            raise self._error("symbol table names a string table that does not exist")
        strings = self._sections[int(section["link"])]
        size = int(strings["size"])
        if size > MAX_STRINGS:
            raise self._error(f"string table of {size} bytes, more than {MAX_STRINGS}")
        text = self.read(int(strings["offset"]), size, "string table")
        table = self._table(int(section["offset"]), count, _SYMBOL, "symbol table")
        kind = table["info"] & 15
        defined = table[
            ((kind == _STT_FUNC) | (kind == _STT_IFUNC))
            & (table["shndx"] != 0)
            & (table["value"] != 0)
        ]
        found = {}
        for name in names:
            symbol = self._resolve(name, text, defined)
            if symbol is not None:
                found[name] = symbol
        return found

    def _resolve(self, name: str, text: bytes, table: np.ndarray) -> Symbol | None:
        """The string may stand at several places, since linkers merge strings by their ends."""
        needle = name.encode() + b"\0"
        places: list[int] = []
        at = text.find(needle)
        while at >= 0 and len(places) < _MAX_HITS:
            places.append(at)
            at = text.find(needle, at + 1)
        if not places:
            return None
        entries = table[np.isin(table["name"], np.array(places, np.uint32))]
        addresses = np.unique(entries["value"])
        if len(addresses) != 1:
            return None
        address = int(addresses[0])
        try:
            offset = self.file_offset(address)
        except ElfError:
            return None
        return Symbol(name, address, int(entries["size"].max()), offset)

    def code(self, symbol: Symbol, limit: int = 256) -> bytes:
        """The first bytes of a function, at most ``limit``."""
        size = min(symbol.size or limit, limit, self.size - symbol.offset)
        return self.read(symbol.offset, size, f"code of {symbol.name}")

    def nccl_version(self, symbols: Mapping[str, Symbol]) -> int | None:
        """NCCL's version code, e.g. 22809: what ncclGetVersion stores, else from the text
        "NCCL version X.Y.Z" in the file's data."""
        getter = symbols.get(VERSION_GETTER)
        if getter is not None and platform.machine() == "x86_64":
            stored = code.stored_version(self.code(getter), getter.address)
            if stored is not None:
                return stored
        rodata = [
            s
            for s in self._sections
            if s["type"] == 1
            and int(s["flags"]) & 2
            and not int(s["flags"]) & 1
            and 0 < int(s["size"]) <= _MAX_VERSION_BYTES
        ]
        for section in rodata:
            found = self._search_version(int(section["offset"]), int(section["size"]))
            if found is not None:
                return found
        return None

    def _search_version(self, offset: int, size: int) -> int | None:
        end = offset + size
        while offset < end:
            length = min(_VERSION_CHUNK, end - offset)
            match = _VERSION.search(self.read(offset, length, "data"))
            if match:
                return version_code(*(int(part) for part in match.groups()))
            offset += length if length < 64 else length - 63
            if length < 64:
                return None
        return None


_VERSION = re.compile(rb"NCCL version (\d{1,2})\.(\d{1,2})\.(\d{1,3})")


def version_code(major: int, minor: int, patch: int) -> int:
    """As NCCL_VERSION: 2809 style up to 2.8, then 22809 style."""
    if major < 2 or (major == 2 and minor <= 8):
        return major * 1000 + minor * 100 + patch
    return major * 10000 + minor * 100 + patch


def _find_build_id(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = np.frombuffer(notes, "<u4", 3, at).tolist()
        name_at = at + 12
        data_at = name_at + (name_size + 3) // 4 * 4
        end = data_at + (size + 3) // 4 * 4
        if end > len(notes) + 3:
            return ""
        if kind == 3 and notes[name_at : name_at + name_size] == b"GNU\0" and 0 < size <= 64:
            return notes[data_at : data_at + size].hex()
        at = end
    return ""


@dataclass(frozen=True)
class CommOffsets:
    """Where ncclComm keeps its identity, in bytes; ``source``: "build_id" or "getters"."""

    comm_hash: int
    rank: int
    n_ranks: int
    cuda_dev: int
    bus_id: int
    has_magic: bool
    source: str


# Offset of `rank` by the head of the build id, from the debug information of NVIDIA's wheels:
# 2.18.3, 2.21.5, 2.23.4, 2.26.5, 2.27.5, 2.27.7, 2.28.9 (cu12, cu13), 2.29.7, 2.30.7, 2.31.2,
# 2.32.3. The other fields lie at fixed distances from it in all of them.
_RANK_BY_BUILD_ID: Mapping[str, int] = {
    "55c87fca": 9176,
    "2e87d0e7": 13536,
    "edadae13": 246952,
    "5c9b4531": 492728,
    "3c098e06": 1066168,
    "401f52e4": 1066168,
    "6a77e259": 1066192,
    "9fcf74d9": 1066192,
    "51943fef": 1181400,
    "e72c1a08": 1181424,
    "3ec21830": 1181416,
    "855c15bc": 1181416,
}
VERSION_GETTER = "pncclGetVersion"
GETTERS = ("pncclCommUserRank", "pncclCommCount", "pncclCommCuDevice")
_FIRST_WITH_MAGIC = 22100


def comm_offsets(
    elf: ElfFile, symbols: Mapping[str, Symbol], version: int | None
) -> CommOffsets | None:
    """From the build-id table, else from the machine code of the exported getters, else None."""
    rank = _RANK_BY_BUILD_ID.get(elf.build_id()[:8])
    if rank is not None:
        return _around(rank, rank != 9176, "build_id")
    if platform.machine() != "x86_64" or any(name not in symbols for name in GETTERS):
        return None
    offsets = [
        code.field_offset(elf.code(symbols[name]), symbols[name].address) for name in GETTERS
    ]
    rank, n_ranks, cuda_dev = offsets
    if rank is None or n_ranks != rank + 4 or cuda_dev != rank + 8:
        return None
    return _around(rank, version is None or version >= _FIRST_WITH_MAGIC, "getters")


def _around(rank: int, has_magic: bool, source: str) -> CommOffsets:
    return CommOffsets(rank - 8, rank, rank + 4, rank + 8, rank + 32, has_magic, source)
