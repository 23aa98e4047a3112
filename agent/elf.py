"""An ELF file that may be broken or made to harm: headers, segments, sections, notes, raw bytes.

pyelftools parses them, over a stream that reads with pread, never maps (a file that shrinks under a
mapping kills the reader with SIGBUS), and gives out only so many bytes in all: whatever a file
claims, parsing it ends soon. Counts are checked before anything is walked through, and whatever
the library raises becomes an ElfError that names the file. Symbol tables are `symbols`' business.
"""

from __future__ import annotations

import io
import os
import platform
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from .errors import ElfError

MAX_SECTIONS = 4096
MAX_SEGMENTS = 1024
MAX_FILE = 1 << 40
_MAX_NOTES = 1 << 16
_MAX_NAMES = 1 << 20
_MAX_PARSED = 1 << 19  # bytes of notes, and what else is not read in one piece
_PN_XNUM = 0xFFFF  # more segments than e_phnum can say: the number stands in section 0
_SEGMENT_BYTES, _SECTION_BYTES = 56, 64

_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Segment:
    """One program header; ``type`` is pyelftools' name ("PT_LOAD"), or a number it has none for."""

    type: str | int
    flags: int
    offset: int
    address: int
    file_size: int


@dataclass(frozen=True)
class Section:
    """One section header; ``type`` as in Segment. Names are read by `sections_named` only."""

    type: str | int
    flags: int
    offset: int
    size: int
    link: int
    entry_size: int
    address: int = 0


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


class _Stream(io.RawIOBase):
    """What pyelftools reads from: a position over pread, and a budget of bytes."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._at = 0
        self._left = _MAX_PARSED

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        # Before the buffer is made: the size may be any number that the file holds.
        if not 0 <= size <= self._left:
            raise ElfError(f"asks for more than {_MAX_PARSED} bytes of headers and notes")
        if self._at > self._size:
            return b""
        part = os.pread(self._fd, size, self._at)
        self._at += len(part)
        self._left -= len(part)
        return part


class ElfFile:
    """An open ELF file of this machine's architecture; ``fd`` stays the caller's."""

    def __init__(self, fd: int, path: str, *, machine: str | None = None) -> None:
        self.fd = self._fd = fd
        self.path = path
        self.size = os.fstat(fd).st_size
        self.read(0, 64, "ELF header")
        # Here, not above: 3 MB and 20 ms that an agent without libraries can do without.
        from elftools.common.utils import struct_parse
        from elftools.elf.elffile import ELFFile

        self._struct_parse = struct_parse
        # To the library's annotations only a full IO is a stream.
        self._stream = cast("IO[bytes]", _Stream(fd, self.size))
        self._file: Any = self._parsed("not an ELF file", partial(ELFFile, self._stream))
        self.architecture = machine or platform.machine()
        self._check(self.architecture)
        self.sections = [self._section(header) for header in self._section_headers()]
        self.segments = [self._segment(header) for header in self._segment_headers()]
        self._text = [s for s in self.segments if s.type == "PT_LOAD" and s.flags & 1]
        if not self._text:
            raise self.error("has no executable segment")

    def error(self, what: str) -> ElfError:
        return ElfError(f"{self.path}: {what}")

    def _parsed(self, what: str, parse: Callable[[], _T]) -> _T:
        """What the library makes of the file. It answers nonsense with whatever comes up."""
        try:
            return parse()
        except Exception as error:
            raise self.error(f"{what}: {error or type(error).__name__}") from error

    def _check(self, machine: str) -> None:
        file = self._file
        if file.elfclass != 64 or not file.little_endian:
            raise self.error("not a 64-bit little-endian ELF file")
        found = file["e_machine"]
        if found != _MACHINES.get(machine):
            name = str(found).removeprefix("EM_").lower()
            raise self.error(f"built for architecture {name}, this machine is {machine}")
        if file["e_phnum"] and file["e_phentsize"] != _SEGMENT_BYTES:
            raise self.error(f"program headers of {file['e_phentsize']} bytes instead of 56")
        if file["e_shoff"] and file["e_shentsize"] != _SECTION_BYTES:
            raise self.error(f"section headers of {file['e_shentsize']} bytes instead of 64")

    def bounded(self, number: int, limit: int, what: str) -> int:
        """The number, or ElfError where it is more than is looked at."""
        if number > limit:
            raise self.error(f"claims {number} {what}, more than the {limit} that are looked at")
        return number

    def _section_headers(self) -> Iterator[Any]:
        # Not through the library's section objects: making one reads its name and contents.
        if self._file["e_shoff"]:
            self._within(self._file["e_shoff"], _SECTION_BYTES, "section headers")
        # Counts in section 0 where e_shnum is too small for it.
        number = self._parsed("section headers", self._file.num_sections)
        return self._headers(
            self._file.structs.Elf_Shdr,
            self._file["e_shoff"],
            self.bounded(number, MAX_SECTIONS, "sections"),
            _SECTION_BYTES,
            "section headers",
        )

    def _segment_headers(self) -> Iterator[Any]:
        number = self._file["e_phnum"]
        if number == _PN_XNUM:
            number = self._extended_segments()
        return self._headers(
            self._file.structs.Elf_Phdr,
            self._file["e_phoff"],
            self.bounded(number, MAX_SEGMENTS, "segments"),
            _SEGMENT_BYTES,
            "program headers",
        )

    def _extended_segments(self) -> int:
        if not self.sections:
            raise self.error("has its number of segments in a section that it has not")
        struct, at = self._file.structs.Elf_Shdr, self._file["e_shoff"]
        header = self._parsed("section headers", partial(self._at, struct, at))
        return int(header["sh_info"])

    def _headers(self, struct: Any, at: int, count: int, size: int, what: str) -> Iterator[Any]:
        # In one piece: over the file, the library reads each field by itself.
        table = io.BytesIO(self.read(at, count * size, what))
        for place in range(0, count * size, size):
            yield self._parsed(what, partial(self._struct_parse, struct, table, place))

    def _at(self, struct: Any, place: int) -> Any:
        return self._struct_parse(struct, self._stream, stream_pos=place)

    @staticmethod
    def _section(header: Any) -> Section:
        return Section(
            header["sh_type"],
            header["sh_flags"],
            header["sh_offset"],
            header["sh_size"],
            header["sh_link"],
            header["sh_entsize"],
            header["sh_addr"],
        )

    @staticmethod
    def _segment(header: Any) -> Segment:
        return Segment(
            header["p_type"],
            header["p_flags"],
            header["p_offset"],
            header["p_vaddr"],
            header["p_filesz"],
        )

    def _within(self, offset: int, size: int, what: str) -> None:
        if offset < 0 or size < 0 or offset > MAX_FILE or offset + size > self.size:
            raise self.error(f"{what} at {offset} (+{size}) is outside the file ({self.size})")

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Exactly ``size`` bytes, or ElfError."""
        self._within(offset, size, what)
        parts = []
        while size:
            try:
                part = os.pread(self._fd, min(size, 16 << 20), offset)
            except OSError as error:
                raise self.error(f"{what}: {error.strerror}") from error
            if not part:
                raise self.error(f"{what}: the file became shorter while it was read")
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)

    def file_offset(self, address: int, *, data: bool = False) -> int:
        """Of a virtual address in an executable segment, or in any that is loaded where ``data``;
        ElfError outside."""
        loaded = [segment for segment in self.segments if segment.type == "PT_LOAD"]
        for segment in loaded if data else self._text:
            if segment.address <= address < segment.address + segment.file_size:
                offset = address - segment.address + segment.offset
                if offset >= self.size:
                    raise self.error(f"address {address:#x} is behind the end of the file")
                return offset
        raise self.error(f"address {address:#x} is in no {'' if data else 'executable '}segment")

    def sections_named(self, names: Collection[str]) -> dict[str, Section]:
        """The first section of each of the names."""
        table = self._file["e_shstrndx"]
        if not 0 < table < len(self.sections):
            return {}
        names_at = self.sections[table]
        text = self.read(names_at.offset, self.bounded(names_at.size, _MAX_NAMES, "bytes of names"),
                         "section names")  # fmt: skip
        raw = self.read(self._file["e_shoff"], len(self.sections) * _SECTION_BYTES, "sections")
        found: dict[str, Section] = {}
        for number, section in enumerate(self.sections):
            at = int.from_bytes(raw[number * _SECTION_BYTES :][:4], "little")
            name = text[at : at + 32].split(b"\0", 1)[0].decode("ascii", "replace")
            if name in names:
                found.setdefault(name, section)
        return found

    def build_id(self) -> str:
        """Lower-case hex; empty if there is none, or if the notes make no sense."""
        places = [(s.offset, s.file_size) for s in self.segments if s.type == "PT_NOTE"]
        places += [(s.offset, s.size) for s in self.sections if s.type == "SHT_NOTE"]
        for offset, size in places:
            if size > _MAX_NOTES or offset + size > self.size:
                continue
            try:
                found = self._parsed("notes", partial(self._build_id, offset, size))
            except ElfError:
                continue
            if found:
                return found
        return ""

    def _build_id(self, offset: int, size: int) -> str:
        from elftools.elf.notes import iter_notes

        for note in iter_notes(self._file, offset, size):
            if note["n_type"] == "NT_GNU_BUILD_ID" and 0 < note["n_descsz"] <= 64:
                return str(note["n_desc"])
        return ""
