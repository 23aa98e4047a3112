"""The one thread that owns the engine: items in, latest snapshot out.

Everything else only reads the immutable snapshot it leaves, so the analysis needs no locks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.clock import ClockObservation
from lanterne.collector.snapshot import Snapshot

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0

Item = DecodedBatch | ClockObservation


class Loop:
    """Applies items (batches, clock observations) in order and takes a snapshot every `seconds`.

    receive: the next items, empty after so many seconds without, EOFError at the end. apply,
    snapshot: the engine's. All three are called in this thread only. A batch or a snapshot that
    fails is logged and counted, and the loop goes on: one bad node must not blind the others.
    ended: called once all that was received has been applied and the last snapshot is taken.
    """

    def __init__(
        self,
        *,
        receive: Callable[[float], Sequence[Item]],
        apply: Callable[[Item], None],
        snapshot: Callable[[float], Snapshot],
        seconds: float,
        clock: Callable[[], float] = time.time,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._receive = receive
        self._apply = apply
        self._snapshot = snapshot
        self.seconds = seconds  # may be set at any time
        self._clock = clock
        self._ended = ended
        self._latest: Snapshot | None = None
        self._taken = float("-inf")  # CLOCK_MONOTONIC seconds
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.errors = 0

    def latest(self) -> Snapshot | None:
        return self._latest

    @property
    def age(self) -> float:
        """Seconds since the latest snapshot was taken, whatever the wall clock did; inf: none."""
        return time.monotonic() - self._taken

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, once the source has been told to end."""
        if not self._thread.is_alive():
            return
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.error("the analysis did not end within %.0f s", STOP_SECONDS)

    def _run(self) -> None:
        due = time.monotonic()
        going = True
        while going:
            if time.monotonic() >= due:
                self._take()
                # From now, not from when it was due: after a long snapshot batches come first.
                due = time.monotonic() + self.seconds
            going = self._next(max(0.0, due - time.monotonic()))
        self._take()
        self._ended()

    def _next(self, timeout: float) -> bool:
        """Applies what comes; False at the end."""
        try:
            items = self._receive(timeout)
        except EOFError:
            return False
        for item in items:
            try:
                self._apply(item)
            except Exception:
                self.errors += 1
                log.exception("%s of node %s could not be applied", type(item).__name__, item.node)
        return True

    def _take(self) -> None:
        try:
            self._latest = self._snapshot(self._clock())
            self._taken = time.monotonic()
        except Exception:
            self.errors += 1
            log.exception("no snapshot could be taken")
