"""Wiring of what tells of experts: the intake, files, logs, engines. Each may fail alone.

Everything slow happens in one thread of its own; `take` is called once a window and never waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lanterne.agent.engine_log import EngineLog
from lanterne.agent.engine_metrics import KINDS
from lanterne.agent.engines import Endpoint, Engine
from lanterne.agent.errors import IntakeError
from lanterne.agent.expert_counts import ExpertCounts, Load
from lanterne.agent.expert_files import ExpertFiles, Watched
from lanterne.agent.expert_wire import Reading
from lanterne.agent.intake import Intake

log = logging.getLogger(__name__)

LOG_KINDS = ("vllm_log", "sglang_log")


@dataclass(frozen=True)
class Settings:
    """The section [experts] of the configuration."""

    socket: str
    listen: str
    max_body_bytes: int
    max_per_second: float
    poll_seconds: float
    engines: Sequence[Endpoint]
    files: Sequence[Watched]  # of any kind, logs included


class ExpertSources:
    """Writes into `success` under intake, engines, expert_files and engine_logs, where used."""

    def __init__(self, settings: Settings, success: dict[str, bool]) -> None:
        self.counts = ExpertCounts()
        self._success = success
        self._readings: dict[str, Reading] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._seconds = settings.poll_seconds
        self._intake = self._listen(settings)
        self._engines = [Engine(e, self.counts) for e in settings.engines if e.kind in KINDS]
        self._logs = [
            EngineLog(f.path, f.workload, f.kind.removesuffix("_log"))
            for f in settings.files
            if f.kind in LOG_KINDS
        ]
        watched = tuple(f for f in settings.files if f.kind not in LOG_KINDS)
        self._files = ExpertFiles(watched) if watched else None
        self._failing: set[int] = set()
        self._thread: threading.Thread | None = None
        if self._engines or self._logs or self._files:
            self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
            self._thread.start()

    def _listen(self, settings: Settings) -> Intake | None:
        path = Path(settings.socket) if settings.socket else None
        if path is not None and not path.parent.is_dir():
            log.info("no intake socket: its folder does not exist", extra={"path": str(path)})
            path = None
        if path is None and not settings.listen:
            return None
        try:
            intake = Intake(
                self.counts,
                path=path,
                listen=settings.listen,
                max_body_bytes=settings.max_body_bytes,
                max_per_second=settings.max_per_second,
            )
        except IntakeError as error:
            self._success["intake"] = False
            log.error("no intake", extra={"reason": str(error)})
            return None
        self._success["intake"] = True
        return intake

    @property
    def port(self) -> int:
        """Of the TCP intake; 0 where there is none."""
        return self._intake.port if self._intake is not None else 0

    def _run(self) -> None:
        while True:
            self._poll()
            if self._stop.wait(self._seconds):
                return

    def _poll(self) -> None:
        if self._files is not None:
            for told in self._files.poll():
                self.counts.add(told)
            self._success["expert_files"] = self._files.working
        for name, sources in (("engines", self._engines), ("engine_logs", self._logs)):
            if sources:
                good = [self._read(name, source.poll) for source in sources]
                self._success[name] = all(good)

    def _read(self, name: str, poll: Callable[[], Reading | None]) -> bool:
        key = id(getattr(poll, "__self__", poll))
        try:
            reading = poll()
        except Exception as error:  # whatever a foreign page holds must not end the thread
            if key not in self._failing:
                log.warning("source failed", extra={"source": name, "reason": str(error)})
                self._failing.add(key)
            return False
        self._failing.discard(key)
        if reading is not None:
            with self._lock:
                self._readings[f"{reading.engine} {reading.address}"] = reading
        return True

    def take(self) -> tuple[list[Load], list[Reading]]:
        """Everything since it was last asked."""
        with self._lock:
            readings, self._readings = list(self._readings.values()), {}
        return self.counts.take(), readings

    def refused(self) -> dict[str, int]:
        """What was told and not taken, by cause."""
        found = dict(self.counts.dropped)
        if self._intake is not None:
            for cause, count in dict(self._intake.refused).items():
                found[cause] = found.get(cause, 0) + count
        if self._files is not None:
            found["file"] = self._files.failed
        return found

    def close(self) -> None:
        self._stop.set()
        if self._intake is not None:
            self._intake.close()
        if self._thread is not None:
            self._thread.join(2.0)
