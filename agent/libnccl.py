"""Of a libnccl file: its version, and where its struct ncclComm keeps the identity."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lanterne.probes import rccl

from . import code, dwarf
from .elf import ElfFile, Section
from .errors import ElfError
from .symbols import Symbol, code_of

VERSION_GETTER = "pncclGetVersion"
GETTERS = ("pncclCommUserRank", "pncclCommCount", "pncclCommCuDevice")
_MEMBERS = ("commHash", "rank", "nRanks", "cudaDev", "busId")
_MAX_OFFSET = 64 << 20
_GETTER_BYTES = 4096  # whole functions: tracing and error paths come before the load
_FIRST_WITH_HASH = 21800
_FIRST_WITH_MAGIC = 22100
_VERSION = re.compile(rb"NCCL version (\d{1,2})\.(\d{1,2})\.(\d{1,3})")
# As the library itself says it; messages of others name versions, too.
_OWN_VERSION = re.compile(rb"NCCL version (\d{1,2})\.(\d{1,2})\.(\d{1,3})\+cuda\d")
DEVICE_CODE = ".nv_fatbin"  # section of a file with CUDA kernels linked in
_VERSION_CHUNK = 4 << 20
_MAX_SECTION_BYTES = 64 << 20  # device code is larger, and holds no such text
_MAX_SEARCHED_BYTES = 128 << 20
_SHF_WRITE, _SHF_ALLOC = 1, 2


@dataclass(frozen=True)
class CommOffsets:
    """Where ncclComm keeps its identity, in bytes; ``source``: "build_id", "getters" or "dwarf"."""

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


def comm_offsets(
    file: ElfFile, symbols: Mapping[str, Symbol], version: int | None, *, amd: bool = False
) -> CommOffsets | None:
    """From the build-id table, else from the machine code of the exported getters, else from the
    debugging information, else None. ``amd``: it is RCCL. Before 2.18 a communicator keeps no hash,
    and something else lies where it would be."""
    if version is not None and version < _FIRST_WITH_HASH:
        return None
    rank = _RANK_BY_BUILD_ID.get(file.build_id()[:8])
    if rank is not None:
        return _around(rank, rank != 9176, "build_id")
    return _from_getters(file, symbols, version, amd) or _from_dwarf(file)


def _from_getters(
    file: ElfFile, symbols: Mapping[str, Symbol], version: int | None, amd: bool
) -> CommOffsets | None:
    if platform.machine() != "x86_64" or any(name not in symbols for name in GETTERS):
        return None
    offsets = [
        code.field_offset(code_of(file, symbols[name], _GETTER_BYTES), symbols[name].address)
        for name in GETTERS
    ]
    rank, n_ranks, cuda_dev = offsets
    if rank is None or n_ranks != rank + 4 or cuda_dev != rank + 8:
        return None
    found = _around(rank, version is None or version >= _FIRST_WITH_MAGIC, "getters")
    nearer = amd and version is not None and version < rccl.BUS_ID_NEARER_UNTIL
    return replace(found, bus_id=rank + 24) if nearer else found


def _from_dwarf(file: ElfFile) -> CommOffsets | None:
    try:
        members = dwarf.member_offsets(file, "ncclComm")
    except ElfError:
        return None
    if any(not 0 <= members.get(name, -1) <= _MAX_OFFSET for name in _MEMBERS):
        return None
    comm_hash, rank, n_ranks, cuda_dev, bus_id = (members[name] for name in _MEMBERS)
    magic = "startMagic" in members
    return CommOffsets(comm_hash, rank, n_ranks, cuda_dev, bus_id, magic, "dwarf")


def _around(rank: int, has_magic: bool, source: str) -> CommOffsets:
    return CommOffsets(rank - 8, rank, rank + 4, rank + 8, rank + 32, has_magic, source)


def version_of(file: ElfFile, symbols: Mapping[str, Symbol]) -> int | None:
    """NCCL's version code, e.g. 22809: what ncclGetVersion stores, else from the text
    "NCCL version X.Y.Z" in the file's data."""
    getter = symbols.get(VERSION_GETTER)
    if getter is not None and platform.machine() == "x86_64":
        stored = code.stored_version(code_of(file, getter), getter.address)
        if stored is not None:
            return stored
    found = _text_version(file, _VERSION)
    return version_code(*found) if found else None


def linked_version(file: ElfFile) -> tuple[int, ...] | None:
    """Of an NCCL that is in the file without names: its text "NCCL version X.Y.Z+cuda...", in a
    file with CUDA kernels."""
    if not file.sections_named((DEVICE_CODE,)):
        return None
    return _text_version(file, _OWN_VERSION)


def data_sections(file: ElfFile) -> list[Section]:
    """Those in which texts are, bounded: a file made to harm may claim thousands over the same
    bytes. Device code is left out."""
    device_code = file.sections_named((DEVICE_CODE,)).get(DEVICE_CODE)
    chosen, left = [], _MAX_SEARCHED_BYTES
    for section in file.sections:
        if (
            section.type == "SHT_PROGBITS"
            and section.flags & (_SHF_ALLOC | _SHF_WRITE) == _SHF_ALLOC
            and 0 < section.size <= _MAX_SECTION_BYTES
            and section != device_code
        ):
            left -= section.size
            if left < 0:
                break
            chosen.append(section)
    return chosen


def _text_version(file: ElfFile, pattern: re.Pattern[bytes]) -> tuple[int, ...] | None:
    for section in data_sections(file):
        found = _search_version(file, section.offset, section.size, pattern)
        if found is not None:
            return found
    return None


def _search_version(
    file: ElfFile, offset: int, size: int, pattern: re.Pattern[bytes]
) -> tuple[int, ...] | None:
    end = offset + size
    while offset < end:
        length = min(_VERSION_CHUNK, end - offset)
        match = pattern.search(file.read(offset, length, "data"))
        if match:
            return tuple(int(part) for part in match.groups())
        if length < _VERSION_CHUNK:
            return None
        offset += length - 63  # the text may lie across the cut
    return None


def version_code(major: int, minor: int, patch: int) -> int:
    """As NCCL_VERSION: 2809 style up to 2.8, then 22809 style."""
    if major < 2 or (major == 2 and minor <= 8):
        return major * 1000 + minor * 100 + patch
    return major * 10000 + minor * 100 + patch
