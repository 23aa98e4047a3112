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

import contextlib
import logging
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lanterne.collector.errors import ListenError
from lanterne.collector.handover import Item, Unpacker
from lanterne.collector.handshakes import Handshakes, traced
from lanterne.collector.link import (
    CROWDED,
    ITEMS,
    LOG,
    ORIGINS,
    PORT,
    START,
    START_SECONDS,
    STATS,
    STOP,
    STRIDE,
    Link,
)
from lanterne.service import log as logs

log = logging.getLogger(__name__)

CHILD = "lanterne.collector.intake_child"  # started as a program: this process never loads grpc
JOURNAL = "journal_"  # counts of that name are not of batches
STOP_SECONDS = 10.0
SOCKET_BYTES = 4 << 20


class Intake:
    """The parent's end: listen, start, receive until it raises EOFError, stop."""

    def __init__(
        self,
        *,
        limits: Mapping[str, int],
        overloaded: Callable[[], None] = lambda: None,
        record: Mapping[str, object] | None = None,
        admission: Mapping[str, object] | None = None,
        state: Path | None = None,
    ) -> None:
        """limits: batch_bytes, nodes, items, bytes: the last two bound what waits in the child.
        record: what the child records and where (None: nothing), see intake_child.
        admission: who may report, and how much (None: anybody), see admission_options.
        state: the folder where the child keeps what it acknowledged (None: nowhere).
        """
        self._limits = dict(limits)
        self._record = dict(record) if record else None
        self._admission = dict(admission) if admission else None
        self._state = state
        self._handshakes: Handshakes | None = None
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
        options = {
            **self._limits,
            "address": address,
            "log": (logs.level(), logs.format_in_force()),
            "record": self._record,
            "admission": self._admission,
            "state": str(self._state or ""),
        }
        self._child = subprocess.Popen(
            [sys.executable, "-m", CHILD, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=traced(os.environ),
        )
        if self._child.stderr is not None:
            self._handshakes = Handshakes(self._child.stderr)  # type: ignore[arg-type]
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

    def tell(self, origins: Mapping[str, tuple[object, ...]]) -> None:
        """By node: what its agent is to know of communicators that were met running; see
        analyse.origins. Of other nodes what was told before holds."""
        if origins and self._link is not None and self._serving:
            plain = {node: tuple(told) for node, told in origins.items()}
            self._link.send(ORIGINS, marshal.dumps(plain))

    def log(self, level: str, format: str) -> None:
        """How the child writes its log from now on."""
        if self._link is not None and self._serving:
            with contextlib.suppress(OSError):  # it has ended: `receive` tells
                self._link.send(LOG, marshal.dumps((level, format)))

    @property
    def serving(self) -> bool:
        return self._serving and self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        return -1 if self._child is None else self._child.pid

    def counts(self) -> Mapping[str, int]:
        failed = self._handshakes.failed if self._handshakes else {}
        mine = {k: v for k, v in self._stats[0].items() if not k.startswith(JOURNAL)}
        return mine | {f"streams_{cause}": n for cause, n in failed.items()}

    def journal_errors(self) -> Mapping[str, int]:
        """By reason; empty where nothing is kept."""
        return {k: v for k, v in self._stats[0].items() if k.startswith(JOURNAL)}

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
        if self._handshakes is not None:
            self._handshakes.join(STOP_SECONDS)
