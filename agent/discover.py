"""Which processes map which candidate libraries, from /proc.

A scan is cheap when nothing changes: a process that maps no candidate is looked at again only
while it is young or maps Python or a GPU driver, since only such a one is likely to open a
library later; all others are looked at again in turns, a bounded number per scan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

MAX_MAPS_BYTES = 8 << 20
MAX_MAPS_READ = 512  # maps files read in one scan
_YOUNG_SCANS = 30  # a process is read at every scan for its first so many scans

_CANDIDATES = (
    ("nccl", re.compile(r"lib(nccl|rccl)[-.\w]*\.so[.\d]*$")),
    ("gloo", re.compile(r"libtorch_cpu\.so$")),
    ("cuda", re.compile(r"libcuda\.so[.\d]*$")),
)
_NOT_NCCL = re.compile(r"lib(nccl|rccl)[-_](net|profiler|tuner|env|ep|gin)")
_LIKELY = re.compile(rb"python|libcuda|nvidia|libtorch|/dev/kfd|libhsa|libnccl")

Key = tuple[int, int]


@dataclass(frozen=True)
class Mapped:
    """A candidate file that a process maps. ``path`` is what the process sees; ``range`` is the
    address range of the first mapping, which names its entry in map_files."""

    key: Key
    kind: str
    path: str
    range: str
    deleted: bool


@dataclass(frozen=True)
class ProcessInfo:
    """``start_ticks`` with the pid names a process for good."""

    pid: int
    start_ticks: int
    libraries: tuple[Key, ...]


@dataclass
class _Seen:
    start_ticks: int
    likely: bool = False
    scans: int = 0
    mapped: tuple[Mapped, ...] = ()


@dataclass
class Found:
    """One scan: every known process with its candidates, and the pids that have gone."""

    processes: dict[int, tuple[int, tuple[Mapped, ...]]] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    unread: int = 0


def kind_of(path: str) -> str | None:
    """Library kind by file name, None for no candidate."""
    name = path.rsplit("/", 1)[-1]
    for kind, pattern in _CANDIDATES:
        if pattern.fullmatch(name):
            return None if kind == "nccl" and _NOT_NCCL.match(name) else kind
    return None


def device_number(text: str) -> int:
    """``fd:01`` of a maps line as st_dev."""
    major, minor = text.split(":")
    return os.makedev(int(major, 16), int(minor, 16))


def parse_maps(text: bytes) -> tuple[Mapped, ...]:
    """Candidates in a /proc/PID/maps, one per inode, in order of address."""
    found: dict[Key, Mapped] = {}
    for line in text.splitlines():
        if b".so" not in line:
            continue
        parts = line.split(None, 5)
        if len(parts) < 6 or parts[4] == b"0":
            continue
        # The kernel writes a newline in a name as \012, so a line is a line.
        path = os.fsdecode(parts[5])
        deleted = path.endswith(" (deleted)")
        if deleted:
            path = path[: -len(" (deleted)")]
        kind = kind_of(path)
        if kind is None:
            continue
        try:
            key = (device_number(parts[3].decode()), int(parts[4]))
        except ValueError:
            continue
        found.setdefault(key, Mapped(key, kind, path, parts[0].decode(), deleted))
    return tuple(found.values())


def parse_start_ticks(stat: bytes) -> int:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and brackets."""
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def wanted(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the globs let a path through; an empty ``include`` means all."""
    if any(fnmatchcase(path, pattern) for pattern in exclude):
        return False
    return not include or any(fnmatchcase(path, pattern) for pattern in include)


class Discovery:
    """Repeated scans of one /proc."""

    def __init__(self, proc: Path, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._proc = proc
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._seen: dict[int, _Seen] = {}
        self._turn: list[int] = []

    def scan(self) -> Found:
        """Processes that vanish meanwhile are left out."""
        pids = self._pids()
        gone = [pid for pid in self._seen if pid not in pids]
        for pid in sorted(pids):
            start = self._start_ticks(pid)
            seen = self._seen.get(pid)
            if start is None:
                if seen is not None:
                    gone.append(pid)
            elif seen is None or seen.start_ticks != start:
                if seen is not None:
                    gone.append(pid)
                    del self._seen[pid]
                self._seen[pid] = _Seen(start)
        for pid in gone:
            self._seen.pop(pid, None)
        unread = self._read_maps()
        found = {
            pid: (seen.start_ticks, seen.mapped) for pid, seen in self._seen.items() if seen.mapped
        }
        return Found(found, tuple(gone), unread)

    def _pids(self) -> set[int]:
        try:
            names = [entry.name for entry in self._proc.iterdir()]
        except OSError:
            return set()
        return {int(name) for name in names if name.isdigit()}

    def _start_ticks(self, pid: int) -> int | None:
        try:
            return parse_start_ticks(_read_bounded(self._proc / str(pid) / "stat", 4096))
        except (OSError, ValueError, IndexError):
            return None

    def _read_maps(self) -> int:
        """Reads maps, the likely ones first, at most MAX_MAPS_READ; returns how many were due
        and not read."""
        first = [
            pid
            for pid, seen in self._seen.items()
            if seen.mapped or seen.likely or seen.scans < _YOUNG_SCANS
        ]
        # Least read first: where more are young than one scan reads (a host's kernel threads and
        # services at the agent's start), the next scan goes on where this one ends.
        first.sort(key=lambda pid: self._seen[pid].scans)
        rest = set(self._seen) - set(first)
        # The quiet ones take turns: a few at every scan.
        self._turn = [pid for pid in self._turn if pid in rest] or sorted(rest)
        due = [*first, *self._turn[:16]]
        del self._turn[:16]
        for pid in due[:MAX_MAPS_READ]:
            seen = self._seen[pid]
            seen.scans += 1
            try:
                text = _read_bounded(self._proc / str(pid) / "maps", MAX_MAPS_BYTES)
            except OSError:
                continue
            seen.likely = bool(_LIKELY.search(text))
            seen.mapped = tuple(
                mapped
                for mapped in parse_maps(text)
                if wanted(mapped.path, self._include, self._exclude)
            )
        return max(0, len(due) - MAX_MAPS_READ)


def _read_bounded(path: Path, limit: int) -> bytes:
    parts = []
    with path.open("rb", buffering=0) as stream:
        while limit > 0:
            part = stream.read(min(limit, 1 << 20))
            if not part:
                break
            parts.append(part)
            limit -= len(part)
    return b"".join(parts)


def ways_to_open(proc: Path, pid: int, mapped: Mapped) -> Iterable[Path]:
    """Paths under which the agent may reach the very file: through map_files, which needs
    CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE and also finds deleted files; through the process's
    root, which is right in any mount namespace."""
    yield proc / str(pid) / "map_files" / mapped.range
    if not mapped.deleted:
        yield proc / str(pid) / "root" / mapped.path.lstrip("/")
