"""The ingest process: frames in, acknowledgements out, what passes over to the analysis."""

from __future__ import annotations

import ctypes
import logging
import marshal
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.checks import Limits
from lanterne.collector.errors import ListenError
from lanterne.collector.handover import Item, Packer
from lanterne.collector.ingest import Ingest, IngestConfig
from lanterne.collector.link import (
    CROWDED,
    ITEMS,
    PORT,
    PROBLEM,
    START,
    START_SECONDS,
    STATS,
    STOP,
    STRIDE,
    Link,
)

CHUNK_ITEMS = 64
STATS_SECONDS = 0.5
GATHER_SECONDS = 0.02  # items are handed over this often: a thread woken for each would cost more
CROWDED_SHARE = 0.75  # of a bound: from here on fewer instances are asked for, before any refusal
PR_SET_PDEATHSIG = 1


class Outbox:
    """In the child: taken from the agents, not yet handed over. Bounded in items and bytes."""

    def __init__(self, link: Link, items: int, most_bytes: int, nodes: int) -> None:
        self._link = link
        self._most, self._most_bytes = items, most_bytes
        self._packer = Packer(nodes)
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._closing = False
        self._crowded = False

    def take(self, item: Item) -> bool:
        """False when full. Never blocks for long."""
        size = item.head.encoded_bytes if isinstance(item, DecodedBatch) else 0
        with self._lock:
            waiting = self._bytes + size
            full = len(self._items) >= self._most or (self._items and waiting > self._most_bytes)
            self._crowded |= (
                len(self._items) >= CROWDED_SHARE * self._most
                or waiting > CROWDED_SHARE * self._most_bytes
            )
            if full:
                return False
            self._items.append(item)
            self._bytes += size
            return True

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """No more will be taken; `run` ends when all has been handed over."""
        self._closing = True

    def run(self, stats: Callable[[], bytes]) -> None:
        """Hand over until closed. Raises OSError when the parent has ended."""
        due = 0.0
        while True:
            if not self._closing and len(self._items) < CHUNK_ITEMS:
                time.sleep(GATHER_SECONDS)
            with self._lock:
                last = self._closing
                count = min(len(self._items), CHUNK_ITEMS)
                chunk = [self._items.popleft() for _ in range(count)]
                self._bytes -= sum(
                    i.head.encoded_bytes for i in chunk if isinstance(i, DecodedBatch)
                )
                crowded, self._crowded = self._crowded, False
                last &= not self._items
            if crowded:
                self._link.send(CROWDED)
            if chunk:
                self._link.send(ITEMS, self._packer.pack(chunk))
            if last or time.monotonic() >= due:
                self._link.send(STATS, stats())
                due = time.monotonic() + STATS_SECONDS
            if last:
                return


def _child(fd: int, parent: int) -> None:
    """The ingest process. Never returns before its parent has ended or asked it to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent says when
    link = Link(socket.socket(fileno=fd))
    first = link.receive(START_SECONDS)
    if first is None:
        return
    options = marshal.loads(first[1])  # our own parent's
    logging.basicConfig(
        level=options["level"],
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    outbox = Outbox(link, options["items"], options["bytes"], options["nodes"])
    stride = [1]
    ingest = Ingest(
        on_batch=outbox.take,
        stride=lambda: stride[0],
        config=IngestConfig(
            limits=Limits(batch_bytes=options["batch_bytes"]), nodes=options["nodes"]
        ),
    )
    try:
        port = ingest.listen(options["address"])
    except ListenError as error:
        link.send(PROBLEM, str(error).encode())
        return
    link.send(PORT, b"%d" % port)

    def stats() -> bytes:
        connected = sorted(ingest.connected())
        return marshal.dumps(
            (dict(ingest.counts()), dict(ingest.refused()), connected, len(outbox))
        )

    hand_over = threading.Thread(target=_hand_over, args=(outbox, stats), daemon=True)
    hand_over.start()
    try:
        while (message := link.receive(None)) is not None:
            kind, body = message
            if kind == STRIDE:
                stride[0] = int(body)
            elif kind == START:
                ingest.start()
            elif kind == STOP:
                break
    except (EOFError, OSError):
        os._exit(1)
    ingest.stop()
    outbox.close()
    hand_over.join()


def _hand_over(outbox: Outbox, stats: Callable[[], bytes]) -> None:
    try:
        outbox.run(stats)
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    _child(int(sys.argv[1]), int(sys.argv[2]))
