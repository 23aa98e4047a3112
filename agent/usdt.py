"""USDT probes of a file, from its notes: where a probe is, and the semaphore that counts tracers.

Layout of a note (SystemTap's sdt.h, version 3), behind the usual header with the name "stapsdt":
three addresses (of the probe, of .stapsdt.base when the note was written, of the semaphore), then
provider, name and arguments as C strings. A tool that moves sections later moves .stapsdt.base with
them, which tells how far. What is read is bounded, and a note that makes no sense is left out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .elf import ElfFile
from .errors import ElfError

MAX_NOTES = 1 << 20  # bytes of the section
MAX_PROBES = 4096  # of all providers
_TYPE = 3
_OWNER = b"stapsdt\0"
_FIRST_ARGUMENT = {"x86_64": ("%rdi",), "aarch64": ("x0",)}


@dataclass(frozen=True)
class Probe:
    """``offset`` and ``semaphore`` (0: none) are in the file, which is what a uprobe wants;
    ``arguments`` as the note has them: "8@%rdi 8@$96"."""

    name: str
    address: int
    offset: int
    semaphore: int
    arguments: str


def probes(file: ElfFile, provider: str) -> list[Probe]:
    """Every place of every probe of one provider, in the order of the notes."""
    sections = file.sections_named({".note.stapsdt", ".stapsdt.base"})
    notes, base = sections.get(".note.stapsdt"), sections.get(".stapsdt.base")
    if notes is None:
        return []
    size = file.bounded(notes.size, MAX_NOTES, "bytes of USDT notes")
    data = file.read(notes.offset, size, "USDT notes")
    found: list[Probe] = []
    at = 0
    for _ in range(MAX_PROBES):
        if at + 12 > len(data):
            break
        name_size, length, kind = struct.unpack_from("<III", data, at)
        body = at + 12 + (name_size + 3 & ~3)
        at = body + (length + 3 & ~3)
        if kind == _TYPE and data[body - 8 : body] == _OWNER and 24 <= length <= len(data) - body:
            probe = _probe(file, data[body : body + length], base.address if base else 0, provider)
            if probe is not None:
                found.append(probe)
    return found


def _probe(file: ElfFile, body: bytes, base: int, provider: str) -> Probe | None:
    address, was_base, semaphore = struct.unpack_from("<QQQ", body)
    texts = body[24:].split(b"\0")
    if len(texts) < 3 or texts[0] != provider.encode():
        return None
    moved = base - was_base if base else 0
    address += moved
    counted = file.file_offset(semaphore + moved, data=True) if semaphore else 0
    name, arguments = (text.decode("ascii", "replace") for text in texts[1:3])
    return Probe(name, address, file.file_offset(address), counted, arguments)


def check_first_argument(file: ElfFile, probe: Probe) -> None:
    """ElfError unless it is a whole register, the one of a function's first argument: there the BPF
    program looks for it."""
    value = probe.arguments.split(" ")[0].partition("@")[2]
    wanted = _FIRST_ARGUMENT.get(file.architecture, ())
    if value not in wanted:
        raise ElfError(
            f"{file.path}: the argument of {probe.name} is in {value or 'no register'}, not in "
            f"{' or '.join(wanted) or 'a known one'}: build the plugin with gcc or clang at -O2"
        )
