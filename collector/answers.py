"""The acknowledgements of one stream, in the order of its frames, once the disk has their batches.

Waiting for the disk holds up nothing but the answers behind: frames are read and taken meanwhile,
other streams and health checks go on. A disk that takes longer than PATIENCE_SECONDS turns the
answer into RETRY; while it stays so, each further one into RETRY after PACE_SECONDS: agents are
slowed down, and none gives the connection up for want of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from lanterne.collector.journal import Journal
from lanterne.proto import telemetry_pb2 as pb

PATIENCE_SECONDS = 2.0
PACE_SECONDS = 0.25
TICK_SECONDS = 0.1  # at which those who wait look at the time
MOST_WAITING = 256  # of one stream; beyond it, nothing more is read


class Disk:
    """The event loop's side of the journal, if there is one."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._loop: asyncio.AbstractEventLoop | None = None  # in which somebody has waited
        self._news = asyncio.Event()
        self._ticking = False
        self._stuck_at = -1  # what was kept when somebody last waited in vain
        if journal is not None:
            journal.on_kept = self._kept

    def _kept(self) -> None:
        """In the journal's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._ticking = False
        news, self._news = self._news, asyncio.Event()
        news.set()

    def has(self, position: int) -> bool:
        return self._journal is None or position <= self._journal.kept

    async def wait(self, position: int) -> bool:
        """Whether it is there, or comes in time."""
        if self._journal is None:
            return True
        loop = self._loop = asyncio.get_running_loop()
        stuck = self._journal.kept <= self._stuck_at
        end = time.monotonic() + (PACE_SECONDS if stuck else PATIENCE_SECONDS)
        while position > (kept := self._journal.kept):
            if time.monotonic() >= end:
                self._stuck_at = kept
                return False
            if not self._ticking:
                self._ticking = True
                loop.call_later(TICK_SECONDS, self._wake)
            await self._news.wait()
        return True


class Waiting(NamedTuple):
    ack: pb.Ack
    received_ns: int
    position: int


class Answers:
    """give(…) for each frame in turn; `all`, or `close` where nobody listens any more."""

    def __init__(
        self,
        disk: Disk,
        send: Callable[[pb.Ack, int], Awaitable[object]],
        unkept: Callable[[pb.Ack], object],
    ) -> None:
        """send: stamps and writes an ack of a frame received at that time. unkept: is told of one
        whose batch the disk does not have in time, and makes it what is to be sent instead."""
        self._disk = disk
        self._send = send
        self._unkept = unkept
        self._waiting: deque[Waiting] = deque()
        self._room = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def give(self, ack: pb.Ack, received_ns: int, position: int) -> None:
        """Raises what the connection's end raises."""
        if not self._waiting and self._disk.has(position):
            await self._send(ack, received_ns)
            return
        self._waiting.append(Waiting(ack, received_ns, position))
        if self._writer is None or self._writer.done():
            if self._writer is not None:
                self._writer.result()
            self._writer = asyncio.create_task(self._write())
            self._writer.add_done_callback(_seen)
        while len(self._waiting) >= MOST_WAITING and not self._writer.done():
            self._room.clear()
            await self._room.wait()

    async def all(self) -> None:
        """Until nothing waits any more. Raises likewise."""
        if self._writer is not None:
            await self._writer

    def close(self) -> None:
        """What waits is not sent: the agent comes again with it."""
        if self._writer is not None:
            self._writer.cancel()

    async def _write(self) -> None:
        try:
            while self._waiting:
                ack, received_ns, position = self._waiting[0]
                if not await self._disk.wait(position):
                    self._unkept(ack)
                await self._send(ack, received_ns)
                self._waiting.popleft()
        finally:
            self._room.set()


def _seen(writer: asyncio.Task[None]) -> None:
    """Else asyncio would complain of every connection that ends with answers waiting."""
    if not writer.cancelled():
        writer.exception()
