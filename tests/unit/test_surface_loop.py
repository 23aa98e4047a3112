"""The engine's thread: order, bound, drain, and what a failing batch does to the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.clock import ClockObservation
from lanterne.collector.loop import Item, Loop
from lanterne.collector.snapshot import Snapshot
from tests.fixtures.snapshots import snapshot


def batch(sequence: int) -> DecodedBatch:
    return cast(DecodedBatch, SimpleNamespace(node="n0", sequence=sequence))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Engine:
    def __init__(self) -> None:
        self.applied: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def apply(self, item: Item) -> None:
        self.gate.wait(20)
        assert not isinstance(item, ClockObservation)
        if item.sequence < 0:
            raise ValueError("defect")
        self.applied.append(item.sequence)

    def snapshot(self, now: float) -> Snapshot:
        return snapshot(taken_at=now, ingest={"rows": len(self.applied)})


def loop(engine: Engine, depth: int = 8, seconds: float = 0.05) -> Loop:
    return Loop(
        apply=engine.apply,
        snapshot=engine.snapshot,
        depth=depth,
        seconds=seconds,
        clock=lambda: 7.0,
    )


def test_batches_are_applied_in_order_and_show_in_the_next_snapshot() -> None:
    engine = Engine()
    runs = loop(engine)
    assert runs.latest() is None
    runs.start()
    for i in range(8):
        assert runs.offer(batch(i))
    until(lambda: (found := runs.latest()) is not None and found.ingest["rows"] == 8)
    assert engine.applied == list(range(8))
    runs.stop()
    assert not runs.alive


def test_a_full_queue_refuses_and_nothing_that_it_took_is_lost() -> None:
    engine = Engine()
    engine.gate.clear()
    runs = loop(engine, depth=3)
    runs.start()
    assert runs.offer(batch(0))
    until(lambda: runs.depth == 0)  # held in apply
    assert [runs.offer(batch(i)) for i in range(1, 6)] == [True, True, True, False, False]
    assert runs.depth == 3
    engine.gate.set()
    runs.stop()
    assert engine.applied == [0, 1, 2, 3]
    found = runs.latest()
    assert found is not None
    assert found.ingest["rows"] == 4  # the last snapshot has seen all
    assert found.taken_at == 7.0


def test_a_defect_in_one_batch_is_counted_and_the_others_go_on() -> None:
    engine = Engine()
    runs = loop(engine)
    runs.start()
    for i in (1, -1, 2):
        assert runs.offer(batch(i))
    until(lambda: engine.applied == [1, 2])
    assert runs.errors == 1
    runs.stop()


def test_a_failing_snapshot_is_counted_and_the_older_one_stays() -> None:
    engine = Engine()
    fail = threading.Event()

    def take(now: float) -> Snapshot:
        if fail.is_set():
            raise ValueError("defect")
        return engine.snapshot(now)

    runs = Loop(apply=engine.apply, snapshot=take, depth=4, seconds=0.02)
    runs.start()
    until(lambda: runs.latest() is not None)
    fail.set()
    until(lambda: runs.errors >= 2)
    assert runs.latest() is not None
    assert runs.alive
    runs.stop()


def test_stop_before_start_does_nothing() -> None:
    loop(Engine()).stop()
