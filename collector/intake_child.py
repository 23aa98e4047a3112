"""The ingest process: frames in, acknowledgements out, what passes over to the analysis."""

from __future__ import annotations

import ctypes
import logging
import marshal
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.errors import ListenError, RecordingError
from lanterne.collector.handover import Item, Packer
from lanterne.collector.ingest import Ingest
from lanterne.collector.ingest_config import IngestConfig, ingest_config
from lanterne.collector.journal import Journal
from lanterne.collector.link import (
    CROWDED,
    ITEMS,
    LOG,
    ORIGINS,
    PORT,
    PROBLEM,
    START,
    START_SECONDS,
    STATS,
    STOP,
    STRIDE,
    Link,
)
from lanterne.collector.recorder import Recorder
from lanterne.collector.recording import Header
from lanterne.service import log as logs
from lanterne.service.errors import CertificateError
from lanterne.service.systemd import mark_priorities

log = logging.getLogger("lanterne.collector.intake")

CHUNK_ITEMS = 64
STATS_SECONDS = 0.5
GATHER_SECONDS = 0.02  # items are handed over this often: a thread woken for each would cost more
CROWDED_SHARE = 0.75  # of a bound: from here on fewer instances are asked for, before any refusal
PR_SET_PDEATHSIG = 1
OTHER_DESCRIPTORS = 256  # than connections: files, libraries, those of gRPC


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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent says when
    link = Link(socket.socket(fileno=fd))
    first = link.receive(START_SECONDS)
    if first is None:
        return
    options = marshal.loads(first[1])  # our own parent's
    _configure_log(*options["log"])
    outbox = Outbox(link, options["items"], options["bytes"], options["nodes"])
    stride = [1]
    ingest = Ingest(
        on_batch=outbox.take,
        stride=lambda: stride[0],
        config=_with_descriptors(
            ingest_config(options["batch_bytes"], options["nodes"], options["admission"])
        ),
    )
    recorder = journal = None
    try:
        port = ingest.listen(options["address"])
        if options["record"]:
            recorder = _recorder(options["record"])
            ingest.record(recorder.take)
        if options["state"]:
            journal = Journal(Path(options["state"]), ingest.seen)
            journal.open()
            ingest.keep(journal)
    except (CertificateError, ListenError, RecordingError) as error:
        link.send(PROBLEM, str(error).encode())
        return
    link.send(PORT, b"%d" % port)

    def stats() -> bytes:
        connected = sorted(ingest.connected())
        kept = {**(recorder.counts() if recorder else {}), **(journal.errors() if journal else {})}
        return marshal.dumps(
            ({**ingest.counts(), **kept}, dict(ingest.refused()), connected, len(outbox))
        )

    hand_over = threading.Thread(target=_hand_over, args=(outbox, stats), daemon=True)
    hand_over.start()
    try:
        while (message := link.receive(None)) is not None:
            kind, body = message
            if kind == STRIDE:
                stride[0] = int(body)
            elif kind == ORIGINS:
                ingest.origins.take(marshal.loads(body))
            elif kind == START:
                ingest.start()
            elif kind == LOG:
                _configure_log(*marshal.loads(body))
            elif kind == STOP:
                break
    except (EOFError, OSError):
        os._exit(1)
    ingest.stop()
    if recorder is not None:
        recorder.close()
    if journal is not None:
        journal.close()
    outbox.close()
    hand_over.join()


def _configure_log(level: str, format: logs.Format) -> None:
    logs.configure(level, format)
    mark_priorities(logging.getLogger())


def _with_descriptors(config: IngestConfig) -> IngestConfig:
    """As many descriptors as connections are wanted, or fewer connections: a server that has run
    out of them turns its processor and no stream."""
    wanted = config.connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = max(16, soft - OTHER_DESCRIPTORS)
    if most >= config.connections:
        return config
    log.warning(
        "fewer connections than ingest.max_connections: raise the limit of open files",
        extra={"connections": most, "open_files": soft},
    )
    return replace(config, connections=most)


def _recorder(o: Mapping[str, Any]) -> Recorder:
    """Raises RecordingError."""
    return Recorder(
        Path(o["path"]),
        max_bytes=o["max_bytes"],
        files=o["files"],
        sync_seconds=o["sync_seconds"],
        header=lambda: Header(
            boot_id=o["boot_id"],
            created_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            version=o["version"],
            engine=o["engine"],
        ),
    )


def _hand_over(outbox: Outbox, stats: Callable[[], bytes]) -> None:
    try:
        outbox.run(stats)
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    _child(int(sys.argv[1]), int(sys.argv[2]))
