"""Acknowledged batches on disk, so that one sent again over a restart is known as a duplicate.

Each applied batch is handed to the kernel before its acknowledgement leaves, so that a kill of the
collector forgets nothing; a thread forces the file onto the disk every second, so that a loss of
power forgets at most what came in that second. Where the file has grown, the thread replaces it by
a short one. A disk that fails costs one log line and a count: memory alone knows then, and the disk
is tried again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lanterne.collector import acknowledged
from lanterne.collector.seen import Seen

log = logging.getLogger(__name__)

NAME = "acknowledged"
FILE_MODE = 0o600
SYNC_SECONDS = 1.0
RETRY_SECONDS = 30.0
GROWTH_BYTES = 4 << 20  # appended before the file is made anew
MAX_BYTES = 1 << 30


class Journal:
    """`open` fills `seen`; `open` and `add` in the thread that owns it."""

    def __init__(self, folder: Path, seen: Seen) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._seen = seen
        self._lock = threading.Lock()
        self._fd = self._lock_fd = -1
        self._size = self._base = 0  # bytes now, and when the file was made anew
        self._dirty = False
        self._wanted = False  # a new file
        self._whole: bytes | None = None  # it, to be written by the thread
        self._since: list[bytes] = []  # what has been added to `seen` after that
        self._failing = False
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._errors = Counter(journal_unreadable=0, journal_corrupt=0, journal_unwritable=0)

    def errors(self) -> Mapping[str, int]:
        """By reason."""
        return dict(self._errors)

    def open(self) -> None:
        """Take up what is there, and begin a new file with it."""
        if self._own():
            self._take_up()
            self._whole = acknowledged.pack(self._seen)
            self._renew()
        self._thread.start()

    def add(self, node: str, epoch: int, sequence: int) -> None:
        """`seen` knows a batch more; on return the kernel does."""
        record = acknowledged.pack_batch(node, epoch, sequence)
        with self._lock:
            if self._whole is not None:
                self._since.append(record)
            if self._fd >= 0:
                try:
                    if os.write(self._fd, record) < len(record):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError as error:
                    self._fail(error)
                self._dirty = True
                self._size += len(record)
            grown = self._size - self._base > max(GROWTH_BYTES, self._base)
            if self._whole is None and (self._wanted or grown):
                self._wanted = False
                self._whole, self._since = acknowledged.pack(self._seen), []
                self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    # -- thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            if self._fd < 0 and not self._wanted and time.monotonic() >= self._retry_at:
                self._wanted = self._own()
            if self._whole is not None:
                self._renew()
            elif self._dirty:
                self._sync()
        self._sync()

    def _sync(self) -> None:
        self._dirty = False
        if self._fd < 0:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            with self._lock:
                self._fail(error)

    def _renew(self) -> None:
        """Write the new file beside the old one, and put it in its place."""
        whole, part = self._whole or b"", self._path.with_name(NAME + ".part")
        fd = -1
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            _write_all(fd, whole)
            os.fsync(fd)
            with self._lock:
                added = b"".join(self._since)
                _write_all(fd, added)
                os.fsync(fd)
                part.replace(self._path)
                self._fd, fd = fd, self._fd
                self._size = self._base = len(whole) + len(added)
                self._whole, self._since = None, []
            _sync_folder(self._folder)
        except OSError as error:
            with self._lock:
                self._whole, self._since = None, []
                self._fail(error)
        else:
            if self._failing:
                log.info("acknowledged batches are kept again in %s", self._path)
            self._failing = False
        finally:
            if fd >= 0:
                os.close(fd)

    # -- both -------------------------------------------------------------------------------

    def _own(self) -> bool:
        """Whether no other collector writes there."""
        if self._lock_fd >= 0:
            return True
        fd = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._path.with_name(NAME + ".lock"), flags, FILE_MODE)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(fd)
            if isinstance(error, BlockingIOError):
                error = BlockingIOError(error.errno, "another collector uses that folder")
            self._fail(error)
            return False
        self._lock_fd = fd
        return True

    def _take_up(self) -> None:
        try:
            size = self._path.stat().st_size
            if size > MAX_BYTES:
                raise ValueError(f"is larger than {MAX_BYTES} bytes")
            data = self._path.read_bytes()
            end = acknowledged.unpack(data, self._seen)
        except FileNotFoundError:
            return
        except OSError as error:
            self._errors["journal_unreadable"] += 1
            log.error("%s cannot be read (%s): starting without", self._path, error.strerror)
        except ValueError as error:
            self._errors["journal_corrupt"] += 1
            log.error("%s %s: it will be replaced", self._path, error)
        else:
            if end < len(data):
                self._errors["journal_corrupt"] += 1
                log.warning("%s: its last %d bytes are torn", self._path, len(data) - end)

    def _fail(self, error: OSError) -> None:
        self._errors["journal_unwritable"] += 1
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if not self._failing:
            log.error(
                "%s cannot be written (%s): batches sent again over a restart may count twice",
                self._path,
                error.strerror,
            )
        self._failing = True
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
