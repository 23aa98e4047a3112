"""From the ingest process to the analysis: everything, in order, bounded, and no process left."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.clock import ClockObservation
from lanterne.collector.decode import decode
from lanterne.collector.errors import ListenError
from lanterne.collector.handover import Item, Packer, Unpacker
from lanterne.collector.intake import Intake
from lanterne.collector.intake_child import Outbox
from lanterne.collector.link import CROWDED, ITEMS, STATS, Link
from lanterne.proto import telemetry_pb2 as pb
from tests.fixtures.feeder import Feeder
from tests.fixtures.feeder import batch as encoded

LIMITS = {"batch_bytes": 8 << 20, "nodes": 16, "items": 64, "bytes": 16 << 20}
NS = 10**9


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def item(node: str = "n0", sequence: int = 1) -> DecodedBatch:
    return decode(encoded(node, 1, sequence, sequence * NS, 40 * sequence, 40), received_ns=5)


def full_batch() -> DecodedBatch:
    """With everything in it that may be."""
    message = pb.Batch.FromString(encoded("n0", 1, 1, NS, 0, 40))
    message.traffic.rows = 2
    message.traffic.communicator = np.array([0, 1], "<u4").tobytes()
    message.traffic.peer = np.array([1, 0], "<u4").tobytes()
    message.traffic.sent_bytes = np.array([7, 8], "<u8").tobytes()
    message.traffic.received_bytes = np.array([9, 10], "<u8").tobytes()
    message.stages.rows = 1
    message.stages.pid = message.stages.device = np.array([3], "<u4").tobytes()
    message.stages.stage, message.stages.whole = b"\x09", b"\x01"
    for n, name in enumerate(("span_ns", "union_ns", "sum_ns", "count", "start_ticks"), 10):
        setattr(message.stages, name, np.array([n], "<u8").tobytes())
    message.pending.rows = 1
    message.pending.communicator, message.pending.seq = bytes(4), np.array([9], "<u4").tobytes()
    message.pending.lane, message.pending.op, message.pending.evidence = b"\x00", b"\x04", b"\x02"
    message.strides = np.arange(1, len(message.communicators) + 1, dtype="<u4").tobytes()
    message.pending.entered_ns = np.array([1], "<u8").tobytes()
    message.gpus.add(index=1, uuid="u", utilization_ratio=0.5, throttle_reasons=["thermal"])
    message.processes.add(pid=3, pid_start_ticks=4, cpu_seconds=1.5)
    message.health.events_lost["ring"] = 3
    message.health.libraries_failed.append("/x: why")
    return decode(message.SerializeToString(), received_ns=77)


def same(a: DecodedBatch, b: DecodedBatch) -> None:
    assert a.head == b.head
    assert a.communicators == b.communicators
    np.testing.assert_array_equal(a.strides, b.strides)
    for part in ("instances", "summaries", "traffic", "stages", "pending"):
        mine, other = getattr(a, part), getattr(b, part)
        for column in type(mine).__slots__:
            np.testing.assert_array_equal(getattr(mine, column), getattr(other, column))


def test_items_survive_the_handover() -> None:
    clock = ClockObservation("n0", 1, 2, 3, 4)
    empty = decode(pb.Batch(schema=1, node="e", epoch=1, sequence=1, stride=1).SerializeToString())
    sent: list[Item] = [full_batch(), clock, empty, full_batch()]
    packer, unpacker = Packer(), Unpacker()
    got = unpacker.unpack(packer.pack(sent[:2])) + unpacker.unpack(packer.pack(sent[2:]))
    assert got[1] == clock
    for n in (0, 2, 3):
        mine, other = sent[n], got[n]
        assert isinstance(mine, DecodedBatch)
        assert isinstance(other, DecodedBatch)
        same(mine, other)
    assert got[3].communicators is got[0].communicators  # type: ignore[union-attr]


def test_what_both_ends_remember_is_bounded() -> None:
    packer, unpacker = Packer(nodes=4), Unpacker()
    for n in range(40):
        (got,) = unpacker.unpack(packer.pack([item(f"n{n % 7}", n + 1)]))
        assert isinstance(got, DecodedBatch)
        assert len(got.communicators.rank) == 8
        assert len(unpacker._known) <= 5


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    mine, theirs = socket.socketpair()
    ends = Link(mine), Link(theirs)
    yield ends
    for end in ends:
        end.close()


def test_outbox_refuses_when_full_warns_before_and_hands_over_all(
    links: tuple[Link, Link],
) -> None:
    here, there = links
    size = item().head.encoded_bytes
    outbox = Outbox(here, items=8, most_bytes=100 * size, nodes=16)
    assert [outbox.take(item(sequence=n)) for n in range(1, 11)] == [True] * 8 + [False] * 2
    outbox.close()
    sender = threading.Thread(target=outbox.run, args=(lambda: b"stats",))
    sender.start()
    kinds, sequences = [], []
    unpacker = Unpacker()
    while not kinds or kinds[-1] != STATS:
        message = there.receive(20)
        assert message is not None
        kinds.append(message[0])
        if message[0] == ITEMS:
            sequences += [
                i.sequence for i in unpacker.unpack(message[1]) if isinstance(i, DecodedBatch)
            ]
    sender.join(20)
    assert kinds == [CROWDED, ITEMS, STATS]
    assert sequences == list(range(1, 9))


def test_outbox_is_bounded_in_bytes_but_takes_any_single_batch(links: tuple[Link, Link]) -> None:
    size = item().head.encoded_bytes
    outbox = Outbox(links[0], items=1000, most_bytes=3 * size + 10, nodes=16)
    assert [outbox.take(item(sequence=n)) for n in range(1, 6)] == [True] * 3 + [False] * 2
    small = Outbox(links[0], items=1000, most_bytes=10, nodes=16)
    assert [small.take(item(sequence=n)) for n in (1, 2)] == [True, False]


@pytest.fixture
def intake() -> Iterator[Intake]:
    found = Intake(limits=LIMITS)
    yield found
    found.stop()
    found.close()


def drain(intake: Intake) -> list[Item]:
    """Everything until the end."""
    found: list[Item] = []
    while True:
        try:
            found += intake.receive(1.0)
        except EOFError:
            return found


def test_acknowledged_batches_all_arrive_also_those_on_their_way_at_the_end(
    intake: Intake,
) -> None:
    port = intake.listen("127.0.0.1:0")
    intake.start()
    with Feeder(f"127.0.0.1:{port}", history=20) as feeder:
        until(lambda: len(feeder.acks) >= 20)
        found = intake.receive(5.0)
        assert intake.serving
        intake.stop()
        found += drain(intake)
    sequences = [i.sequence for i in found if isinstance(i, DecodedBatch)]
    acked = sum(a.status == pb.STATUS_ACCEPTED and a.sequence > 0 for a in feeder.acks)
    assert sequences == list(range(1, len(sequences) + 1))
    assert len(sequences) >= acked >= 20
    assert intake.counts()["batches_accepted"] == len(sequences)
    intake.close()
    assert not intake.serving


def test_stride_reaches_the_agents_rises_when_crowded_and_falls_again() -> None:
    """The analysis stands still, the outbox fills, the engine asks for less, the acks say so."""
    engine = Engine(
        EngineConfig(
            window_seconds=1.0, cells=1 << 18, rows=1 << 12, communicators=8, members=64,
            processes=64,
        )
    )  # fmt: skip
    crowded = threading.Event()

    def overloaded() -> None:
        engine.overloaded()
        crowded.set()

    intake = Intake(limits={**LIMITS, "items": 8}, overloaded=overloaded)
    port = intake.listen("127.0.0.1:0")
    intake.start()
    try:
        with Feeder(f"127.0.0.1:{port}", history=2000) as feeder:
            # Nothing is received here: the socket's buffers fill, then the outbox.
            until(lambda: any(a.status == pb.STATUS_RETRY for a in feeder.acks))
            now = time.monotonic_ns()
            while not crowded.is_set():
                for one in intake.receive(5.0):
                    engine.apply(one)
            engine.snapshot(0.0, now_ns=now)
            engine.snapshot(0.0, now_ns=now + 10 * NS)
            assert engine.stride == 2
            intake.ask(engine.stride)
            until(lambda: feeder.acks[-1].stride == 2)
            for second in range(62):
                engine.snapshot(0.0, now_ns=now + (11 + second) * NS)
            assert engine.stride == 1
            intake.ask(engine.stride)
            until(lambda: feeder.acks[-1].stride == 1)
    finally:
        intake.stop()
        drain(intake)
        intake.close()


def test_an_address_in_use_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError, match="cannot listen on"):
            Intake(limits=LIMITS).listen(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_killed_ingest_process_ends_the_stream_of_items(intake: Intake) -> None:
    intake.listen("127.0.0.1:0")
    intake.start()
    os.kill(intake.pid, signal.SIGKILL)
    assert drain(intake) == []
    until(lambda: not intake.serving)
