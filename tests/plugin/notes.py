"""Reads the USDT notes of a library: where a probe is, its semaphore, and its arguments."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

_TYPE = 3
# Registers by their 64-bit name, and what the compiler may call their lower parts.
_PARTS: dict[str, tuple[str, ...]] = {
    "rax": ("eax", "ax", "al"), "rbx": ("ebx", "bx", "bl"), "rcx": ("ecx", "cx", "cl"),
    "rdx": ("edx", "dx", "dl"), "rsi": ("esi", "si", "sil"), "rdi": ("edi", "di", "dil"),
    "rbp": ("ebp", "bp", "bpl"), "rsp": ("esp", "sp", "spl"),
}  # fmt: skip
_PARTS |= {f"r{n}": (f"r{n}d", f"r{n}w", f"r{n}b") for n in range(8, 16)}
_PARTS |= {f"x{n}": (f"w{n}",) for n in range(31)}
FULL_NAME = {part: name for name, parts in _PARTS.items() for part in (name, *parts)}


@dataclass(frozen=True)
class Note:
    """Addresses are virtual ones of the file; ``offset`` and ``semaphore_offset`` are in the file,
    which is what a uprobe wants. An argument: (signed size, register name or constant)."""

    provider: str
    name: str
    address: int
    semaphore: int
    offset: int
    semaphore_offset: int
    arguments: tuple[tuple[int, str | int], ...]


def _argument(text: str) -> tuple[int, str | int]:
    size, _, value = text.partition("@")
    constant = re.fullmatch(r"\$?(-?\d+)", value)
    if constant:
        return int(size), int(constant[1])
    return int(size), FULL_NAME[value.lstrip("%")]


def _file_offset(elf: ELFFile, address: int) -> int:
    (found,) = elf.address_offsets(address)
    return int(found)


def read(path: Path) -> dict[str, Note]:
    """By probe name; a name occurs once."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        sections = {section.name: section for section in elf.iter_sections()}
        data = sections[".note.stapsdt"].data()
        base = sections[".stapsdt.base"]["sh_addr"]
        found: dict[str, Note] = {}
        at = 0
        while at < len(data):
            name_size, size, kind = struct.unpack_from("<III", data, at)
            body = at + 12 + (name_size + 3 & ~3)
            at = body + (size + 3 & ~3)
            assert kind == _TYPE
            address, was_base, semaphore = struct.unpack_from("<QQQ", data, body)
            texts = data[body + 24 : body + size].split(b"\0")
            provider, name, arguments = (text.decode() for text in texts[:3])
            # The linker may move sections after the note was written.
            address += base - was_base
            semaphore += base - was_base
            assert name not in found
            found[name] = Note(
                provider, name, address, semaphore, _file_offset(elf, address),
                _file_offset(elf, semaphore), tuple(map(_argument, arguments.split())),
            )  # fmt: skip
    return found
