"""Expert load and engine readings of all workloads, bounded; what does not fit is counted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from lanterne.collector.analyse.expert_stream import Key, Stream
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.reports import (
    LOGICAL,
    PHYSICAL,
    EngineReading,
    ExpertLoad,
    engine_reading_of,
    expert_load_of,
)
from lanterne.collector.snapshot import EngineView, ExpertView

Saved = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]

MAX_STREAMS = 256
MAX_STREAMS_OF_WORKLOAD = 16
MAX_ENGINES = 1024
MAX_BYTES = 512 << 20
HOUR_NS = 3600 * 10**9
# What says more of the experts comes first where several sources tell of one workload.
_WORTH = {PHYSICAL: 2, LOGICAL: 1}


class Experts:
    """`add` batches, `close` windows, look at `views` and `engines`."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._streams: dict[Key, Stream] = {}
        self._engines: dict[tuple[str, str, str], tuple[int, EngineReading]] = {}
        self._max_bytes = max_bytes
        self.dropped: Counter[str] = Counter()

    def add(self, batch: DecodedBatch) -> None:
        for data in batch.reports.expert_loads:
            self._add(expert_load_of(data), batch.received_ns)
        for data in batch.reports.engine_readings:
            reading = engine_reading_of(data)
            key = (reading.workload, reading.engine, reading.address)
            if key not in self._engines and len(self._engines) >= MAX_ENGINES:
                self.dropped["engines"] += 1
                continue
            self._engines[key] = (batch.received_ns, reading)

    def _add(self, told: ExpertLoad, now_ns: int) -> None:
        key = Key(told.workload, told.engine, told.source, told.model, told.unit)
        experts = told.counts.shape[1]
        stream = self._streams.get(key)
        if stream is not None and stream.experts != experts:
            self.dropped["expert_reshapes"] += 1  # another number of experts: another model
            del self._streams[key]
            stream = None
        if stream is None:
            stream = Stream(key, told.layer, experts)
            if not self._room(key, stream, now_ns):
                self.dropped["expert_loads"] += 1
                return
            self._streams[key] = stream
        lost = stream.add(told)
        if lost:
            self.dropped["expert_layers"] += lost
        stream.last_ns = now_ns

    def _room(self, key: Key, new: Stream, now_ns: int) -> bool:
        """Whether one more fits, once what was silent for an hour is gone."""
        self._forget(now_ns)
        if len(self._streams) >= MAX_STREAMS:
            return False
        if sum(k.workload == key.workload for k in self._streams) >= MAX_STREAMS_OF_WORKLOAD:
            return False
        # Its history will take what a full ring does, 32 MiB at most.
        used = sum(s.nbytes for s in self._streams.values())
        return used + new.nbytes + min(32 << 20, 61 * new.load.size * 4) <= self._max_bytes

    def _forget(self, now_ns: int) -> None:
        for key, stream in list(self._streams.items()):
            if now_ns - stream.last_ns > HOUR_NS:
                del self._streams[key]

    def close(self, now: float, now_ns: int) -> None:
        """A window has ended. `now`: UNIX seconds; `now_ns`: the clock of received_ns."""
        self._forget(now_ns)
        for stream in self._streams.values():
            stream.close(now)

    def views(self, now_ns: int, idle_ns: int) -> tuple[ExpertView, ...]:
        """Of every stream that told something lately; `primary` marks one a workload."""
        live = [
            (s, s.view)
            for s in self._streams.values()
            if s.view is not None and now_ns - s.last_ns <= idle_ns
        ]
        best: dict[str, tuple[tuple[int, float], Key]] = {}
        for stream, view in live:
            worth = (_WORTH.get(stream.key.unit, 0), float(view.load.sum()))
            if worth > best.get(stream.key.workload, ((-1, 0.0), stream.key))[0]:
                best[stream.key.workload] = (worth, stream.key)
        chosen = {key for _, key in best.values()}
        return tuple(view.as_primary(stream.key in chosen) for stream, view in live)

    def engines(self, now_ns: int, idle_ns: int) -> tuple[EngineView, ...]:
        for key, (seen_ns, _) in list(self._engines.items()):
            if now_ns - seen_ns > idle_ns:
                del self._engines[key]
        return tuple(
            EngineView(r.workload, r.engine, r.address, r.values) for _, r in self._engines.values()
        )

    # -- over a restart of the collector ------------------------------------------------------

    def export(self) -> list[Saved]:
        """The hour of every stream, to be given to `restore` after a restart."""
        return [saved for s in self._streams.values() if (saved := s.export()) is not None]

    def restore(self, items: Iterable[Saved], now_ns: int) -> None:
        """Take back what `export` gave; raises ValueError where it cannot have, nothing taken."""
        found: dict[Key, Stream] = {}
        for facts, arrays in items:
            try:
                stream = Stream.restored(facts, arrays)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"state of expert load is not as written: {error}") from error
            stream.last_ns = now_ns
            found[stream.key] = stream
        for key, stream in found.items():
            if key not in self._streams and self._room(key, stream, now_ns):
                self._streams[key] = stream
