"""The thread between the queue and the spool: the only one that waits for the disk.

A batch that is acknowledged soon never touches the disk; what is not is on it within
`sync_seconds`, or at once where memory is full. A disk that is full, slow or broken costs a metric
and one log line: batches stay in memory, within its bounds, and the disk is tried again.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from lanterne.agent.errors import SpoolError
from lanterne.agent.outbox import Backing, Outbox
from lanterne.agent.spool import Spool

log = logging.getLogger(__name__)

TURN_BYTES = 16 << 20  # copied at a time: what is being written is in memory twice
RETRY_SECONDS = 5.0
SLOW_SECONDS = 5.0  # a write that takes longer is no backing for the queue
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class SpoolState:
    """What the agent tells of it."""

    success: bool
    batches: int  # on disk and wanted
    bytes: int
    written: int  # batches, since the start
    restored: int  # that earlier runs left
    errors: dict[str, int] = field(default_factory=dict)  # by reason
    unclean: bool = False  # the run before was not ended in order


class Keeper:
    def __init__(self, spool: Spool, outbox: Outbox, sync_seconds: float):
        self._spool = spool
        self._outbox = outbox
        self._age = sync_seconds / 2
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._open = False
        self._reason = ""  # why it does not work; empty: it does
        self._busy_since: float | None = None
        self._slow = False
        self._written = self._restored = 0
        self._errors = Counter(full=0, failed=0, slow=0, unusable=0)

    def start(self) -> None:
        """Take up what earlier runs left, so that it goes out first; then keep up in the thread."""
        self._outbox.backing = Backing(self.usable, self._wake.set, self._spool.read)
        self._try_open()
        self._thread.start()

    def usable(self) -> bool:
        """Whether the disk can be counted on just now. Any thread."""
        since = self._busy_since
        slow = since is not None and time.monotonic() - since > SLOW_SECONDS
        if slow and not self._slow:
            self._slow = True
            self._errors["slow"] += 1
            log.error("spool is slow: batches are kept in memory", extra=self._where())
        return self._open and not self._reason and not slow

    def state(self) -> SpoolState:
        return SpoolState(
            success=self.usable(),
            batches=self._spool.batches,
            bytes=self._spool.disk_bytes,
            written=self._written,
            restored=self._restored,
            errors=dict(self._errors),
            unclean=self._spool.unclean,
        )

    def close(self, timeout: float) -> bool:
        """Bring what is not acknowledged onto the disk; -> whether it all is."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return self.usable() and not self._outbox.unspooled(float("inf"), 1)

    # -- thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            woken = self._wake.wait(RETRY_SECONDS if self._reason else self._age)
            if self._reason and woken and not self._closing.is_set():
                # Woken for want of memory, by every batch: the disk is not asked that often.
                self._closing.wait(RETRY_SECONDS)
            self._wake.clear()
            if not self._closing.is_set():
                self._turn(time.monotonic() if woken else time.monotonic() - self._age)
        self._turn(float("inf"))
        self._spool.close()

    def _turn(self, before: float) -> None:
        """Write what was offered before then and is not acknowledged."""
        if not self._open and not self._try_open():
            return
        while True:
            fresh = self._outbox.unspooled(before, TURN_BYTES)
            released = self._outbox.take_released()
            if not fresh and not released:
                return
            self._busy_since = time.monotonic()
            result = self._spool.append(fresh, released)
            self._busy_since = None
            self._outbox.spooled(result.places)
            self._outbox.given_up(result.evicted)
            self._outbox.given_up(result.too_large)
            self._written += len(result.places)
            if result.error is not None:
                reason = "full" if result.error.errno in FULL else "failed"
                self._fail(reason, result.error.strerror or str(result.error))
                return
            self._well()

    def _try_open(self) -> bool:
        try:
            found = self._spool.open()
        except SpoolError as error:
            self._fail("unusable", str(error))
            return False
        except OSError as error:
            self._fail("unusable", f"{error.strerror or error}")
            return False
        self._open = True
        self._restored += len(found)
        self._outbox.dropped["spool_damaged"] += self._spool.damaged
        self._outbox.restore(found)
        self._well()
        if self._spool.unclean:
            log.warning("the run before was killed: what it held in memory is lost")
        if found or self._spool.damaged:
            log.info(
                "batches of earlier runs are sent first",
                extra={"batches": len(found), "damaged": self._spool.damaged, **self._where()},
            )
        return True

    def _fail(self, reason: str, text: str) -> None:
        self._errors[reason] += 1
        if not self._reason:
            log.error(
                "spool cannot be used: batches are kept in memory only; it is tried again",
                extra={"reason": text, **self._where()},
            )
        self._reason = reason

    def _well(self) -> None:
        if self._reason or self._slow:
            log.info("spool works again", extra=self._where())
        self._reason, self._slow = "", False

    def _where(self) -> dict[str, object]:
        return {"path": str(self._spool.folder)}
