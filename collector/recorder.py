"""Keeps the frames of agents in a file, in a thread of its own, within bounds of memory and disk.

Frames are gathered into blocks of about a second, compressed and appended. A file that has grown to
`max_bytes` becomes FILE.1 (FILE.1 becomes FILE.2, the last is deleted) and a new one is begun. A
full or broken disk never stops the collector: what cannot be written is counted, said once in the
log, and tried again with the next block. After a crash at most the last second and, if the machine
went down with it, what had not been synced (`sync_seconds`) is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from lanterne.collector import recording
from lanterne.collector.errors import RecordingError
from lanterne.collector.recording import Header, Received
from lanterne.collector.slow_disk import SlowDisk

log = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20  # of frames waiting to be written
BLOCK_BYTES = 1 << 20
BLOCK_SECONDS = 1.0
CLOSE_SECONDS = 10.0


class Recorder:
    """take(received) from one thread; close()."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        files: int,
        sync_seconds: float,
        header: Callable[[], Header],
    ) -> None:
        """Raises RecordingError where the file cannot be begun. `header`: of a file begun now."""
        self._path, self._max_bytes, self._files = path, max_bytes, files
        self._sync_seconds = sync_seconds
        self._header = header
        self._fd = -1
        self._size = 0
        self._synced = time.monotonic()
        self._failing = False
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._closing = False
        self._slow = SlowDisk(path, "frames wait in memory; beyond its bound they are dropped")
        self._counts: Counter[str] = Counter(
            recorded_frames=0, recorded_bytes=0, recording_dropped_queue=0, recording_dropped_disk=0
        )
        try:
            self._begin()
        except OSError as error:
            self._end()
            raise RecordingError(
                f"{path}: no recording can be begun there ({error.strerror}); name a file in a "
                "folder that exists and can be written"
            ) from error
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def counts(self) -> Mapping[str, int]:
        """Frames and bytes written, frames dropped by cause; since the start. To be asked now and
        then: a disk that takes long is noticed here."""
        self._slow.look()
        return dict(self._counts)

    def has_room(self) -> bool:
        return self._waiting_bytes < QUEUE_BYTES

    def take(self, received: Received) -> bool:
        """Never blocks; False (and counted) when too much waits to be written."""
        if not self.has_room():
            self._counts["recording_dropped_queue"] += 1
            return False
        entry = recording.record(received)
        with self._wake:
            self._waiting.append(entry)
            self._waiting_bytes += len(entry)
            if self._waiting_bytes >= BLOCK_BYTES:
                self._wake.notify()
        return True

    def close(self) -> None:
        """Write what waits, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the recording was not finished within %.0f s", CLOSE_SECONDS)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                if not self._closing and self._waiting_bytes < BLOCK_BYTES:
                    self._wake.wait(BLOCK_SECONDS)
                closing = self._closing
                entries, self._waiting = self._waiting, []
            for part in _in_blocks(entries):
                with self._slow:
                    self._write(part)
            with self._wake:
                self._waiting_bytes -= sum(map(len, entries))
        self._end()

    def _write(self, entries: list[bytes]) -> None:
        data = recording.frames_block(entries)
        try:
            if self._fd < 0:
                self._begin()
            elif self._size + len(data) > self._max_bytes:
                self._end()
                self._begin()
            self._append(data)
        except OSError as error:
            self._counts["recording_dropped_disk"] += len(entries)
            if not self._failing:
                self._failing = True
                log.error(
                    "%s: recording has stopped (%s); it goes on when the disk lets it, what comes "
                    "until then is counted as dropped",
                    self._path,
                    error.strerror,
                )
            return
        self._counts["recorded_frames"] += len(entries)
        self._counts["recorded_bytes"] += len(data)
        if self._failing:
            self._failing = False
            log.info("%s: recording goes on", self._path)

    def _begin(self) -> None:
        """A new file; an older one of the name moves on. Raises OSError."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        self._lock(os.open(self._path, flags, 0o600))
        if os.fstat(self._fd).st_size:
            self._shift()
            self._end()
            self._lock(os.open(self._path, flags, 0o600))
        self._size = 0
        self._synced = time.monotonic()
        try:
            self._append(recording.header_block(self._header()))
        except OSError:
            self._end()  # begun anew next time: no file may lack its header
            raise

    def _lock(self, fd: int) -> None:
        """Two collectors must not write one file."""
        self._fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._end()
            raise OSError(error.errno, "another collector is writing it") from error

    def _shift(self) -> None:
        def name(number: int) -> Path:
            return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

        for number in range(self._files - 2, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                name(number).replace(name(number + 1))
        if self._files == 1:
            self._path.unlink(missing_ok=True)

    def _append(self, data: bytes) -> None:
        """All of it or, on a full disk, none. Raises OSError."""
        view, at = memoryview(data), self._size
        try:
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
            if time.monotonic() - self._synced >= self._sync_seconds > 0:
                os.fdatasync(self._fd)
                self._synced = time.monotonic()
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size = at

    def _end(self) -> None:
        if self._fd < 0:
            return
        if self._sync_seconds > 0:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1


def _in_blocks(entries: list[bytes]) -> list[list[bytes]]:
    """Cut where a block is full; an entry is never cut."""
    blocks: list[list[bytes]] = []
    room = 0
    for entry in entries:
        if not blocks or len(entry) > room:
            blocks.append([])
            room = BLOCK_BYTES
        blocks[-1].append(entry)
        room -= len(entry)
    return blocks
