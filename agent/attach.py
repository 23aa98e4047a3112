"""Attaches the programs to every library that a process maps, once per inode.

An attach covers all processes, present and future, that map the inode. It is all or nothing: a
probe that cannot be placed takes back those placed before it, and a library counts as attached
only when its last link stands. The kernel removes the probes when the agent ends, however it ends.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

from lanterne.probes import catalog

from . import bpf, code, elf
from .discover import Discovery, Key, Mapped, ProcessInfo, ways_to_open
from .elf import CommOffsets, ElfFile, Symbol
from .errors import AttachError, ElfError
from .kernel import Programs

__all__ = ["AttachedLibrary", "Attacher", "CommOffsets", "ProcessInfo", "Scan", "Site"]

MAX_LIBRARIES = 256
_GRACE_SCANS = 10  # scans that a library stays attached after its last process has gone
_RETRY_SCANS = 30  # scans until a failed library is tried again
_SWEEP_SHARE = 0.25  # share of thread slots in use from which dead threads are looked for


@dataclass(frozen=True)
class Site:
    """One probed place: catalog row, symbol, offset in the file, and what stands there. ``cheap``:
    the kernel emulates the instruction (None: unknown)."""

    row: int
    symbol: str
    offset: int
    cheap: bool | None
    first_instruction: str


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


@dataclass(frozen=True)
class Scan:
    """What one scan has changed. ``failed``: messages, each once per library and try."""

    new_libraries: tuple[AttachedLibrary, ...]
    gone_pids: tuple[int, ...]
    failed: tuple[str, ...]


class Links:
    """The links of one library; closing them removes the probes."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._fds: list[int] = []

    def add(self, path: str, sites: Sequence[Site]) -> None:
        """Places all probes or none; raises AttachError."""
        try:
            for function, at_return, chosen in _by_function(sites):
                if self._programs.method == "multi":
                    self._add_multi(path, function, chosen, at_return)
                else:
                    self._add_perf(path, function, chosen, at_return)
        except OSError as error:
            self.close()
            raise AttachError(
                f"{path}: probes could not be placed: {error.strerror or error}"
            ) from error
        except BaseException:
            self.close()
            raise

    def _add_multi(self, path: str, function: str, sites: Sequence[Site], at_return: bool) -> None:
        self._fds.append(
            bpf.link_uprobes(
                self._programs.program(function),
                path,
                [site.offset for site in sites],
                [site.row for site in sites],
                at_return=at_return,
            )
        )

    def _add_perf(self, path: str, function: str, sites: Sequence[Site], at_return: bool) -> None:
        kind, return_bit = _uprobe_pmu()
        for site in sites:
            event = bpf.open_uprobe(kind, return_bit if at_return else 0, path, site.offset)
            self._fds.append(event)
            self._fds.append(bpf.link_perf_event(self._programs.program(function), event, site.row))

    def close(self) -> None:
        # The newest first, so that no entry is seen whose return would not be.
        while self._fds:
            os.close(self._fds.pop())


def _by_function(sites: Sequence[Site]) -> list[tuple[str, bool, list[Site]]]:
    """(BPF function, at return, its sites): returns before entries, so that an entry that is
    seen has a return that is seen."""
    returns: dict[str, list[Site]] = {}
    entries: dict[str, list[Site]] = {}
    for site in sites:
        entry, at_return = catalog.PROGRAMS[catalog.BY_ID[site.row].program]
        if entry:
            entries.setdefault(entry, []).append(site)
        if at_return:
            returns.setdefault(at_return, []).append(site)
    return [(name, True, chosen) for name, chosen in returns.items()] + [
        (name, False, chosen) for name, chosen in entries.items()
    ]


def _uprobe_pmu(sys: Path = Path("/sys")) -> tuple[int, int]:
    """(perf event type, config bit that means "at return") of the uprobe PMU."""
    folder = sys / "bus/event_source/devices/uprobe"
    kind = int((folder / "type").read_text())
    bit = (folder / "format/retprobe").read_text().strip()
    return kind, 1 << int(bit.removeprefix("config:"))


class Attacher:
    """Keeps the probes in step with what processes map. A context manager.

    Without programs it only looks: libraries then say where probes would be placed.
    """

    def __init__(
        self,
        programs: Programs | None,
        *,
        proc: Path = Path("/proc"),
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self._programs = programs
        self._proc = proc
        self._discovery = Discovery(proc, include, exclude)
        self._libraries: dict[Key, AttachedLibrary] = {}
        self._links: dict[Key, Links] = {}
        self._unused: dict[Key, int] = {}
        self._retry: dict[Key, int] = {}
        self._processes: dict[int, ProcessInfo] = {}
        self.libraries: Mapping[Key, AttachedLibrary] = MappingProxyType(self._libraries)
        self.processes: Mapping[int, ProcessInfo] = MappingProxyType(self._processes)

    def scan(self) -> Scan:
        """One pass: attaches new inodes, lets go of unused ones. One bad file harms no other."""
        found = self._discovery.scan()
        new: list[AttachedLibrary] = []
        failed: list[str] = []
        users: dict[Key, list[tuple[int, Mapped]]] = {}
        for pid, (_, mapped) in found.processes.items():
            for one in mapped:
                users.setdefault(one.key, []).append((pid, one))
        for key, by in users.items():
            library = self._consider(key, by)
            if library is not None:
                new.append(library)
                if library.state == "failed":
                    failed.append(f"{library.path}: {library.error}")
        self._release(users.keys())
        self._remember(found.processes)
        if self._programs is not None:
            if found.gone:
                self._programs.forget(found.gone)
            if self._programs.threads_used() > _SWEEP_SHARE:
                self._programs.sweep_threads(self._proc)
        return Scan(tuple(new), found.gone, tuple(failed))

    def _consider(self, key: Key, by: Sequence[tuple[int, Mapped]]) -> AttachedLibrary | None:
        """The library if it was tried now, None if it is known or could not be reached yet."""
        self._unused.pop(key, None)
        known = self._libraries.get(key)
        if known is not None:
            if known.state != "failed":
                return None
            self._retry[key] = self._retry.get(key, _RETRY_SCANS) - 1
            if self._retry[key] > 0:
                return None
            del self._retry[key]
        elif len(self._libraries) >= MAX_LIBRARIES:
            return None
        library = self._attach_from(key, by)
        self._libraries[key] = library
        return library if known is None or library != known else None

    def _attach_from(self, key: Key, by: Sequence[tuple[int, Mapped]]) -> AttachedLibrary:
        """Through the first process that lets us at the very inode."""
        reasons: list[str] = []
        _, mapped = by[0]
        for pid, one in by[:8]:
            for path in ways_to_open(self._proc, pid, one):
                try:
                    fd = elf.open_regular(path)
                except ElfError as error:
                    reasons.append(str(error))
                    continue
                try:
                    status = os.fstat(fd)
                    if not _same_file(status, one.key):
                        reasons.append(f"{path}: another file lies there now")
                        continue
                    return self._attach(key, fd, one, str(path))
                finally:
                    os.close(fd)
        return _failed(mapped, "", reasons[0] if reasons else "cannot be reached")

    def _attach(self, key: Key, fd: int, mapped: Mapped, host_path: str) -> AttachedLibrary:
        try:
            library = examine(fd, mapped.kind, mapped.path, host_path)
        except ElfError as error:
            return _failed(mapped, host_path, str(error))
        except (ValueError, IndexError, OverflowError, struct.error, MemoryError) as error:
            # A file made to harm may still trip the parser: it is reported, and the rest goes on.
            return _failed(mapped, host_path, f"cannot be read as ELF: {error!r}")
        if library.state != "attached" or self._programs is None:
            return library
        links = Links(self._programs)
        try:
            # By descriptor: the inode that was examined is the one that is probed.
            links.add(f"/proc/self/fd/{fd}", library.sites)
        except AttachError as error:
            return _failed(mapped, host_path, str(error))
        self._links[key] = links
        return library

    def _release(self, used: Iterable[Key]) -> None:
        for key in set(self._libraries) - set(used):
            self._unused[key] = self._unused.get(key, 0) + 1
            if self._unused[key] > _GRACE_SCANS:
                self._detach(key)

    def _detach(self, key: Key) -> None:
        links = self._links.pop(key, None)
        if links is not None:
            links.close()
        self._libraries.pop(key, None)
        self._unused.pop(key, None)
        self._retry.pop(key, None)

    def _remember(self, found: Mapping[int, tuple[int, tuple[Mapped, ...]]]) -> None:
        self._processes.clear()
        for pid, (start, mapped) in found.items():
            self._processes[pid] = ProcessInfo(pid, start, tuple(one.key for one in mapped))

    def close(self) -> None:
        for key in list(self._libraries):
            self._detach(key)

    def __enter__(self) -> Attacher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _same_file(status: os.stat_result, key: Key) -> bool:
    """Overlay and btrfs show another device number in maps than in stat: there the inode number
    decides."""
    return status.st_ino == key[1]


def _failed(mapped: Mapped, host_path: str, error: str) -> AttachedLibrary:
    return AttachedLibrary(mapped.path, host_path, mapped.kind, "", None, None, (), "failed", error)


def examine(fd: int, kind: str, path: str, host_path: str) -> AttachedLibrary:
    """What a library is and where it would be probed; places nothing. Raises ElfError."""
    library = catalog.Library(kind)
    file = ElfFile(fd, path)
    exported, local = catalog.symbols(library)
    if library is catalog.Library.NCCL:
        exported |= {*elf.GETTERS, elf.VERSION_GETTER}
    symbols = file.functions(exported, local)
    rows = catalog.select(library, symbols, gloo_rank_offset=_gloo_rank_offset(file, symbols))
    sites = tuple(_site(file, row, symbols[row.symbol]) for row in rows)
    version = file.nccl_version(symbols) if library is catalog.Library.NCCL else None
    offsets = elf.comm_offsets(file, symbols, version) if library is catalog.Library.NCCL else None
    return AttachedLibrary(
        path=path,
        host_path=host_path,
        kind=kind,
        build_id=file.build_id(),
        nccl_version=version,
        comm_offsets=offsets,
        sites=sites,
        state="attached" if sites else "nothing_to_probe",
        error="" if sites else f"none of the functions that Lanterne knows is in {path}",
    )


def _gloo_rank_offset(file: ElfFile, symbols: Mapping[str, Symbol]) -> int | None:
    constructor = symbols.get(catalog.GLOO_CONSTRUCTOR)
    if constructor is None or os.uname().machine != "x86_64":
        return None
    return code.gloo_rank_offset(file.code(constructor), constructor.address)


def _site(file: ElfFile, row: catalog.Row, symbol: Symbol) -> Site:
    place = code.choose_site(file.code(symbol, 4096), symbol.address)
    return Site(row.id, row.symbol, symbol.offset + place.skip, place.cheap, place.instruction)
