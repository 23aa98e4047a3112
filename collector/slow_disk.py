"""A disk that takes long is told: counted and logged while it lasts, not when it is over."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import TracebackType

log = logging.getLogger(__name__)

SLOW_SECONDS = 2.0


class SlowDisk:
    """`with` around each piece of work of the one thread that waits for the disk; `look` from any
    other one, now and then."""

    def __init__(self, path: Path, consequence: str) -> None:
        """consequence: what follows for whoever reads the log."""
        self._path = path
        self._consequence = consequence
        self._lock = threading.Lock()
        self._since: float | None = None  # CLOCK_MONOTONIC seconds
        self._told = False
        self.times = 0  # that it took long

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.look()
        with self._lock:
            self._since = None
            told, self._told = self._told, False
        if told:
            log.info("%s: the disk answers again", self._path)

    @property
    def seconds(self) -> float:
        """For which it has been at work; 0 where it is not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def look(self) -> None:
        with self._lock:
            if self._told or self.seconds <= SLOW_SECONDS:
                return
            self._told = True
            self.times += 1
        log.error("%s: the disk does not answer: %s", self._path, self._consequence)
