"""The ingest process over kills and restarts, with its state and without."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.ingest import SERVICE
from lanterne.collector.intake import Intake
from lanterne.proto import telemetry_pb2 as pb

LIMITS = {"batch_bytes": 8 << 20, "nodes": 16, "items": 4096, "bytes": 16 << 20}
WAIT = 30.0


class Life:
    """One run of a collector's intake, and an agent's stream to it."""

    def __init__(self, state: Path | None) -> None:
        self.intake = Intake(limits=LIMITS, state=state)
        port = self.intake.listen("127.0.0.1:0")
        self.intake.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._frames: queue.Queue[bytes | None] = queue.Queue()
        call = self._channel.stream_stream(
            f"/{SERVICE}/Report", response_deserializer=pb.Ack.FromString
        )
        self._acks = call(iter(self._frames.get, None), timeout=WAIT)

    def send(self, sequence: int, epoch: int = 1) -> int:
        batch = pb.Batch(schema=1, node="a", epoch=epoch, sequence=sequence, stride=1)
        frame = pb.Frame(node="a", sent_ns=1, batch=batch.SerializeToString())
        self._frames.put(frame.SerializeToString())
        status: int = next(self._acks).status
        return status

    def taken(self, wanted: int) -> list[int]:
        """Sequence numbers that reach the analysis."""
        found: list[int] = []
        end = time.monotonic() + WAIT
        while len(found) < wanted and time.monotonic() < end:
            found += [i.sequence for i in self.intake.receive(0.5) if isinstance(i, DecodedBatch)]
        return found

    def count(self, name: str, wanted: int) -> None:
        """It comes with the next figures of the child."""
        end = time.monotonic() + WAIT
        while self.intake.counts().get(name) != wanted:
            assert time.monotonic() < end, self.intake.counts()
            self.intake.receive(0.1)

    def close(self) -> None:
        self._frames.put(None)
        self._channel.close()
        self.intake.stop()
        try:
            while True:
                self.intake.receive(1.0)
        except EOFError:
            pass
        self.intake.close()


@contextmanager
def life(state: Path | None) -> Iterator[Life]:
    running = Life(state)
    try:
        yield running
    finally:
        running.close()


def test_what_was_acknowledged_before_a_kill_is_a_duplicate_after_it(tmp_path: Path) -> None:
    with life(tmp_path) as first:
        assert [first.send(n) for n in range(1, 51)] == [pb.STATUS_ACCEPTED] * 50
        os.kill(first.intake.pid, signal.SIGKILL)
    with life(tmp_path) as second:
        assert [second.send(n) for n in range(41, 61)] == (
            [pb.STATUS_DUPLICATE] * 10 + [pb.STATUS_ACCEPTED] * 10
        )
        assert second.taken(10) == list(range(51, 61))
        second.count("batches_duplicate", 10)
        assert not any(k.startswith("journal_") for k in second.intake.counts())
        assert set(second.intake.journal_errors().values()) == {0}


def test_a_graceful_stop_hands_over_and_remembers_all(tmp_path: Path) -> None:
    with life(tmp_path) as first:
        for n in range(1, 31):
            assert first.send(n) == pb.STATUS_ACCEPTED
        first.intake.stop()
        assert first.taken(30) == list(range(1, 31))
    with life(tmp_path) as second:
        assert second.send(30) == pb.STATUS_DUPLICATE
        assert second.send(31) == pb.STATUS_ACCEPTED


def test_without_a_state_a_restart_knows_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with life(None) as running:
            assert running.send(1) == pb.STATUS_ACCEPTED
            assert running.intake.journal_errors() == {}
    assert list(tmp_path.iterdir()) == []


def test_two_collectors_have_each_their_own(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    with life(tmp_path / "a") as first, life(tmp_path / "b") as second:
        assert first.send(1) == pb.STATUS_ACCEPTED
        assert second.send(1) == pb.STATUS_ACCEPTED
        assert first.send(1) == pb.STATUS_DUPLICATE
