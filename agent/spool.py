"""Batches on disk until a collector has them: segment files in a folder of the agent's own.

What `append` returned a place for survives a kill and a loss of power. Segments are only written at
their end and deleted from the oldest, as soon as nothing in them is wanted or when the bound is
reached. What a crash left half written is found by its checksum and cut off at the next start.
One thread appends; any thread may read. No logging, no clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lanterne.agent import segments
from lanterne.agent.errors import SpoolError
from lanterne.agent.segments import BATCH, HEAD_BYTES, Key

SMALLEST_SEGMENT, LARGEST_SEGMENT = 64 << 10, 16 << 20
MOST_BATCHES = 65_536  # each costs some 500 bytes of memory, too; 18 hours of windows of 1 s
SEGMENTS = 16  # about: what is lost at once when the oldest must go is a part of the whole
FILE_MODE, FOLDER_MODE = 0o600, 0o700


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch is: the record's segment, offset and size."""

    segment: int
    at: int
    size: int


@dataclass
class _Segment:
    size: int = 0
    wanted: set[Key] = field(default_factory=set)


@dataclass
class Appended:
    places: dict[Key, Place] = field(default_factory=dict)
    evicted: list[Key] = field(default_factory=list)  # wanted, but the oldest: no longer kept
    too_large: list[Key] = field(default_factory=list)  # for the whole spool
    error: OSError | None = None  # what ended it early


class Spool:
    """`open` first; at most `max_bytes` and MOST_BATCHES on disk."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(max(max_bytes // SEGMENTS, SMALLEST_SEGMENT), LARGEST_SEGMENT)
        self._segments: dict[int, _Segment] = {}  # oldest first
        self._number = 0  # of the newest segment there ever was
        self._fd = -1  # of the segment that is being written
        self._lock_fd = -1
        self.unclean = False  # the run before did not `close`
        self.damaged = 0  # stretches of segments that held no sound record

    @property
    def disk_bytes(self) -> int:
        return sum(segment.size for segment in list(self._segments.values()))

    @property
    def batches(self) -> int:
        return sum(len(segment.wanted) for segment in list(self._segments.values()))

    # -- start and end ----------------------------------------------------------------------

    def open(self) -> list[tuple[Key, Place]]:
        """-> what earlier runs left, oldest first. Raises OSError, SpoolError."""
        _prepare(self.folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.folder / "lock", flags, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = self._load()
            self.unclean = self._running.exists()
            os.close(os.open(self._running, flags, FILE_MODE))
        except BlockingIOError:
            os.close(lock)
            raise SpoolError(
                f"spool.path {self.folder} is used by another agent: give each its own folder"
            ) from None
        except OSError:
            os.close(lock)
            raise
        self._lock_fd = lock
        return found

    def close(self) -> None:
        """The run ends in order."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                self._running.unlink(missing_ok=True)
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def _load(self) -> list[tuple[Key, Place]]:
        self._segments.clear()
        found: dict[Key, Place] = {}
        no_longer: list[tuple[int, int, int]] = []
        for number in sorted(_numbers(self.folder)):
            self._number = max(self._number, number)
            self._segments[number] = _Segment()
            self._load_segment(number, found, no_longer)
        for epoch, first, last in no_longer:
            for sequence in range(first, min(last, first + len(found)) + 1):
                found.pop((epoch, sequence), None)
        for key, place in found.items():
            self._segments[place.segment].wanted.add(key)
        self._tidy()
        return list(found.items())

    def _load_segment(
        self, number: int, found: dict[Key, Place], no_longer: list[tuple[int, int, int]]
    ) -> None:
        path = self._path(number)
        try:
            data = path.read_bytes()
        except OSError:
            self.damaged += 1
            return
        scan = segments.scan(data)
        self.damaged += scan.damaged
        if scan.end < len(data):
            os.truncate(path, scan.end)
        self._segments[number].size = scan.end
        for r in scan.records:
            if r.kind == BATCH:
                found[r.epoch, r.sequence] = Place(number, r.at, r.end - r.at)
            else:
                no_longer += segments.ranges_of(data[r.at + HEAD_BYTES : r.end])

    # -- while it runs ----------------------------------------------------------------------

    def append(
        self, batches: Sequence[tuple[Key, bytes]], done: Iterable[tuple[Key, Place]] = ()
    ) -> Appended:
        """Forget `done`, write `batches`, and have it all on the disk. Raises nothing of the disk:
        where it fails, `error` says so, and `places` has what is safe."""
        result = Appended()
        forgotten = self._forget(done)
        try:
            self._tidy()
            still = [key for key, place in forgotten if place.segment in self._segments]
            if record := segments.done(still):
                self._write([(None, record)], result)
            chunk: list[tuple[Key | None, bytes]] = []
            size = 0
            for key, data in batches:
                record = segments.frame(BATCH, *key, data)
                if len(record) > self._max_bytes:
                    result.too_large.append(key)
                    continue
                if chunk and size + len(record) > self._segment_bytes:
                    self._write(chunk, result)
                    chunk, size = [], 0
                chunk.append((key, record))
                size += len(record)
            self._write(chunk, result)
        except OSError as error:
            result.error = error
        return result

    def read(self, key: Key, place: Place) -> bytes | None:
        """The batch; None where it is gone or damaged."""
        try:
            fd = os.open(self._path(place.segment), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return segments.payload_of(os.pread(fd, place.size, place.at), key)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _forget(self, done: Iterable[tuple[Key, Place]]) -> list[tuple[Key, Place]]:
        forgotten = []
        for key, place in done:
            segment = self._segments.get(place.segment)
            if segment is not None:
                segment.wanted.discard(key)
                forgotten.append((key, place))
        return forgotten

    def _tidy(self) -> None:
        """Delete the oldest segments of which nothing is wanted; all of them where nothing is.

        Only from the oldest on: what a segment says of others is about itself and older ones.
        """
        while self._segments:
            number, segment = next(iter(self._segments.items()))
            if segment.wanted:
                return
            self._delete(number)

    def _write(self, chunk: list[tuple[Key | None, bytes]], result: Appended) -> None:
        """One write and one sync, into one segment. Raises OSError, with nothing of it kept."""
        data = b"".join(record for _, record in chunk)
        if not data:
            return
        while self._segments and (
            self.disk_bytes + len(data) > self._max_bytes
            or self.batches + len(chunk) > MOST_BATCHES
        ):
            number, oldest = next(iter(self._segments.items()))
            result.evicted += sorted(oldest.wanted)
            self._delete(number)
        segment = self._segment_for(len(data))
        at, number = segment.size, self._number
        try:
            _write_all(self._fd, data)
            os.fdatasync(self._fd)
        except OSError:
            self._undo(segment)
            raise
        for key, record in chunk:
            if key is not None:
                segment.wanted.add(key)
                result.places[key] = Place(number, at, len(record))
            at += len(record)
        segment.size = at

    def _segment_for(self, size: int) -> _Segment:
        """The one to write so much to; begun if need be."""
        segment = self._segments.get(self._number)
        if self._fd >= 0 and segment is not None and segment.size + size <= self._segment_bytes:
            return segment
        self._end_segment()
        number = self._number + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path(number), flags, FILE_MODE)
        self._number = number
        segment = self._segments[number] = _Segment()
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return segment

    def _undo(self, segment: _Segment) -> None:
        """After a failed write. What cannot be cut off now is cut at the next start."""
        try:
            os.ftruncate(self._fd, segment.size)
        except OSError:
            self._end_segment()
        if segment.size == 0:
            with contextlib.suppress(OSError):
                self._delete(self._number)

    def _delete(self, number: int) -> None:
        if number == self._number:
            self._end_segment()
        self._path(number).unlink(missing_ok=True)
        del self._segments[number]

    def _end_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _running(self) -> Path:
        return self.folder / "running"

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:012d}.seg"


def _prepare(folder: Path) -> None:
    """A folder of our own that nobody else may enter. Raises OSError, SpoolError."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SpoolError(
            f"spool.path {folder} must be a folder that belongs to the agent's user "
            f"({os.geteuid()}): others could put batches into it"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(FOLDER_MODE)


def _numbers(folder: Path) -> list[int]:
    return [int(p.stem) for p in folder.glob("*.seg") if p.stem.isascii() and p.stem.isdigit()]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
