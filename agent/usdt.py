"""USDT probes of a file, from its notes: where a probe is, and the semaphore that counts tracers.

Layout of a note (SystemTap's sdt.h, version 3), behind the usual header with the name "stapsdt":
three addresses (of the probe, of .stapsdt.base when the note was written, of the semaphore), then
provider, name and arguments as C strings. A tool that moves sections later moves .stapsdt.base with
them, which tells how far. What is read is bounded, and a note that makes no sense is left out.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from lanterne.probes.catalog import Source
from lanterne.probes.rows import SourceKind

from .elf import ElfFile
from .errors import ElfError

MAX_NOTES = 1 << 20  # bytes of the section
MAX_PROBES = 4096  # of all providers
_TYPE = 3
_OWNER = b"stapsdt\0"
_OPERAND = re.compile(r"-?(\d)@(.+)")
# The words of struct pt_regs, in order (arch/x86 and arch/arm64, uapi/asm/ptrace.h).
_X86_WORDS = (
    "r15", "r14", "r13", "r12", "bp", "bx", "r11", "r10", "r9", "r8", "ax", "cx", "dx", "si", "di",
    "orig_ax", "ip", "cs", "flags", "sp", "ss",
)  # fmt: skip
_X86_MEMORY = re.compile(r"(-?\d*)\(%(\w+)\)")
_ARM_MEMORY = re.compile(r"\[(\w+)(?:, ?#?(-?\d+))?\]")
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


def operands(file: ElfFile, probe: Probe) -> list[Source]:
    """Where each argument is, as the BPF programs read it: registers, what a register points to,
    and constants. ElfError where an argument is somewhere else."""
    found = []
    # Commas in "[x0, 8]" are followed by a blank, too.
    for text in re.findall(r"-?\d@(?:\[[^\]]*\]|\S+)", probe.arguments):
        source = _operand(text, file.architecture)
        if source is None:
            raise ElfError(
                f"{file.path}: argument {text} of {probe.name} cannot be read: only registers, "
                "memory at a register and constants are"
            )
        found.append(source)
    return found


def _operand(text: str, architecture: str) -> Source | None:
    match = _OPERAND.fullmatch(text)
    if match is None or int(match[1]) not in (1, 2, 4, 8):
        return None
    width, where = int(match[1]), match[2]
    arm = architecture == "aarch64"
    constant = re.fullmatch(r"#?(-?\d+)" if arm else r"\$(-?\d+)", where)
    if constant is not None:
        value = int(constant[1])
        fits = -(1 << 31) <= value < 1 << 31
        return Source(SourceKind.CONSTANT, 0, width, value) if fits else None
    memory = (_ARM_MEMORY if arm else _X86_MEMORY).fullmatch(where)
    if memory is not None:
        name, offset = (memory[1], memory[2]) if arm else (memory[2], memory[1])
        word = _word(name, arm)
        displacement = 0 if not offset or offset == "-" else int(offset)
        if word is None or offset == "-" or not -(1 << 31) <= displacement < 1 << 31:
            return None
        return Source(SourceKind.WORD_MEMORY, word, width, displacement)
    word = _word(where if arm else where.removeprefix("%"), arm)
    if word is None or (not arm and not where.startswith("%")):
        return None
    return Source(SourceKind.WORD, word, width)


def _word(name: str, arm: bool) -> int | None:
    """Number of the word of struct pt_regs that holds a register, by any of its names."""
    if arm:
        number = re.fullmatch(r"[xw](\d+)", name)
        if name == "sp":
            return 31
        return int(number[1]) if number and int(number[1]) < 31 else None
    bare = re.sub(r"^(r\d+)[dwb]$", r"\1", name)  # r8d, r8w, r8b
    if not re.fullmatch(r"r\d+", bare):
        bare = re.sub(r"^[re](?=[a-z]{2}$)", "", bare)  # rax, eax
        if re.fullmatch(r"[a-d]l", bare):
            bare = bare[0] + "x"
        bare = {"sil": "si", "dil": "di", "bpl": "bp", "spl": "sp"}.get(bare, bare)
    return _X86_WORDS.index(bare) if bare in _X86_WORDS else None
