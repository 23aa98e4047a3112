"""The stream over a real gRPC connection: acknowledgements, duplicates, refusals, overload."""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.checks import Limits
from lanterne.collector.clock import ClockObservation
from lanterne.collector.errors import ListenError
from lanterne.collector.frames import Item
from lanterne.collector.ingest import SERVICE, Ingest
from lanterne.collector.ingest_config import IngestConfig
from lanterne.collector.seen import EPOCHS
from lanterne.proto import telemetry_pb2 as pb


def batch(sequence: int, *, node: str = "a", epoch: int = 1, boot: str = "") -> bytes:
    return pb.Batch(
        schema=1, node=node, epoch=epoch, sequence=sequence, stride=1, boot_id=boot
    ).SerializeToString()


def frame(data: bytes = b"", *, node: str = "a", **rest: object) -> bytes:
    return pb.Frame(node=node, sent_ns=42, batch=data, **rest).SerializeToString()  # type: ignore[arg-type]


class Agent:
    """One open stream, frame by frame, with raw bytes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._frames: queue.Queue[bytes | None] = queue.Queue()
        call = channel.stream_stream(f"/{SERVICE}/Report", response_deserializer=pb.Ack.FromString)
        self._acks = call(iter(self._frames.get, None), timeout=20)

    def send(self, data: bytes) -> pb.Ack:
        self._frames.put(data)
        ack: pb.Ack = next(self._acks)
        return ack

    def close(self) -> None:
        self._frames.put(None)
        assert list(self._acks) == []


class Collector:
    def __init__(self, config: IngestConfig | None = None) -> None:
        self.items: list[Item] = []
        self.full = False
        self.stride = 1
        self.ingest = Ingest(on_batch=self._take, stride=lambda: self.stride, config=config)

    def _take(self, item: Item) -> bool:
        if self.full:
            return False
        self.items.append(item)
        return True

    def batches(self) -> list[tuple[str, int, int]]:
        return [(i.node, i.epoch, i.sequence) for i in self.items if isinstance(i, DecodedBatch)]


@contextmanager
def running(config: IngestConfig | None = None) -> Iterator[tuple[Collector, grpc.Channel]]:
    collector = Collector(config)
    port = collector.ingest.listen("127.0.0.1:0")
    collector.ingest.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield collector, channel
    finally:
        collector.ingest.stop(0)


def test_batches_are_acknowledged_once_and_in_order() -> None:
    with running() as (collector, channel):
        agent = Agent(channel)
        ack = agent.send(frame(batch(1)))
        assert (ack.epoch, ack.sequence, ack.status) == (1, 1, pb.STATUS_ACCEPTED)
        assert (ack.frame_sent_ns, ack.stride) == (42, 1)
        assert 0 < ack.collector_received_ns <= ack.collector_sent_ns
        assert agent.send(frame(batch(2))).sequence == 2
        assert agent.send(frame(batch(1))).status == pb.STATUS_DUPLICATE
        assert agent.send(frame(batch(1, epoch=2))).status == pb.STATUS_ACCEPTED
        assert collector.ingest.connected() == {"a"}
        collector.stride = 4
        assert agent.send(frame()).stride == 4
        agent.close()
        # The same batch on a new connection is still the same batch.
        again = Agent(channel)
        assert again.send(frame(batch(2))).status == pb.STATUS_DUPLICATE
        again.close()
        assert collector.batches() == [("a", 1, 1), ("a", 1, 2), ("a", 2, 1)]
        assert collector.ingest.connected() == set()
        counts = collector.ingest.counts()
        assert counts["batches_accepted"] == 3
        assert counts["batches_duplicate"] == 2


def test_a_relay_may_report_for_many_nodes_on_one_stream() -> None:
    with running() as (collector, channel):
        relay = Agent(channel)
        for node in ("a", "b", "a"):
            ack = relay.send(frame(batch(1, node=node), node=node))
            assert ack.status in (pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE)
        assert collector.ingest.connected() == {"a", "b"}
        own = Agent(channel)
        own.send(frame(node="b"))
        relay.close()
        assert collector.ingest.connected() == {"b"}
        own.close()
        assert collector.ingest.connected() == set()
        assert collector.batches() == [("a", 1, 1), ("b", 1, 1)]


def test_full_queue_says_retry_and_takes_the_batch_later() -> None:
    with running() as (collector, channel):
        agent = Agent(channel)
        collector.full = True
        assert agent.send(frame(batch(1))).status == pb.STATUS_RETRY
        collector.full = False
        assert agent.send(frame(batch(1))).status == pb.STATUS_ACCEPTED
        agent.close()
        assert collector.batches() == [("a", 1, 1)]
        assert collector.ingest.counts()["batches_retried"] == 1


def test_refusals_say_why_and_leave_the_stream_open() -> None:
    with running() as (collector, channel):
        agent = Agent(channel)
        for data, code in (
            (b"\xff\xff\xff", "frame"),
            (frame(b"\xff\xff"), "proto"),
            (frame(batch(0)), "sequence"),
            (frame(batch(1), node=""), "node"),
            (frame(batch(1), node="b"), "node"),
        ):
            ack = agent.send(data)
            assert ack.status == pb.STATUS_REFUSED
            assert ack.reason.startswith(code + ": ")
        assert agent.send(frame(batch(1))).status == pb.STATUS_ACCEPTED
        agent.close()
        assert collector.ingest.refused() == {"frame": 1, "proto": 1, "sequence": 1, "node": 2}
        assert collector.ingest.counts()["batches_refused"] == 5


def test_forgotten_epoch_is_refused() -> None:
    with running() as (collector, channel):
        agent = Agent(channel)
        for epoch in range(10, 11 + EPOCHS):
            agent.send(frame(batch(1, epoch=epoch)))
        ack = agent.send(frame(batch(2, epoch=10)))
        assert ack.status == pb.STATUS_REFUSED
        assert ack.reason.startswith("stale_epoch: ")
        agent.close()
        assert len(collector.items) == EPOCHS + 1


def test_clock_samples_are_handed_on() -> None:
    with running() as (collector, channel):
        agent = Agent(channel)
        sample = pb.ClockSample(
            agent_sent_ns=1, collector_received_ns=2, collector_sent_ns=3, agent_received_ns=4
        )
        assert agent.send(frame(clock=sample)).status == pb.STATUS_ACCEPTED
        sample.agent_sent_ns = 1 << 63
        agent.send(frame(clock=sample))
        agent.close()
        assert collector.items == [ClockObservation("a", 1, 2, 3, 4)]


def test_restarted_collector_takes_what_is_resent() -> None:
    with running() as (_, channel):
        agent = Agent(channel)
        agent.send(frame(batch(1)))
        agent.close()
    with running() as (collector, channel):
        agent = Agent(channel)
        assert agent.send(frame(batch(1))).status == pb.STATUS_ACCEPTED
        agent.close()
        assert collector.batches() == [("a", 1, 1)]


def test_oversized_message_ends_the_stream_only() -> None:
    config = IngestConfig(limits=Limits(batch_bytes=1000))
    with running(config) as (collector, channel):
        agent = Agent(channel)
        ack = agent.send(frame(batch(1, boot="x" * 2000)))
        assert ack.reason.startswith("size: ")
        # Larger than any agent's: refused by name as well, and the stream goes on.
        ack = agent.send(frame(batch(1, boot="x" * (15 << 20))))
        assert ack.status == pb.STATUS_REFUSED
        assert re.match(r"size: .*157\d{5}.*1000", ack.reason)
        assert collector.ingest.refused() == {"size": 2}
        with pytest.raises(grpc.RpcError) as error:
            agent.send(frame(batch(1, boot="x" * (17 << 20))))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        again = Agent(channel)
        assert again.send(frame(batch(1))).status == pb.STATUS_ACCEPTED
        again.close()
        assert collector.batches() == [("a", 1, 1)]


def test_health_and_stopping() -> None:
    with running() as (collector, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert collector.ingest.serving
        collector.ingest.set_serving(False)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        agent = Agent(channel)
        agent.send(frame(batch(1)))
        collector.ingest.stop(0)
        collector.ingest.stop(0)
        with pytest.raises(grpc.RpcError):
            agent.send(frame(batch(2)))
        assert not collector.ingest.serving
        assert collector.batches() == [("a", 1, 1)]


def test_port_in_use_is_an_error_with_a_remedy() -> None:
    with running() as (collector, _):
        del collector
        first = Ingest(on_batch=lambda item: True)
        port = first.listen("127.0.0.1:0")
        first.start()
        try:
            with pytest.raises(ListenError, match="another collector"):
                Ingest(on_batch=lambda item: True).listen(f"127.0.0.1:{port}")
        finally:
            first.stop(0)
