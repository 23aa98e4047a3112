"""The engine's thread: order, drain, and what a failing batch does to the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.clock import ClockObservation
from lanterne.collector.loop import Item, Loop
from lanterne.collector.snapshot import Snapshot
from tests.fixtures.snapshots import snapshot


def batch(sequence: int) -> Item:
    return cast(DecodedBatch, SimpleNamespace(node="n0", sequence=sequence))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Source:
    """What `Intake.receive` does, from a queue."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Item | None] = queue.Queue()
        self.put = self._queue.put

    def end(self) -> None:
        self._queue.put(None)

    def receive(self, timeout: float) -> Sequence[Item]:
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            return []
        if item is None:
            raise EOFError
        return [item]


class Engine:
    def __init__(self) -> None:
        self.applied: list[int] = []

    def apply(self, item: Item) -> None:
        assert not isinstance(item, ClockObservation)
        if item.sequence < 0:
            raise ValueError("defect")
        self.applied.append(item.sequence)

    def snapshot(self, now: float) -> Snapshot:
        return snapshot(taken_at=now, ingest={"rows": len(self.applied)})


def loop(engine: Engine, source: Source, seconds: float = 0.05) -> Loop:
    return Loop(
        receive=source.receive,
        apply=engine.apply,
        snapshot=engine.snapshot,
        seconds=seconds,
        clock=lambda: 7.0,
    )


def test_batches_are_applied_in_order_and_show_in_the_next_snapshot() -> None:
    engine, source = Engine(), Source()
    runs = loop(engine, source)
    assert runs.latest() is None
    runs.start()
    for i in range(8):
        source.put(batch(i))
    until(lambda: (found := runs.latest()) is not None and found.ingest["rows"] == 8)
    assert engine.applied == list(range(8))
    source.end()
    runs.join()
    assert not runs.alive


def test_at_the_end_everything_received_is_in_the_last_snapshot() -> None:
    engine, source = Engine(), Source()
    ended = threading.Event()
    runs = Loop(
        receive=source.receive,
        apply=engine.apply,
        snapshot=engine.snapshot,
        seconds=3600,
        clock=lambda: 7.0,
        ended=ended.set,
    )
    for i in range(4):
        source.put(batch(i))
    source.end()
    runs.start()
    assert ended.wait(20)
    runs.join()
    found = runs.latest()
    assert found is not None
    assert found.ingest["rows"] == 4
    assert found.taken_at == 7.0


def test_a_defect_in_one_batch_is_counted_and_the_others_go_on() -> None:
    engine, source = Engine(), Source()
    runs = loop(engine, source)
    runs.start()
    for i in (1, -1, 2):
        source.put(batch(i))
    until(lambda: engine.applied == [1, 2])
    assert runs.errors == 1
    source.end()
    runs.join()


def test_a_failing_snapshot_is_counted_and_the_older_one_stays() -> None:
    engine, source = Engine(), Source()
    fail = threading.Event()

    def take(now: float) -> Snapshot:
        if fail.is_set():
            raise ValueError("defect")
        return engine.snapshot(now)

    runs = Loop(receive=source.receive, apply=engine.apply, snapshot=take, seconds=0.02)
    runs.start()
    until(lambda: runs.latest() is not None)
    fail.set()
    until(lambda: runs.errors >= 2)
    assert runs.latest() is not None
    assert runs.alive
    source.end()
    runs.join()


def test_join_before_start_does_nothing() -> None:
    loop(Engine(), Source()).join()
