"""The functions of an ELF file that Lanterne looks for, by name.

The tables are read as numpy arrays, not through pyelftools: a libtorch_cpu.so has half a million
symbols, which is milliseconds here and minutes of one Python object each. Layouts: System V ABI,
ELF-64, little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from .elf import ElfFile, Section
from .errors import ElfError
from .unique import unique

MAX_SYMBOLS = 1 << 20
MAX_STRINGS = 48 << 20
MAX_MATCHES = 64  # names of one pattern
_MAX_HITS = 64  # places where one name may occur inside the string table

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
_STT_FUNC, _STT_IFUNC = 2, 10


@dataclass(frozen=True)
class Symbol:
    """A function: virtual address, size in bytes (0: unknown), file offset."""

    name: str
    address: int
    size: int
    offset: int


def functions(
    file: ElfFile, exported: Collection[str], local: Collection[str]
) -> dict[str, Symbol]:
    """Those of the names that the file defines as functions in executable segments.

    ``exported`` names are looked for in .dynsym, and those that are not there in .symtab (an
    executable, or a library that hides or half hides what it links statically); ``local`` ones in
    .symtab. A name with two addresses is left out.
    """
    found: dict[str, Symbol] = {}
    dynamic = [section for section in file.sections if section.type == "SHT_DYNSYM"]
    full = [section for section in file.sections if section.type == "SHT_SYMTAB"]
    if not dynamic and not full:
        raise file.error("has no symbol table")
    for section in dynamic[:2]:
        found |= _search(file, section, exported)
    for section in full[:2]:
        wanted = (set(local) | set(exported)) - set(found)
        try:
            found |= _search(file, section, wanted) if wanted else {}
        except ElfError:
            if not found:
                raise  # else what is exported serves, as in a stripped library
    return found


def matching(file: ElfFile, pattern: re.Pattern[bytes]) -> dict[str, Symbol]:
    """Functions whose whole name matches; from .symtab where .dynsym has none (hidden names)."""
    for kind in ("SHT_DYNSYM", "SHT_SYMTAB"):
        found: dict[str, Symbol] = {}
        for section in [one for one in file.sections if one.type == kind][:2]:
            text, _ = _tables(file, section)
            names = {match[1].decode() for match in _whole(pattern).finditer(text)}
            file.bounded(len(names), MAX_MATCHES, "matching symbols")
            found |= _search(file, section, names)
        if found:
            return found
    return {}


def _whole(pattern: re.Pattern[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"(" + pattern.pattern + b")\\0")


def code_of(file: ElfFile, symbol: Symbol, limit: int = 256) -> bytes:
    """The first bytes of a function, at most ``limit``."""
    size = min(symbol.size or limit, limit, file.size - symbol.offset)
    return file.read(symbol.offset, size, f"code of {symbol.name}")


def _tables(file: ElfFile, section: Section) -> tuple[bytes, np.ndarray]:
    """-> (string table, symbol table with everything in it)."""
    if section.entry_size != _SYMBOL.itemsize:
        raise file.error(f"symbols of {section.entry_size} bytes instead of 24")
    count = file.bounded(section.size // _SYMBOL.itemsize, MAX_SYMBOLS, "symbols")
    if section.link >= len(file.sections):
        raise file.error("symbol table names a string table that does not exist")
    strings = file.sections[section.link]
    if strings.size > MAX_STRINGS:
        raise file.error(f"string table of {strings.size} bytes, more than {MAX_STRINGS}")
    text = file.read(strings.offset, strings.size, "string table")
    content = file.read(section.offset, count * _SYMBOL.itemsize, "symbol table")
    return text, np.frombuffer(content, _SYMBOL)


def _search(file: ElfFile, section: Section, names: Collection[str]) -> dict[str, Symbol]:
    text, table = _tables(file, section)
    kind = table["info"] & 15
    defined = table[
        ((kind == _STT_FUNC) | (kind == _STT_IFUNC)) & (table["shndx"] != 0) & (table["value"] != 0)
    ]
    found = {}
    for name in names:
        symbol = _resolve(file, name, text, defined)
        if symbol is not None:
            found[name] = symbol
    return found


def _resolve(file: ElfFile, name: str, text: bytes, table: np.ndarray) -> Symbol | None:
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
    addresses = unique(entries["value"])
    if len(addresses) != 1:
        return None
    address = int(addresses[0])
    try:
        offset = file.file_offset(address)
    except ElfError:
        return None
    return Symbol(name, address, int(entries["size"].max()), offset)
