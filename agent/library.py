"""What a library file is and where it would be probed. Places nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lanterne.probes import catalog, deepep, parcagpu, splits
from lanterne.probes.nccl_profiler.usdt import PROVIDER

from . import amd_rccl, code, libnccl, usdt
from .elf import ElfFile
from .errors import ElfError
from .libnccl import CommOffsets
from .symbols import Symbol, code_of, functions, matching


@dataclass(frozen=True)
class Site:
    """One probed place: catalog row, symbol, offset in the file, and what stands there. ``cheap``:
    the kernel emulates the instruction (None: unknown). ``derived``: the row where it is not one
    of the catalog's (``row`` is 0 then). ``semaphore``: its offset in the file; 0: none. ``skip``:
    bytes past the function's entry."""

    row: int
    symbol: str
    offset: int
    cheap: bool | None
    first_instruction: str
    derived: catalog.Row | None = None
    semaphore: int = 0
    skip: int = 0

    @property
    def what(self) -> catalog.Row:
        return self.derived or catalog.BY_ID[self.row]


@dataclass(frozen=True)
class AttachedLibrary:
    """``path`` as the first process saw it, ``host_path`` as the agent opened it. ``state``:
    attached, failed or nothing_to_probe; ``error`` says why. ``dropped``: functions that are left
    out, and why."""

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
    dropped: tuple[str, ...] = ()


def failed(path: str, host_path: str, kind: str, error: str) -> AttachedLibrary:
    return AttachedLibrary(path, host_path, kind, "", None, None, (), "failed", error)


def examine(fd: int, kind: str, path: str, host_path: str) -> AttachedLibrary:
    """The library behind an open descriptor, which stays the caller's. Raises ElfError."""
    library = catalog.Library(kind)
    file = ElfFile(fd, path)
    if library is catalog.Library.PROFILER:
        return _profiler(file, path, host_path)
    if library is catalog.Library.PARCAGPU:
        return _parcagpu(file, path, host_path)
    exported, local = catalog.symbols(library)
    nccl = library is catalog.Library.NCCL
    if library is catalog.Library.GLOO:
        exported |= {*splits.symbols(library), splits.CONSTRUCTOR}
    else:  # a framework may have linked its NCCL statically
        exported |= {*splits.symbols(catalog.Library.TORCH)}
    if nccl:
        exported |= {*libnccl.GETTERS, libnccl.VERSION_GETTER}
    amd = nccl and amd_rccl.is_one(file)
    symbols = _functions(file, amd_rccl.names(exported) if amd else exported, local, nccl)
    symbols = amd_rccl.strong(symbols) if amd else symbols
    dropped = _refused(file, symbols)
    probed = {name: symbol for name, symbol in symbols.items() if name not in dropped}
    rows = catalog.select(library, probed, gloo_rank_offset=_gloo_rank_offset(file, symbols))
    if amd:
        rows = amd_rccl.rows(file, rows, symbols)
    if library is catalog.Library.DEEPEP:
        launchers = matching(file, deepep.PATTERN)
        symbols |= launchers
        rows += tuple(row for row in map(deepep.derive, launchers) if row)
    if library is catalog.Library.GLOO:
        rows += _gloo_splits(file, probed)
    else:
        rows += tuple(map(splits.row, splits.select(catalog.Library.TORCH, probed)))
    sites = tuple(_site(file, row, symbols[row.symbol]) for row in rows)
    if nccl and not sites:
        _complain_if_stripped(file)
    version = libnccl.version_of(file, symbols) if nccl else None
    return AttachedLibrary(
        path=path,
        host_path=host_path,
        kind=kind,
        build_id=file.build_id(),
        nccl_version=version,
        comm_offsets=libnccl.comm_offsets(file, symbols, version, amd=amd) if nccl else None,
        sites=sites,
        state="attached" if sites else "nothing_to_probe",
        error="" if sites else f"none of the functions that Lanterne knows is in {path}",
        dropped=tuple(dropped.values()),
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
    missing = f"{path} is a profiler plugin without Lanterne's probes"
    return _notes(file, path, host_path, "profiler", sites, missing)


def _parcagpu(file: ElfFile, path: str, host_path: str) -> AttachedLibrary:
    """Both probes, or none: one without the other tells nothing that can be relied on."""
    found = usdt.probes(file, parcagpu.PROVIDER)
    rows: list[tuple[usdt.Probe, catalog.Row]] = []
    for probe in found:
        if probe.name == parcagpu.CORRELATION:
            rows.append((probe, parcagpu.correlation()))
        elif probe.name == parcagpu.EXECUTED:
            where = usdt.operands(file, probe)
            if len(where) != parcagpu.ARGUMENTS:
                raise ElfError(
                    f"{path}: {probe.name} has {len(where)} arguments, not {parcagpu.ARGUMENTS}: "
                    "another version of parcagpu than the agent knows"
                )
            rows.append((probe, parcagpu.executed(where)))
    if len({row.program for _, row in rows}) < 2:
        rows = []
    sites = []
    for probe, row in rows:
        place = code.choose_site(file.read(probe.offset, 16, "probe"), probe.address)
        sites.append(
            Site(0, row.symbol, probe.offset, place.cheap, place.instruction, row, probe.semaphore)
        )
    missing = f"{path} has no probes {parcagpu.CORRELATION} and {parcagpu.EXECUTED}"
    return _notes(file, path, host_path, "parcagpu", tuple(sites), missing)


def _notes(
    file: ElfFile, path: str, host_path: str, kind: str, sites: tuple[Site, ...], missing: str
) -> AttachedLibrary:
    """A library that is probed by its notes alone. ``missing``: what to say where none are."""
    return AttachedLibrary(
        path=path,
        host_path=host_path,
        kind=kind,
        build_id=file.build_id(),
        nccl_version=None,
        comm_offsets=None,
        sites=sites,
        state="attached" if sites else "nothing_to_probe",
        error="" if sites else missing,
    )


def _gloo_splits(file: ElfFile, symbols: Mapping[str, Symbol]) -> tuple[catalog.Row, ...]:
    constructor = symbols.get(splits.CONSTRUCTOR)
    names = splits.select(catalog.Library.GLOO, symbols)
    if constructor is None or os.uname().machine != "x86_64":
        return ()
    offsets = code.backend_offsets(code_of(file, constructor), constructor.address)
    return tuple(splits.row(name, offsets) for name in names) if offsets else ()


def _gloo_rank_offset(file: ElfFile, symbols: Mapping[str, Symbol]) -> int | None:
    constructor = symbols.get(catalog.GLOO_CONSTRUCTOR)
    if constructor is None or os.uname().machine != "x86_64":
        return None
    return code.gloo_rank_offset(code_of(file, constructor), constructor.address)


def _functions(
    file: ElfFile, exported: Collection[str], local: Collection[str], nccl: bool
) -> dict[str, Symbol]:
    try:
        return functions(file, exported, local)
    except ElfError:
        if nccl:
            _complain_if_stripped(file)
        raise


def _complain_if_stripped(file: ElfFile) -> None:
    """Raises ElfError where an NCCL is in the file that has no names any more."""
    try:
        version = libnccl.linked_version(file)
    except ElfError:
        return  # the first error is the better one
    if version is not None:
        raise file.error(
            f"static NCCL without symbols ({'.'.join(map(str, version))}): its calls cannot be "
            "seen; ship the program with its symbol table, or link libnccl dynamically"
        )


def _refused(file: ElfFile, symbols: Mapping[str, Symbol]) -> dict[str, str]:
    """Functions that cannot be probed, with the reason: one of them would fail a whole link. Where
    it is ncclEnqueueCheck, the exported functions are probed instead."""
    if os.uname().machine != "aarch64":
        return {}
    found = {}
    for name, symbol in symbols.items():
        place = code.choose_site(code_of(file, symbol, 4096), symbol.address)
        if place.refused:
            found[name] = f"{name}: the kernel takes no probe at its first instruction, " + (
                place.instruction
            )
    return found


def _site(file: ElfFile, row: catalog.Row, symbol: Symbol) -> Site:
    place = code.choose_site(code_of(file, symbol, 4096), symbol.address)
    return Site(
        row.id,
        row.symbol,
        symbol.offset + place.skip,
        place.cheap,
        place.instruction,
        None if row.id else row,
        skip=place.skip,
    )
