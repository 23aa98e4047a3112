"""Acknowledged batches on disk, so that one sent again over a restart is known as a duplicate.

One thread writes, and it alone waits for the disk: whatever was added while it wrote and synced is
its next piece of work, so that one sync stands for all that came before it. An acknowledgement
leaves once the disk has its batch (`kept`). The thread knows all that the file holds, and where the
file has grown replaces it by a short one.

A disk that fails costs one log line and a count: memory alone knows then, and the disk is tried
again. One that takes long holds acknowledgements back; after GIVE_UP_SECONDS it counts as one that
fails, until it answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from lanterne.collector import acknowledged
from lanterne.collector.seen import Seen
from lanterne.collector.slow_disk import SlowDisk

log = logging.getLogger(__name__)

NAME = "acknowledged"
FILE_MODE = 0o600
GATHER_SECONDS = 0.01  # between the beginnings of two syncs, at least
IDLE_SECONDS = 1.0
RETRY_SECONDS = 30.0
GIVE_UP_SECONDS = 60.0
CLOSE_SECONDS = 5.0
GROWTH_BYTES = 4 << 20  # appended before the file is made anew
MAX_BYTES = 1 << 30
MOST_UNKEPT = 65_536  # batches that may wait for the disk

Key = tuple[str, int, int]  # node, epoch, sequence


class Journal:
    """`open` fills `seen`. `open`, `add`, `position`, `full` in the thread that owns `seen`; of
    them only `open` waits for the disk."""

    def __init__(self, folder: Path, seen: Seen) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._seen = seen
        self._last = 0  # position of what was added last
        self._unkept: dict[Key, int] = {}
        self._order: deque[Key] = deque()  # of them
        self._wake = threading.Condition()
        self._waiting: list[Key] = []
        self._closing = False
        self._fd = self._lock_fd = -1
        self._known = seen.like()  # the thread's own: what the file holds, or should
        self._written = 0  # position up to which it does
        self._size = self._base = 0  # bytes now, and when the file was made anew
        self._failing = False
        self._retry_at = 0.0
        self._given_up = False
        self._slow = SlowDisk(self._path, "agents are told to keep what it does not have")
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._errors = Counter(journal_unreadable=0, journal_corrupt=0, journal_unwritable=0)
        self.on_kept: Callable[[], object] = lambda: None  # in the thread, after each sync

    def errors(self) -> Mapping[str, int]:
        """By reason. To be asked now and then: a disk that takes long is noticed here."""
        self._slow.look()
        given_up = self._slow.seconds > GIVE_UP_SECONDS
        if given_up and not self._given_up:
            self._errors["journal_unwritable"] += 1
            log.error("%s: batches are acknowledged without it, until it answers", self._path)
        self._given_up = given_up
        return {**self._errors, "journal_stalled": self._slow.times}

    @property
    def kept(self) -> int:
        """The position up to which batches may be acknowledged. Any thread."""
        return self._last if self._slow.seconds > GIVE_UP_SECONDS else self._written

    @property
    def full(self) -> bool:
        """More waits for the disk than may."""
        self._prune()
        return len(self._unkept) >= MOST_UNKEPT

    def open(self) -> None:
        """Take up what is there; the thread begins a new file with it."""
        if self._own():
            self._take_up()
        acknowledged.unpack(acknowledged.pack(self._seen), self._known)
        self._thread.start()

    def add(self, node: str, epoch: int, sequence: int) -> int:
        """`seen` knows a batch more -> its position."""
        key = (node, epoch, sequence)
        self._prune()
        self._last += 1
        self._unkept[key] = self._last
        self._order.append(key)
        with self._wake:
            self._waiting.append(key)
            self._wake.notify()
        return self._last

    def position(self, node: str, epoch: int, sequence: int) -> int:
        """Of a batch that `seen` knows; 0 where it is kept."""
        self._prune()
        return self._unkept.get((node, epoch, sequence), 0)

    def _prune(self) -> None:
        kept = self.kept
        while self._order and self._unkept[self._order[0]] <= kept:
            del self._unkept[self._order.popleft()]

    def close(self) -> None:
        """Write and sync what was added, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # its descriptors are in use
            log.error(
                "%s: %d batches not written within %.0f s",
                self._path,
                self._last - self._written,
                CLOSE_SECONDS,
            )
            return
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    # -- thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._slow:
                self._make_anew()
            keys, closing = self._next()
            began = time.monotonic()
            with self._slow:
                self._commit(keys)
            self._written += len(keys)
            self.on_kept()
            if not closing:
                time.sleep(max(0.0, GATHER_SECONDS - (time.monotonic() - began)))
        if self._lock_fd >= 0:  # else another collector's knowledge would be replaced
            self._retry_at = 0.0
            self._make_anew()

    def _next(self) -> tuple[list[Key], bool]:
        """What was added since -> (it, whether that was all)."""
        with self._wake:
            if not self._waiting and not self._closing:
                self._wake.wait(IDLE_SECONDS)
            keys, self._waiting = self._waiting, []
            return keys, self._closing

    def _commit(self, keys: list[Key]) -> None:
        for key in keys:
            self._known.add(*key)
        if self._fd < 0 or not keys:
            return
        data = b"".join(acknowledged.pack_batch(*key) for key in keys)
        try:
            _write_all(self._fd, data)
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)
        self._size += len(data)

    def _make_anew(self) -> None:
        """Where there is no file, or a long one: write a new one beside it, in its place then."""
        if self._fd < 0:
            if time.monotonic() < self._retry_at or not self._own():
                return
        elif self._size - self._base <= max(GROWTH_BYTES, self._base):
            return
        whole, part = acknowledged.pack(self._known), self._path.with_name(NAME + ".part")
        fd = -1
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
            _write_all(fd, whole)
            os.fsync(fd)
            part.replace(self._path)
            _sync_folder(self._folder)
            self._fd, fd = fd, self._fd
            self._size = self._base = len(whole)
        except OSError as error:
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
