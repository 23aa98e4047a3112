"""Where a structure keeps its members, from the debugging information of a library.

NVIDIA's wheels carry it. Only top-level entries are parsed, over streams that give out so much in
all: a wheel of 450 MB takes some 2,500 reads, and a file made to harm ends in an ElfError.
"""

from __future__ import annotations

import io
import os
from typing import Any, cast

from .elf import ElfFile, Section
from .errors import ElfError

MAX_READS = 50_000
MAX_BYTES = 8 << 20
_SHF_COMPRESSED = 0x800
_NEEDED = (".debug_info", ".debug_abbrev")
_USEFUL = (".debug_str", ".debug_line_str")


class _Budget:
    def __init__(self, path: str) -> None:
        self._path = path
        self._reads, self._bytes = MAX_READS, MAX_BYTES

    def spend(self, size: int) -> None:
        self._reads -= 1
        self._bytes -= size
        if self._reads < 0 or self._bytes < 0:
            raise ElfError(f"{self._path}: more debugging information than is looked at")


class _Window(io.RawIOBase):
    """One section of a file as a stream of its own."""

    def __init__(self, fd: int, section: Section, budget: _Budget) -> None:
        self._fd = fd
        self._start, self._size = section.offset, section.size
        self._at = 0
        self._budget = budget

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._at
        wanted = max(0, left if size < 0 else min(size, left)) if self._at >= 0 else 0
        self._budget.spend(wanted)  # before the buffer is made
        part = os.pread(self._fd, wanted, self._start + self._at)
        self._at += len(part)
        return part


def member_offsets(file: ElfFile, structure: str) -> dict[str, int]:
    """Byte offset of each named member of the structure; empty where the file does not say.

    Raises ElfError where the debugging information makes no sense, or is more than is looked at.
    """
    sections = {
        name: section
        for name, section in file.sections_named((*_NEEDED, *_USEFUL)).items()
        if section.type == "SHT_PROGBITS" and not section.flags & _SHF_COMPRESSED
    }
    if any(name not in sections for name in _NEEDED):
        return {}
    try:
        return _search(_information(file, sections), structure.encode())
    except ElfError:
        raise
    except Exception as error:  # the library answers nonsense with whatever comes up
        raise file.error(f"debugging information: {error or type(error).__name__}") from error


def _information(file: ElfFile, sections: dict[str, Section]) -> Any:
    from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DwarfConfig, DWARFInfo

    budget = _Budget(file.path)

    def stream(name: str) -> Any:
        section = sections.get(name)
        if section is None or section.offset + section.size > file.size:
            return None
        # To the library's annotations only a full IO is a stream.
        window = cast("Any", _Window(file.fd, section, budget))
        return DebugSectionDescriptor(window, name, section.offset, section.size, 0)

    given = {name: stream(name) for name in (*_NEEDED, *_USEFUL)}
    if any(given[name] is None for name in _NEEDED):
        raise file.error("debugging information is outside the file")
    config = DwarfConfig(little_endian=True, machine_arch=file.architecture, default_address_size=8)
    rest = dict.fromkeys(
        (
            "debug_aranges_sec", "debug_frame_sec", "eh_frame_sec", "debug_loc_sec",
            "debug_ranges_sec", "debug_line_sec", "debug_pubtypes_sec", "debug_pubnames_sec",
            "debug_addr_sec", "debug_str_offsets_sec", "debug_loclists_sec", "debug_rnglists_sec",
            "debug_sup_sec", "gnu_debugaltlink_sec", "debug_types_sec",
        )
    )  # fmt: skip
    known: Any = DWARFInfo
    return known(
        config=config,
        debug_info_sec=given[".debug_info"],
        debug_abbrev_sec=given[".debug_abbrev"],
        debug_str_sec=given[".debug_str"],
        debug_line_str_sec=given[".debug_line_str"],
        **rest,
    )


def _search(information: Any, name: bytes) -> dict[str, int]:
    for unit in information.iter_CUs():
        for entry in unit.get_top_DIE().iter_children():
            named = entry.attributes.get("DW_AT_name")
            if (
                named is not None
                and named.value == name
                and entry.tag == "DW_TAG_structure_type"
                and entry.has_children
            ):
                return _members(entry)
    return {}


def _members(entry: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for member in entry.iter_children():
        named = member.attributes.get("DW_AT_name")
        place = member.attributes.get("DW_AT_data_member_location")
        if member.tag == "DW_TAG_member" and named and place and isinstance(place.value, int):
            found[named.value.decode("utf-8", "replace")] = place.value
    return found
