"""Which processes map which candidate libraries, from /proc.

A scan is cheap when nothing changes. Kernel threads have no memory and are looked at once. Maps are
read again only when the size of the address space has changed, or now and then. A process that maps
no candidate is looked at again only while it is young or maps Python or a GPU driver, since only
such a one is likely to open a library later; all others take turns, a bounded number per scan.

A library is a candidate by its file name. What else a process with a GPU driver maps may hold an
NCCL that was linked statically, or callers of it that tell more, and so may files whose names hint
at it: those are handed to `linked`, file by file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from pathlib import Path

from .process import content

MAX_MAPS_BYTES = 8 << 20
MAX_MAPS_READ = 512  # maps files read in one scan
_YOUNG_SCANS = 30  # scans in which a process counts as young
_AGAIN_SCANS = 30  # scans until maps are read again though the size is the same
_IN_TURN = 16  # quiet processes, and kernel threads, that are looked at again in one scan

_CANDIDATES = (
    ("profiler", re.compile(r"lib[nr]ccl-profiler[-.\w]*\.so[.\d]*$")),
    ("nccl_ep", re.compile(r"libnccl_ep\.so[.\d]*$")),
    ("nccl", re.compile(r"lib(nccl|rccl)[-.\w]*\.so[.\d]*$")),
    ("gloo", re.compile(r"libtorch_cpu\.so$")),
    ("cuda", re.compile(r"libcuda\.so[.\d]*$")),
    ("parcagpu", re.compile(r"libparcagpu[-.\w]*\.so[.\d]*$")),
    # NIXL EP and Mooncake EP are launched as DeepEP is.
    ("deepep", re.compile(r"(deep_ep_cpp|nixl_ep_cpp)[-.\w]*\.so$|libmooncake_ep_device\.so$")),
)
# A name that many packages have: the folder decides.
_DEEPEP = re.compile(r"(?:.*/)?deep_ep/_C[-.\w]*\.so")
_NOT_NCCL = re.compile(r"lib(nccl|rccl)[-_](net|profiler|tuner|env|ep|gin)")
# Around the names that `kind_of` decides on: whole maps are searched before lines are cut.
_CANDIDATE = re.compile(
    rb"/lib(?:[nr]ccl|torch_cpu\.so|cuda\.so|parcagpu|mooncake_ep)|/(?:deep|nixl)_ep"
)
# Executable mappings of files. Nothing below /dev: opening a device may do something to it.
_CODE = re.compile(rb"^(\S+) r-x\S \S+ (\S+) ([1-9]\d*) +(/(?!dev/).+)$", re.MULTILINE)
_DRIVER = re.compile(rb"/lib(?:cuda|amdhip64|hsa-runtime64)\.so")
# Names of files that may hold an NCCL; the configuration has the same (probes.look_into).
LOOK_INTO = ("*nccl*", "*NCCL*", "*rccl*", "libtorch_cuda*", "libtorch_hip*")
MAX_OTHERS = 1024  # files of one process that are looked into
_LIKELY = (b"python", b"nvidia", b"libcuda", b"libtorch", b"/dev/kfd", b"libhsa")

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


@dataclass(slots=True)
class _Seen:
    start_ticks: int
    size: int  # of the address space, bytes
    stack: int  # where it begins: another one after an exec
    read_size: int = -1  # when the maps were read
    likely: bool = False
    scans: int = 0
    since_read: int = 0
    mapped: tuple[Mapped, ...] = ()
    others: tuple[Mapped, ...] = ()  # not looked into yet


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
    return "deepep" if _DEEPEP.fullmatch(path) else None


def device_number(text: str) -> int:
    """``fd:01`` of a maps line as st_dev."""
    major, minor = text.split(":")
    return os.makedev(int(major, 16), int(minor, 16))


def parse_maps(text: bytes) -> tuple[Mapped, ...]:
    """Candidates in a /proc/PID/maps, one per inode, in order of address."""
    found: dict[Key, Mapped] = {}
    end = -1
    for match in _CANDIDATE.finditer(text):
        if match.start() < end:
            continue  # a second match in the same line
        end = text.find(b"\n", match.end())
        end = len(text) if end < 0 else end
        parts = text[text.rfind(b"\n", 0, match.start()) + 1 : end].split(None, 5)
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
            mapped = Mapped(key, kind, path, parts[0].decode(), deleted)
        except (ValueError, OverflowError):
            continue
        found.setdefault(key, mapped)
    return tuple(found.values())


@lru_cache(maxsize=8)
def _hints(patterns: tuple[str, ...]) -> tuple[tuple[bytes, ...], re.Pattern[bytes]]:
    """Of patterns of file names: the longest text of each, to search whole maps for, and one
    expression for a name."""
    texts = (max(re.split(r"\[.*?\]|[*?]", one), key=len) for one in patterns)
    expression = "|".join(f"(?:{translate(one)})" for one in patterns) or r"(?!)"
    return tuple(os.fsencode(text) for text in texts), re.compile(os.fsencode(expression))


def other_files(text: bytes, look_into: Sequence[str] = LOOK_INTO) -> tuple[Mapped, ...]:
    """Files in a /proc/PID/maps that are no candidates by name and may hold an NCCL, those first
    whose names a pattern fits. Without a GPU driver in the process only these."""
    hints, fits = _hints(tuple(look_into))
    found: dict[Key, tuple[bool, Mapped]] = {}
    done: set[tuple[bytes, bytes]] = set()
    everything = _DRIVER.search(text) is not None
    if not everything and not any(hint in text for hint in hints):
        return ()
    for match in _CODE.finditer(text):
        span, device, inode, name = match.groups()
        if (device, inode) in done:
            continue
        done.add((device, inode))
        base = name.rsplit(b"/", 1)[-1].removesuffix(b" (deleted)")
        hinted = fits.match(base) is not None
        if not (everything or hinted):
            continue
        path = os.fsdecode(name)
        deleted = path.endswith(" (deleted)")
        path = path.removesuffix(" (deleted)")
        if kind_of(path) is not None:
            continue
        try:
            key = (device_number(device.decode()), int(inode))
            mapped = Mapped(key, "nccl", path, span.decode(), deleted)
        except (ValueError, OverflowError):
            continue
        found.setdefault(key, (hinted, mapped))
    ordered = sorted(found.values(), key=lambda one: not one[0])
    return tuple(mapped for _, mapped in ordered[:MAX_OTHERS])


def parse_stat(stat: bytes) -> tuple[int, int, int]:
    """Fields 22, 23 and 28 of /proc/PID/stat: start in ticks, bytes of address space (0: a kernel
    thread), bottom of the stack. The name in field 2 may hold spaces and brackets.

    An exec changes neither pid nor start, but where the stack is; 0 for a reader that may not
    trace the process, and then an exec goes unseen."""
    fields = stat[stat.rindex(b")") + 2 :].split(None, 26)
    return int(fields[19]), int(fields[20]), int(fields[25])


def wanted(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the globs let a path through; an empty ``include`` means all."""
    if any(fnmatchcase(path, pattern) for pattern in exclude):
        return False
    return not include or any(fnmatchcase(path, pattern) for pattern in include)


class Discovery:
    """Repeated scans of one /proc. ``holds`` says of a file that is no candidate by name what kind
    of library is in it, "" for none; None: not known yet, ask again in the next scan."""

    def __init__(
        self,
        proc: Path,
        include: Sequence[str],
        exclude: Sequence[str],
        holds: Callable[[int, Mapped], str | None] | None = None,
        *,
        look_into: Sequence[str] = LOOK_INTO,
    ) -> None:
        self._proc = str(proc)
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._holds = holds
        self._look_into_names = tuple(look_into)
        self._waiting: set[int] = set()  # with files that are not looked into yet
        self._seen: dict[int, _Seen] = {}
        self._without_memory: set[int] = set()  # kernel threads and zombies
        self._turn: list[int] = []
        self._memory_turn: list[int] = []

    def scan(self) -> Found:
        """Processes that vanish meanwhile are left out."""
        pids = self._pids()
        gone = [pid for pid in self._seen if pid not in pids]
        for pid in gone:
            del self._seen[pid]
        self._without_memory &= pids
        # A number may come back as somebody else's, so they are looked at again in turns.
        looked_at = sorted(pids - self._without_memory) + self._some_without_memory()
        gone += [pid for pid in looked_at if self._look(pid)]
        for pid in sorted(self._waiting & self._seen.keys()):
            self._look_into(pid, self._seen[pid])
        self._waiting &= self._seen.keys()
        unread = self._read_maps()
        found = {
            pid: (seen.start_ticks, seen.mapped) for pid, seen in self._seen.items() if seen.mapped
        }
        return Found(found, tuple(gone), unread)

    def _pids(self) -> set[int]:
        try:
            # Not Path.iterdir: an object per entry would be a third of a scan.
            return {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208
        except OSError:
            return set()

    def _some_without_memory(self) -> list[int]:
        self._memory_turn = self._memory_turn or list(self._without_memory)
        some = [pid for pid in self._memory_turn[:_IN_TURN] if pid in self._without_memory]
        del self._memory_turn[:_IN_TURN]
        return some

    def _look(self, pid: int) -> bool:
        """Takes note of one process; -> whether a known one with this number has gone, or has
        become another program: its memory, and every communicator in it, is no more."""
        known = self._seen.get(pid)
        try:
            start, size, stack = parse_stat(_read(f"{self._proc}/{pid}/stat"))
        except (OSError, ValueError, IndexError):
            return self._seen.pop(pid, None) is not None
        same = known is not None and known.start_ticks == start
        if known is not None and same and (stack == known.stack or not stack or not known.stack):
            known.size, known.stack = size, stack or known.stack
            return False
        if size:
            self._seen[pid] = _Seen(start, size, stack)
            self._without_memory.discard(pid)
        else:
            self._seen.pop(pid, None)
            self._without_memory.add(pid)
        # A scan may see a child between fork and exec. What it becomes may call at once, so nothing
        # is forgotten of it unless it had something to forget.
        return known is not None and (not same or bool(known.mapped))

    def _read_maps(self) -> int:
        """Reads maps, the likely ones first, at most MAX_MAPS_READ; returns how many were due
        and not read."""
        first: list[int] = []
        rest: set[int] = set()
        for pid, seen in self._seen.items():
            seen.since_read += 1
            if seen.size == seen.read_size and seen.since_read <= _AGAIN_SCANS:
                seen.scans += 1
            elif seen.mapped or seen.likely or seen.scans < _YOUNG_SCANS:
                first.append(pid)
            else:
                rest.add(pid)
        # Least read first: where more are young than one scan reads (a host's services at the
        # agent's start), the next scan goes on where this one ends.
        first.sort(key=lambda pid: self._seen[pid].scans)
        self._turn = [pid for pid in self._turn if pid in rest] or sorted(rest)
        due = [*first, *self._turn[:_IN_TURN]]
        del self._turn[:_IN_TURN]
        for pid in due[:MAX_MAPS_READ]:
            self._read_one(pid, self._seen[pid])
        return max(0, len(due) - MAX_MAPS_READ)

    def _read_one(self, pid: int, seen: _Seen) -> None:
        seen.scans += 1
        text = content(f"{self._proc}/{pid}/maps", MAX_MAPS_BYTES)
        if text is None:
            return
        seen.read_size, seen.since_read = seen.size, 0
        seen.mapped = tuple(
            mapped
            for mapped in parse_maps(text)
            if wanted(mapped.path, self._include, self._exclude)
        )
        seen.likely = any(word in text for word in _LIKELY)
        if self._holds is not None:
            seen.others = tuple(
                mapped
                for mapped in other_files(text, self._look_into_names)
                if wanted(mapped.path, self._include, self._exclude)
            )
            self._look_into(pid, seen)

    def _look_into(self, pid: int, seen: _Seen) -> None:
        if self._holds is None:
            return
        waiting: list[Mapped] = []
        for mapped in seen.others:
            answer = self._holds(pid, mapped)
            if answer:
                seen.mapped += (replace(mapped, kind=answer),)
            elif answer is None:
                waiting.append(mapped)
        seen.others = tuple(waiting)
        if waiting:
            self._waiting.add(pid)
        else:
            self._waiting.discard(pid)


def _read(path: str) -> bytes:
    """A file that the kernel gives in one read."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def ways_to_open(proc: Path, pid: int, mapped: Mapped) -> Iterable[Path]:
    """Paths under which the agent may reach the very file: through map_files, which needs
    CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE and also finds deleted files; through the process's
    root, which is right in any mount namespace."""
    yield proc / str(pid) / "map_files" / mapped.range
    if not mapped.deleted:
        yield proc / str(pid) / "root" / mapped.path.lstrip("/")
