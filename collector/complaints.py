"""What is wrong with an agent is logged once, not with every frame; the counters tell how often."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

AGAIN_SECONDS = 3600.0
MAX_REMEMBERED = 4096
MOST_A_MINUTE = 60  # of all agents together: names of nodes can be invented


class Complaints:
    """A line an hour for each (agent, cause). Used in one thread; `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: OrderedDict[Hashable, float] = OrderedDict()
        self._minute = 0.0
        self._in_minute = 0

    def stream(self, peer: str, cause: str, reason: str) -> None:
        """A stream was ended."""
        if self._first((peer, cause)):
            log.warning("agent refused", extra={"peer": peer, "cause": cause, "reason": reason})

    def handshake(self, peer: str, cause: str, remedy: str, reason: str) -> None:
        """Of TLS; who it was is not known but for the address."""
        if self._first((peer, cause)):
            extra = {"peer": peer, "cause": cause, "reason": reason}
            log.warning("connection refused: %s", remedy, extra=extra)

    def batch(self, peer: str, node: str, cause: str, reason: str) -> None:
        """A batch can never be applied."""
        if self._first((peer, node, cause)):
            fields = {"node": node, "peer": peer, "cause": cause, "reason": reason}
            log.warning("batch refused", extra=fields)

    def _first(self, key: Hashable) -> bool:
        now = self._clock()
        said = self._said.get(key)
        if said is not None and now - said < AGAIN_SECONDS:
            return False
        if now - self._minute >= 60:
            self._minute, self._in_minute = now, 0
        if self._in_minute >= MOST_A_MINUTE:
            return False
        self._in_minute += 1
        self._said[key] = now
        self._said.move_to_end(key)
        if len(self._said) > MAX_REMEMBERED:
            self._said.popitem(last=False)
        return True
