"""Ingest in a process of its own, and the analysis's end of it.

Both would fit into one process, but not onto one core: reading, decoding and acknowledging the
frames of thousands of agents takes as long as the analysis, and two threads that want Python's
interpreter lock at the same time slow each other down. So a child process runs `Ingest`; what
passes comes over a socket pair, many items at a time, read by the analysis's own thread. Where it
cannot keep up, the socket fills, then the child's bounded outbox, then agents are told to come
again.

The child ends with its parent, however that ends: what the parent knew is gone then, and nothing
may be acknowledged that no analysis will see.
"""

from __future__ import annotations

import logging
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

from lanterne.collector.errors import ListenError
from lanterne.collector.handover import Item, Unpacker
from lanterne.collector.link import (
    CROWDED,
    ITEMS,
    PORT,
    START,
    START_SECONDS,
    STATS,
    STOP,
    STRIDE,
    Link,
)

log = logging.getLogger(__name__)

CHILD = "lanterne.collector.intake_child"  # started as a program: this process never loads grpc
STOP_SECONDS = 10.0
SOCKET_BYTES = 4 << 20


class Intake:
    """The parent's end: listen, start, receive until it raises EOFError, stop."""

    def __init__(
        self,
        *,
        limits: Mapping[str, int],
        overloaded: Callable[[], None] = lambda: None,
    ) -> None:
        """limits: batch_bytes, nodes, items, bytes: the last two bound what waits in the child."""
        self._limits = dict(limits)
        self._overloaded = overloaded
        self._unpacker = Unpacker()
        self._link: Link | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stats: tuple[dict[str, int], dict[str, int], list[str], int] = ({}, {}, [], 0)
        self._stride = 1
        self._serving = False

    def listen(self, address: str) -> int:
        """Start the child and bind "host:port" -> the port. Raises ListenError."""
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        options = {**self._limits, "address": address, "level": logging.getLogger().level}
        self._child = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._link = Link(mine)
        self._link.send(START, marshal.dumps(options))
        try:
            answer = self._link.receive(START_SECONDS)
        except EOFError:
            answer = None
        if answer is not None and answer[0] == PORT:
            return int(answer[1])
        self._end_child()
        reason = answer[1].decode() if answer else "the ingest process did not start: see above"
        raise ListenError(reason)

    def start(self) -> None:
        """Serve agents."""
        if self._link is not None:
            self._link.send(START)
            self._serving = True

    def receive(self, timeout: float) -> list[Item]:
        """What has come; empty after `timeout` seconds without. Raises EOFError at the end."""
        if self._link is None:
            raise EOFError
        try:
            message = self._link.receive(timeout)
        except (EOFError, OSError):
            self._serving = False
            raise EOFError from None
        if message is None:
            return []
        kind, body = message
        if kind == ITEMS:
            return self._unpacker.unpack(body)
        if kind == STATS:
            self._stats = marshal.loads(body)  # our own child's
        elif kind == CROWDED:
            self._overloaded()
        return []

    def ask(self, stride: int) -> None:
        """What to ask of the agents from now on."""
        if stride != self._stride and self._link is not None and self._serving:
            self._stride = stride
            self._link.send(STRIDE, b"%d" % stride)

    @property
    def serving(self) -> bool:
        return self._serving and self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        return -1 if self._child is None else self._child.pid

    def counts(self) -> Mapping[str, int]:
        return self._stats[0]

    def refused(self) -> Mapping[str, int]:
        return self._stats[1]

    def connected(self) -> frozenset[str]:
        return frozenset(self._stats[2])

    @property
    def depth(self) -> int:
        """Items that wait in the child."""
        return self._stats[3]

    def stop(self) -> None:
        """Take nothing new; what was taken still comes, then the end."""
        if self._link is not None and self._serving:
            self._serving = False
            try:
                self._link.send(STOP)
            except OSError:
                log.error("the ingest process had ended")

    def close(self) -> None:
        """After the end has been received."""
        self._end_child()

    def _end_child(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._child is not None:
            try:
                self._child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
