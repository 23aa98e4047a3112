"""Attaches the programs to every library that a process maps, once per inode.

An attach covers all processes, present and future, that map the inode. It is all or nothing: a
probe that cannot be placed takes back those placed before it, and a library counts as attached
only when its last link stands. The kernel removes the probes when the agent ends, however it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType

from . import elf, library
from .discover import LOOK_INTO, Discovery, Key, Mapped, ProcessInfo, ways_to_open
from .errors import AttachError, ElfError
from .inodes import Real, real_file, same_file
from .kernel import Programs
from .library import AttachedLibrary
from .linked import Linked
from .links import Closer, Links

MAX_LIBRARIES = 256
CLOSE_SECONDS = 10.0  # what a close waits for; the perf method needs the most, per library
_GRACE_SCANS = 10  # scans that a library stays attached after its last process has gone
_RETRY_SCANS = 30  # scans until a failed library is tried again
_SWEEP_SCANS = 10  # from one look for processes that ended unseen to the next
_SWEEP_SHARE = 0.25  # share of thread slots in use from which dead threads are looked for


@dataclass(frozen=True)
class Scan:
    """What one scan has changed. ``failed``: messages, each once per library and try."""

    new_libraries: tuple[AttachedLibrary, ...]
    gone_pids: tuple[int, ...]
    failed: tuple[str, ...]


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
        look_into: Sequence[str] = LOOK_INTO,
        closer: Closer | None = None,
    ) -> None:
        self._programs = programs
        self._proc = proc
        self._closer = closer or Closer()
        self._linked = Linked(proc)
        self._discovery = Discovery(proc, include, exclude, self._linked.holds, look_into=look_into)
        self._libraries: dict[Key, AttachedLibrary] = {}
        self._links: dict[Key, Links] = {}
        self._real: dict[Key, Real] = {}
        self._unused: dict[Key, int] = {}
        self._retry: dict[Key, int] = {}
        self._until_sweep = _SWEEP_SCANS
        self._processes: dict[int, ProcessInfo] = {}
        self.libraries: Mapping[Key, AttachedLibrary] = MappingProxyType(self._libraries)
        self.processes: Mapping[int, ProcessInfo] = MappingProxyType(self._processes)

    def scan(self) -> Scan:
        """One pass: attaches new inodes, lets go of unused ones. One bad file harms no other."""
        self._linked.begin()
        found = self._discovery.scan()
        new: list[AttachedLibrary] = []
        failed: list[str] = []
        users: dict[Key, list[tuple[int, Mapped]]] = {}
        for pid, (_, mapped) in found.processes.items():
            for one in mapped:
                users.setdefault(one.key, []).append((pid, one))
        for key, by in users.items():
            tried = self._consider(key, by)
            if tried is not None:
                new.append(tried)
                if tried.state == "failed":
                    failed.append(f"{tried.path}: {tried.error}")
        self._release(users.keys())
        self._remember(found.processes)
        if self._programs is not None:
            if found.gone:
                self._programs.forget(found.gone)
            self._until_sweep -= 1
            if self._until_sweep <= 0:
                self._until_sweep = _SWEEP_SCANS
                self._programs.sweep_processes(self._proc)
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
        elif len(self._libraries) >= MAX_LIBRARIES or self._kernel_is_busy:
            return None
        tried = self._attach_from(key, by)
        self._libraries[key] = tried
        return tried if known is None or tried != known else None

    @property
    def _kernel_is_busy(self) -> bool:
        """Perf events are opened and closed under one lock: attaching now would wait, event by
        event, for what is being closed. The next scan does it."""
        closing = self._closer.pending > 0
        return closing and self._programs is not None and self._programs.method == "perf"

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
                    if not same_file(status, one.key):
                        reasons.append(f"{path}: another file lies there now")
                        continue
                    self._real[key] = real = real_file(fd, status)
                    return self._shared(key, real) or self._attach(key, fd, one, str(path))
                finally:
                    os.close(fd)
        reason = reasons[0] if reasons else "cannot be reached"
        return library.failed(mapped.path, "", mapped.kind, reason)

    def _shared(self, key: Key, real: Real) -> AttachedLibrary | None:
        """The library where another mount's view of the very inode is attached already."""
        for other, links in self._links.items():
            if other != key and self._real.get(other) == real:
                self._links[key] = links
                return self._libraries[other]
        return None

    def _attach(self, key: Key, fd: int, mapped: Mapped, host_path: str) -> AttachedLibrary:
        try:
            found = library.examine(fd, mapped.kind, mapped.path, host_path)
        except ElfError as error:
            return library.failed(mapped.path, host_path, mapped.kind, str(error))
        except (ValueError, IndexError, OverflowError, MemoryError) as error:
            # A file made to harm may still trip what looks at its code: the rest goes on.
            reason = f"cannot be read as ELF: {error!r}"
            return library.failed(mapped.path, host_path, mapped.kind, reason)
        if found.state != "attached" or self._programs is None:
            return found
        links = Links(self._programs, self._closer)
        try:
            # By descriptor: the inode that was examined is the one that is probed.
            links.add(f"/proc/self/fd/{fd}", found.sites)
        except AttachError as error:
            return library.failed(mapped.path, host_path, mapped.kind, str(error))
        self._links[key] = links
        return replace(found, since_ns=time.monotonic_ns())

    def _release(self, used: Iterable[Key]) -> None:
        for key in set(self._libraries) - set(used):
            self._unused[key] = self._unused.get(key, 0) + 1
            if self._unused[key] > _GRACE_SCANS:
                self._detach(key)

    def _detach(self, key: Key) -> None:
        links = self._links.pop(key, None)
        if links is not None and all(other is not links for other in self._links.values()):
            links.close()
        self._real.pop(key, None)
        self._libraries.pop(key, None)
        self._unused.pop(key, None)
        self._retry.pop(key, None)

    def _remember(self, found: Mapping[int, tuple[int, tuple[Mapped, ...]]]) -> None:
        self._processes.clear()
        for pid, (start, mapped) in found.items():
            self._processes[pid] = ProcessInfo(pid, start, tuple(one.key for one in mapped))

    def release_all(self) -> None:
        """Begins to take away every probe; returns at once."""
        for key in list(self._libraries):
            self._detach(key)

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Takes away every probe and waits for it, within reason; -> whether all are gone. The
        rest goes with the process."""
        self.release_all()
        return self._closer.wait(timeout)

    def __enter__(self) -> Attacher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
