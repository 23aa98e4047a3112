"""`lanterne-collector record FILE`: a collector that only keeps what agents send.

No analysis and no metrics: it needs little, and loses nothing. Where the disk cannot keep up,
agents are told to come again, as by any collector that is full.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lanterne.collector.admission_options import admission_options
from lanterne.collector.config import CollectorConfig
from lanterne.collector.frames import Item
from lanterne.collector.ingest import Ingest
from lanterne.collector.ingest_config import ingest_config
from lanterne.collector.recorder import Recorder
from lanterne.collector.recording import Header

log = logging.getLogger("lanterne.collector")

TOLD_SECONDS = 60.0  # between lines of the log
SIGNAL_SECONDS = 0.5  # until a signal is noticed, at the latest


def record(
    config: CollectorConfig,
    header: Callable[[], Header],
    started: Callable[[int], None] = lambda port: None,
    reload: Callable[[], None] = lambda: None,
) -> int:
    """Until SIGTERM or SIGINT; `started` gets the port. SIGHUP calls `reload`. Raises ListenError
    or RecordingError."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.put(number))
    room: list[Recorder] = []

    def take(item: Item) -> bool:
        return bool(room) and room[0].has_room()

    ingest = Ingest(
        on_batch=take,
        config=ingest_config(
            config.ingest.max_batch_bytes, config.ingest.max_nodes, admission_options(config)
        ),
    )
    port = ingest.listen(config.ingest.address)
    try:
        recorder = Recorder(
            Path(config.record.path),
            max_bytes=config.record.max_bytes,
            files=config.record.files,
            sync_seconds=config.record.sync_seconds,
            header=header,
        )
    except BaseException:
        ingest.stop()
        raise
    room.append(recorder)
    ingest.record(recorder.take)
    ingest.start()
    log.info("recording to %s; agents report to port %d (gRPC)", config.record.path, port)
    started(port)
    try:
        _tell(asked, reload, ingest, recorder)
    finally:
        ingest.stop()
        recorder.close()
    counts = recorder.counts()
    log.info(
        "%s: %d frames in %d bytes", config.record.path, counts["recorded_frames"],
        counts["recorded_bytes"],
    )  # fmt: skip
    return 0


def _tell(
    asked: queue.SimpleQueue[int], reload: Callable[[], None], ingest: Ingest, recorder: Recorder
) -> None:
    """How it goes, now and then; returns when a signal asks to stop."""
    due = time.monotonic() + TOLD_SECONDS
    while True:
        # In short waits: a signal that comes just before one begins does not end it.
        with contextlib.suppress(queue.Empty):
            if asked.get(timeout=SIGNAL_SECONDS) != signal.SIGHUP:
                return
            reload()
        counts = recorder.counts()
        if time.monotonic() < due:
            continue
        log.info(
            "%d nodes, %d frames in %d bytes, %d not recorded",
            len(ingest.connected()),
            counts["recorded_frames"],
            counts["recorded_bytes"],
            counts["recording_dropped_queue"] + counts["recording_dropped_disk"],
        )
        due += TOLD_SECONDS
