"""The one thread that owns the engine: bounded queue of items in, latest snapshot out.

Everything else only reads the immutable snapshot it leaves, so the analysis needs no locks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.clock import ClockObservation
from lanterne.collector.snapshot import Snapshot

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0

Item = DecodedBatch | ClockObservation


class Loop:
    """Applies items (batches, clock observations) in order and takes a snapshot every `seconds`.

    apply, snapshot: the engine's; both are called in this thread only. A batch or a snapshot that
    fails is logged and counted, and the loop goes on: one bad node must not blind the others.
    """

    def __init__(
        self,
        *,
        apply: Callable[[Item], None],
        snapshot: Callable[[float], Snapshot],
        depth: int,
        seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._apply = apply
        self._snapshot = snapshot
        self._queue: queue.Queue[Item | None] = queue.Queue(depth)
        self._seconds = seconds
        self._clock = clock
        self._latest: Snapshot | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.errors = 0

    def offer(self, item: Item) -> bool:
        """False when the queue is full: the agent is to keep the batch and send it again."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    def latest(self) -> Snapshot | None:
        return self._latest

    @property
    def depth(self) -> int:
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Applies what is queued, takes a last snapshot and ends. Offer nothing afterwards."""
        if not self._thread.is_alive():
            return
        end = time.monotonic() + STOP_SECONDS
        try:
            self._queue.put(None, timeout=STOP_SECONDS)
        except queue.Full:
            log.error("the analysis did not take what was queued within %.0f s", STOP_SECONDS)
            return
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.error("the analysis did not end within %.0f s", STOP_SECONDS)

    def _run(self) -> None:
        due = time.monotonic()
        going = True
        while going:
            if time.monotonic() >= due:
                self._take()
                # From now, not from when it was due: after a long snapshot batches come first.
                due = time.monotonic() + self._seconds
            going = self._next(max(0.0, due - time.monotonic()))
        self._take()

    def _next(self, timeout: float) -> bool:
        """Applies one item; False when the end was asked for."""
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            return True
        if item is None:
            return False
        try:
            self._apply(item)
        except Exception:
            self.errors += 1
            log.exception("%s of node %s could not be applied", type(item).__name__, item.node)
        return True

    def _take(self) -> None:
        try:
            self._latest = self._snapshot(self._clock())
        except Exception:
            self.errors += 1
            log.exception("no snapshot could be taken")
