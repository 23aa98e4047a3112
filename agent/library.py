"""What a library file is and where it would be probed. Places nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lanterne.probes import catalog, deepep
from lanterne.probes.nccl_profiler.usdt import PROVIDER

from . import code, libnccl, usdt
from .elf import ElfFile
from .libnccl import CommOffsets
from .symbols import Symbol, code_of, functions, matching


@dataclass(frozen=True)
class Site:
    """One probed place: catalog row, symbol, offset in the file, and what stands there. ``cheap``:
    the kernel emulates the instruction (None: unknown). ``derived``: the row where it is not one
    of the catalog's (``row`` is 0 then). ``semaphore``: its offset in the file; 0: none."""

    row: int
    symbol: str
    offset: int
    cheap: bool | None
    first_instruction: str
    derived: catalog.Row | None = None
    semaphore: int = 0

    @property
    def what(self) -> catalog.Row:
        return self.derived or catalog.BY_ID[self.row]


@dataclass(frozen=True)
class AttachedLibrary:
    """``path`` as the first process saw it, ``host_path`` as the agent opened it. ``state``:
    attached, failed or nothing_to_probe; ``error`` says why."""

    path: str
    host_path: str
    kind: str
    build_id: str
    nccl_version: int | None
    comm_offsets: CommOffsets | None
    sites: tuple[Site, ...]
    state: str
    error: str
    since_ns: int = 0  # CLOCK_MONOTONIC when the probes stood; 0: they do not


def failed(path: str, host_path: str, kind: str, error: str) -> AttachedLibrary:
    return AttachedLibrary(path, host_path, kind, "", None, None, (), "failed", error)


def examine(fd: int, kind: str, path: str, host_path: str) -> AttachedLibrary:
    """The library behind an open descriptor, which stays the caller's. Raises ElfError."""
    library = catalog.Library(kind)
    file = ElfFile(fd, path)
    if library is catalog.Library.PROFILER:
        return _profiler(file, path, host_path)
    exported, local = catalog.symbols(library)
    nccl = library is catalog.Library.NCCL
    if nccl:
        exported |= {*libnccl.GETTERS, libnccl.VERSION_GETTER}
    symbols = functions(file, exported, local)
    rows = catalog.select(library, symbols, gloo_rank_offset=_gloo_rank_offset(file, symbols))
    if library is catalog.Library.DEEPEP:
        launchers = matching(file, deepep.PATTERN)
        symbols |= launchers
        rows += tuple(row for row in map(deepep.derive, launchers) if row)
    sites = tuple(_site(file, row, symbols[row.symbol]) for row in rows)
    version = libnccl.version_of(file, symbols) if nccl else None
    return AttachedLibrary(
        path=path,
        host_path=host_path,
        kind=kind,
        build_id=file.build_id(),
        nccl_version=version,
        comm_offsets=libnccl.comm_offsets(file, symbols, version) if nccl else None,
        sites=sites,
        state="attached" if sites else "nothing_to_probe",
        error="" if sites else f"none of the functions that Lanterne knows is in {path}",
    )


def _profiler(file: ElfFile, path: str, host_path: str) -> AttachedLibrary:
    """The plugin's op_done; somebody else's profiler plugin has no such probe."""
    probe = next((p for p in usdt.probes(file, PROVIDER) if p.name == "op_done"), None)
    sites: tuple[Site, ...] = ()
    if probe is not None:
        usdt.check_first_argument(file, probe)
        row = catalog.OP_DONE
        place = code.choose_site(file.read(probe.offset, 16, "probe"), probe.address)
        sites = (
            Site(row.id, row.symbol, probe.offset, place.cheap, place.instruction,
                 semaphore=probe.semaphore),
        )  # fmt: skip
    return AttachedLibrary(
        path=path,
        host_path=host_path,
        kind="profiler",
        build_id=file.build_id(),
        nccl_version=None,
        comm_offsets=None,
        sites=sites,
        state="attached" if sites else "nothing_to_probe",
        error="" if sites else f"{path} is a profiler plugin without Lanterne's probes",
    )


def _gloo_rank_offset(file: ElfFile, symbols: Mapping[str, Symbol]) -> int | None:
    constructor = symbols.get(catalog.GLOO_CONSTRUCTOR)
    if constructor is None or os.uname().machine != "x86_64":
        return None
    return code.gloo_rank_offset(code_of(file, constructor), constructor.address)


def _site(file: ElfFile, row: catalog.Row, symbol: Symbol) -> Site:
    place = code.choose_site(code_of(file, symbol, 4096), symbol.address)
    return Site(
        row.id,
        row.symbol,
        symbol.offset + place.skip,
        place.cheap,
        place.instruction,
        None if row.id else row,
    )
