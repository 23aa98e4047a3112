"""Machine code at a probe site: what the kernel does with its first instruction, and where in a
function a probe is cheapest. Needs capstone, which is imported at the first use."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_MAX_STEPS = 8  # instructions past the entry that a site may lie
_MIN_FIELD = 0x1000  # ncclComm's identity lies behind larger members in every release


@dataclass(frozen=True)
class Place:
    """Where to probe a function: bytes past its entry, whether the kernel need not single-step
    there (None: unknown), and the instruction in words. ``refused``: the kernel takes no probe at
    its entry, and behind it arguments may be others."""

    skip: int
    cheap: bool | None
    instruction: str
    refused: bool = False


@lru_cache(maxsize=1)
def _disassembler() -> Any:
    import capstone

    engine = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    engine.detail = True
    return engine


def _instructions(code: bytes, address: int) -> Iterator[Any]:
    yield from _disassembler().disasm(code, address)


# What arch/x86/kernel/uprobes.c emulates since 5.15: pushes of registers, nops of one byte,
# relative jumps, calls and conditional jumps. Anything else is copied out and single-stepped,
# which costs ten times as much. (Later kernels emulate more; then the verdict is too careful.)
def _emulated(instruction: Any) -> bool:
    name = instruction.mnemonic
    if name == "push":
        return len(instruction.operands) == 1 and instruction.operands[0].type == 1
    if name == "nop":
        return bool(instruction.bytes[-1] == 0x90)
    if name in ("jmp", "call") or (name.startswith("j") and name not in ("jcxz", "jecxz", "jrcxz")):
        return bool(instruction.operands[0].type == 2)
    return False


_ARGUMENTS = {"rdi", "rsi", "rdx", "rcx", "r8", "r9", "rsp"}


def _harmless(instruction: Any) -> bool:
    """Whether arguments and stack pointer are the same behind it and control goes straight on."""
    name = instruction.mnemonic
    if name in ("endbr64", "nop"):
        return True
    if name not in ("cmp", "test", "mov", "lea", "xor", "sub", "and", "movzx", "movsxd"):
        return False
    _, written = instruction.regs_access()
    for register in written:
        if _full_name(instruction.reg_name(register)) in _ARGUMENTS:
            return False
    # A store might hit the stack arguments; only what writes registers or flags passes.
    first = instruction.operands[0] if instruction.operands else None
    return name in ("cmp", "test") or (first is not None and first.type == 1)


_NARROW = {"di": "rdi", "si": "rsi", "dx": "rdx", "cx": "rcx", "sp": "rsp"}


def _full_name(register: str) -> str:
    if register in ("edi", "esi", "edx", "ecx", "esp"):
        return "r" + register[1:]
    if register in ("dil", "sil", "dl", "cl", "dh", "ch", "spl"):
        return {"d": "rd", "s": "rs", "c": "rc"}[register[0]] + {
            "dil": "i",
            "sil": "i",
            "dl": "x",
            "cl": "x",
            "dh": "x",
            "ch": "x",
            "spl": "p",
        }[register]
    if register in _NARROW:
        return _NARROW[register]
    return register.rstrip("dwb") if register.startswith(("r8", "r9")) else register


def _targets(code: bytes, address: int) -> set[int]:
    """Addresses inside the function that its own jumps go to."""
    return {
        instruction.operands[0].imm
        for instruction in _instructions(code, address)
        if instruction.mnemonic.startswith("j") and instruction.operands[0].type == 2
    }


# What arch/arm64/kernel/probes simulates in every release, as (mask, value): b and bl, cbz and
# cbnz, tbz and tbnz, b.cond, br, blr and ret, adr and adrp. The rest is stepped out of line, stp,
# paciasp and bti too; what newer releases add (nop) is not counted on. Loads of a literal are
# refused since 6.12 and its back-ports.
_SIMULATED_ON_ARM = (
    (0x7C000000, 0x14000000),
    (0x7E000000, 0x34000000),
    (0x7E000000, 0x36000000),
    (0xFF000010, 0x54000000),
    (0xFF9FFC1F, 0xD61F0000),
    (0x1F000000, 0x10000000),
)


def _site_on_arm(code: bytes, address: int) -> Place:
    """The entry: behind paciasp a return probe would meet a signed return address. Only loads of a
    literal into what is no argument are passed over; other literals cannot be probed."""
    words = [int.from_bytes(code[at : at + 4], "little") for at in range(0, len(code) & ~3, 4)]
    at = 0
    while at < min(len(words), _MAX_STEPS) and _loads_literal(words[at]):
        if not _spares_arguments(words[at]):
            return Place(0, None, _arm_text(code, address, 0), refused=True)
        at += 1
    if at == len(words):
        return Place(0, None, "")
    if at and (_loads_literal(words[at]) or _arm_targets(words) & set(range(1, at + 1))):
        return Place(0, None, _arm_text(code, address, 0), refused=True)
    simulated = any(words[at] & mask == value for mask, value in _SIMULATED_ON_ARM)
    text = _arm_text(code, address, 4 * at)
    return Place(4 * at, simulated if text else None, text)


def _loads_literal(word: int) -> bool:
    return word & 0x3B000000 == 0x18000000


def _spares_arguments(word: int) -> bool:
    """Of a load of a literal: it writes none of x0 to x8 and no return address. Floating-point
    registers hold no argument that is read; 0xD8 at the top is a prefetch."""
    target = word & 31
    return bool(word & 1 << 26) or word >> 24 == 0xD8 or 9 <= target <= 29


def _arm_targets(words: list[int]) -> set[int]:
    """Instructions, by number, that jumps among them go to."""
    found = set()
    for number, word in enumerate(words):
        for mask, value, bits, shift in (
            (0x7C000000, 0x14000000, 26, 0),
            (0x7E000000, 0x34000000, 19, 5),
            (0x7E000000, 0x36000000, 14, 5),
            (0xFF000010, 0x54000000, 19, 5),
        ):
            if word & mask == value:
                distance = word >> shift & (1 << bits) - 1
                found.add(number + distance - (distance >> bits - 1 << bits))
    return found


def _arm_text(code: bytes, address: int, at: int) -> str:
    import capstone

    engine = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    return next(map(_text, engine.disasm(code[at : at + 4], address + at)), "")


def choose_site(code: bytes, address: int, *, machine: str | None = None) -> Place:
    """The cheapest place at or shortly after a function's entry where arguments and stack pointer
    still are as at the entry. ``code``: the function's first bytes."""
    machine = machine or platform.machine()
    if machine == "aarch64":
        return _site_on_arm(code, address)
    if machine != "x86_64":
        return Place(0, None, "")
    first: Any = None
    skipped: list[Any] = []
    for instruction in _instructions(code[:64], address):
        if first is None:
            first = instruction
        if _emulated(instruction):
            skip = instruction.address - address
            if skip and _targets(code, address) & set(range(address + 1, address + skip + 1)):
                break  # a jump of the function's own comes back here: the site would count twice
            return Place(skip, True, _text(instruction))
        skipped.append(instruction)
        if len(skipped) > _MAX_STEPS or not _harmless(instruction):
            break
    if first is None:
        return Place(0, None, "")
    return Place(0, False, _text(first))


def _text(instruction: Any) -> str:
    return f"{instruction.mnemonic} {instruction.op_str}".strip()


def field_offset(code: bytes, address: int) -> int | None:
    """Displacement of the one 32-bit load from far inside a struct that a getter consists of."""
    found = set()
    for instruction in _instructions(code, address):
        if instruction.mnemonic != "mov" or len(instruction.operands) != 2:
            continue
        target, source = instruction.operands
        loads = target.type == 1 and target.size == 4 and source.type == 3
        if loads and source.mem.base and not source.mem.index:
            base = instruction.reg_name(source.mem.base)
            if base != "rip" and source.mem.disp >= _MIN_FIELD:
                found.add(int(source.mem.disp))
        # Not until the first `ret`: compilers put the path that loads the field behind it.
    return found.pop() if len(found) == 1 else None


def called(code: bytes, address: int) -> set[int]:
    """Addresses that a function calls or jumps to directly, outside itself."""
    return {
        instruction.operands[0].imm
        for instruction in _instructions(code, address)
        if instruction.mnemonic in ("call", "jmp") and instruction.operands[0].type == 2
    } - set(range(address, address + len(code)))


def stored_version(code: bytes, address: int) -> int | None:
    """The one constant that ncclGetVersion(int *) stores, if it looks like a version code."""
    found = set()
    for instruction in _instructions(code, address):
        if instruction.mnemonic != "mov" or len(instruction.operands) != 2:
            continue
        target, source = instruction.operands
        stores = target.type == 3 and target.size == 4 and source.type == 2
        if stores and 2000 <= source.imm <= 99999:
            found.add(int(source.imm))
    return found.pop() if len(found) == 1 else None


def gloo_rank_offset(code: bytes, address: int) -> int | None:
    """Where the constructor gloo::Context(this, rank, size, base) puts rank: 0, or 8 behind a
    virtual table. Told by the store of rank itself, or of base, which lies 8 behind it and is
    not vectorised together with size."""
    for instruction in _instructions(code, address):
        if instruction.mnemonic != "mov" or len(instruction.operands) != 2:
            continue
        target, source = instruction.operands
        if target.type != 3 or source.type != 1:
            continue
        if instruction.reg_name(target.mem.base) != "rdi":
            continue
        behind = {"esi": 0, "ecx": 8}.get(instruction.reg_name(source.reg))
        if behind is not None and target.mem.disp - behind in (0, 8):
            return int(target.mem.disp - behind)
    return None


def backend_offsets(code: bytes, address: int) -> tuple[int, int] | None:
    """Where the constructor c10d::Backend(this, int rank, int size) puts rank and size, by its two
    stores before it calls anything."""
    found: dict[str, set[int]] = {"esi": set(), "edx": set()}
    for instruction in _instructions(code, address):
        if instruction.mnemonic == "call":
            break
        if instruction.mnemonic != "mov" or len(instruction.operands) != 2:
            continue
        target, source = instruction.operands
        if target.type == 3 and source.type == 1 and not target.mem.index:
            register = instruction.reg_name(source.reg)
            if register in found and instruction.reg_name(target.mem.base) == "rdi":
                found[register].add(int(target.mem.disp))
    rank, size = found["esi"], found["edx"]
    if len(rank) != 1 or len(size) != 1 or rank == size:
        return None
    return rank.pop(), size.pop()
