"""The stream against a real gRPC server in this process: lost, refused, late, twice."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from lanterne.agent.keeper import Keeper
from lanterne.agent.origins import Origin, Origins
from lanterne.agent.outbox import Outbox
from lanterne.agent.spool import Spool
from lanterne.agent.stream import Stream
from lanterne.proto import telemetry_pb2 as pb
from lanterne.proto import telemetry_pb2_grpc as rpc


class Collector(rpc.TelemetryServicer):
    """Answers each frame as `script` says; notes what it got."""

    def __init__(self, script: Callable[[bytes, int], int | None] | None = None, port: int = 0):
        self.script = script or (lambda data, seen: pb.STATUS_ACCEPTED)
        self.frames: list[pb.Frame] = []
        self.batches: list[bytes] = []
        self.stride = 1
        self.taken = False  # what is to come again
        self.origins: list[pb.Origins] = []  # told in as many answers from now on
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        rpc.add_TelemetryServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port
        self._server.start()

    def Report(  # noqa: N802
        self, request_iterator: Iterator[pb.Frame], context: grpc.ServicerContext
    ) -> Iterator[pb.Ack]:
        for frame in request_iterator:
            received = time.monotonic_ns()
            self.frames.append(frame)
            status: int | None = pb.STATUS_ACCEPTED
            if frame.batch:
                status = self.script(frame.batch, self.batches.count(frame.batch))
                self.batches.append(frame.batch)
            if status is None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "script says so")
            yield pb.Ack(
                origins=self.origins.pop(0) if self.origins else None,
                status=status,  # type: ignore[arg-type]
                taken=self.taken and status == pb.STATUS_RETRY,
                reason="why",
                frame_sent_ns=frame.sent_ns,
                collector_received_ns=received,
                collector_sent_ns=time.monotonic_ns(),
                stride=self.stride,
            )

    def kill(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def started() -> Iterator[list[Collector | Stream]]:
    """Whatever a test starts; stopped at its end."""
    parts: list[Collector | Stream] = []
    yield parts
    for part in reversed(parts):
        if isinstance(part, Stream):
            part.close(0)
        else:
            part.kill()


def make_stream(started: list[Collector | Stream], *ports: int, **options: object) -> Stream:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    settings = {"heartbeat": 0.1, "longest_pause": 0.3} | options
    stream = Stream(addresses, "n1", **settings)  # type: ignore[arg-type]
    started.append(stream)
    stream.start()
    return stream


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


def test_batches_arrive_in_order_and_leave_the_queue(started: list[Collector | Stream]) -> None:
    collector = Collector()
    started.append(collector)
    stream = make_stream(started, collector.port)
    sent = [b"batch %d" % i for i in range(100)]
    for i, data in enumerate(sent):
        stream.offer(i + 1, data)
    until(lambda: stream.totals().acknowledged == 100)
    assert collector.batches == sent
    assert stream.queued == (0, 0)
    assert stream.totals().resent == 0


def test_heartbeats_carry_the_clock_and_bring_the_stride(
    started: list[Collector | Stream],
) -> None:
    collector = Collector()
    collector.stride = 8
    started.append(collector)
    stream = make_stream(started, collector.port)
    until(lambda: len(collector.frames) >= 3)
    assert stream.stride == 8
    first, *later = collector.frames
    assert not first.HasField("clock")
    for frame in later:
        sample = frame.clock
        assert frame.node == "n1"
        assert sample.agent_sent_ns <= sample.collector_received_ns <= sample.collector_sent_ns
        assert sample.collector_sent_ns <= sample.agent_received_ns <= frame.sent_ns


def test_origins_hold_until_others_are_told_or_another_collector_answers(
    started: list[Collector | Stream],
) -> None:
    one = {"rows": 1, "comm_hash": bytes(8), "rank": bytes(4), "lane": b"\0", "whole": b"\0"}
    first, second = Collector(), Collector()
    started += [first, second]
    first.origins = [pb.Origins(epoch=5, offset=b"\7" + bytes(7), **one)]  # type: ignore[arg-type]
    stream = make_stream(started, first.port, second.port)
    known = Origins(5, {(0, 0): Origin((7, 0))})
    until(lambda: stream.origins == known)
    answers = len(first.frames) + 3
    until(lambda: len(first.frames) > answers)
    assert stream.origins == known
    first.origins = [pb.Origins(epoch=5)]
    until(lambda: stream.origins == Origins(5))
    first.origins = [pb.Origins(epoch=5, offset=b"\2" + bytes(7), **one)]  # type: ignore[arg-type]
    until(lambda: stream.origins != Origins(5))
    first.kill()
    until(lambda: second.frames)
    until(lambda: stream.origins == Origins())


def test_what_was_not_acknowledged_is_sent_again_after_a_kill(
    started: list[Collector | Stream],
) -> None:
    first = Collector(lambda data, seen: None if data == b"b3" else pb.STATUS_ACCEPTED)
    started.append(first)
    stream = make_stream(started, first.port)
    for i in range(1, 6):
        stream.offer(i, b"b%d" % i)
    until(lambda: b"b3" in first.batches)
    first.kill()
    started.remove(first)
    until(lambda: not stream.connected)
    stream.offer(6, b"b6")
    second = Collector(port=first.port)
    started.append(second)
    until(lambda: stream.queued[0] == 0)
    # Nothing is missing, in order; what had been acknowledged is not sent again.
    assert second.batches == [b"b3", b"b4", b"b5", b"b6"]
    assert stream.totals().dropped_queue == 0


def test_a_duplicate_counts_as_delivered(started: list[Collector | Stream]) -> None:
    collector = Collector(lambda data, seen: pb.STATUS_DUPLICATE)
    started.append(collector)
    stream = make_stream(started, collector.port)
    stream.offer(1, b"x")
    until(lambda: stream.queued[0] == 0)
    assert (stream.totals().acknowledged, stream.totals().duplicates) == (1, 1)


def test_a_refused_batch_is_dropped_counted_and_not_repeated(
    started: list[Collector | Stream],
) -> None:
    collector = Collector(
        lambda data, seen: pb.STATUS_REFUSED if data == b"bad" else pb.STATUS_ACCEPTED
    )
    started.append(collector)
    stream = make_stream(started, collector.port)
    stream.offer(1, b"bad")
    stream.offer(2, b"good")
    until(lambda: stream.queued[0] == 0)
    assert (stream.totals().refused, stream.totals().acknowledged) == (1, 1)
    assert collector.batches == [b"bad", b"good"]


def test_a_batch_larger_than_a_message_may_be_is_dropped_and_named(
    started: list[Collector | Stream], caplog: pytest.LogCaptureFixture
) -> None:
    """The collector's side of gRPC takes 4 MiB (its default), the agent 8: the one that ends the
    stream is dropped, whatever else was on its way arrives, once each."""
    collector = Collector()
    started.append(collector)
    stream = make_stream(started, collector.port)
    small = [b"%d" % n for n in range(6)]
    for n, data in enumerate((*small[:3], b"L" * (5 << 20), b"M" * (9 << 20), *small[3:]), 1):
        stream.offer(n, data)
    until(lambda: stream.queued[0] == 0)
    totals = stream.totals()
    assert totals.dropped_too_large == 2
    assert totals.lost() == {
        "queue_full": 0, "refused": 0, "too_large": 2, "spool_full": 0, "spool_damaged": 0,
    }  # fmt: skip
    assert totals.acknowledged == 6
    assert set(collector.batches) == set(small)
    told = [r for r in caplog.records if "too large" in r.message]
    assert sorted((r.sequence, r.limit) for r in told) == [(4, 4 << 20), (5, 8 << 20)]  # type: ignore[attr-defined]
    assert all(r.bytes > r.limit for r in told)  # type: ignore[attr-defined]
    # The stream goes on.
    stream.offer(9, b"after")
    until(lambda: stream.queued[0] == 0)
    assert stream.totals().acknowledged == 7


def test_a_spooled_batch_that_is_too_large_leaves_the_spool(
    started: list[Collector | Stream], tmp_path: Path
) -> None:
    folder = tmp_path / "spool"
    outbox = Outbox(max_batches=10, max_bytes=1 << 30)
    keeper = Keeper(Spool(folder, 64 << 20), outbox, sync_seconds=0.1)
    keeper.start()
    outbox.put(1, b"L" * (5 << 20))
    outbox.put(2, b"small")
    until(lambda: keeper.state().batches == 2)
    collector = Collector()
    started.append(collector)
    stream = make_stream(started, collector.port, outbox=outbox)
    until(lambda: stream.queued[0] == 0)
    until(lambda: keeper.state().batches == 0)
    assert (stream.totals().dropped_too_large, stream.totals().acknowledged) == (1, 1)
    keeper.close(10)


def test_retry_means_the_same_batch_later(started: list[Collector | Stream]) -> None:
    collector = Collector(
        lambda data, seen: pb.STATUS_RETRY if data == b"x" and not seen else pb.STATUS_ACCEPTED
    )
    started.append(collector)
    stream = make_stream(started, collector.port)
    stream.offer(1, b"x")
    until(lambda: stream.queued[0] == 0)
    assert collector.batches == [b"x", b"x"]
    assert (stream.totals().retries, stream.totals().acknowledged) == (1, 1)


def test_new_batches_go_before_those_that_a_stalled_disk_does_not_have(
    started: list[Collector | Stream],
) -> None:
    collector = Collector(
        lambda data, seen: pb.STATUS_RETRY if data[:1] == b"x" else pb.STATUS_ACCEPTED
    )
    collector.taken = True
    started.append(collector)
    stream = make_stream(started, collector.port)
    for n in range(1, 41):
        stream.offer(n, b"x%d" % n)
    until(lambda: stream.totals().retries >= 40)
    stream.offer(41, b"y")
    until(lambda: b"y" in collector.batches)
    before = collector.batches[: collector.batches.index(b"y")]
    assert len(before) < 80  # not all of them again
    until(lambda: stream.totals().acknowledged == 1)
    until(lambda: stream.totals().retries >= 80)  # they do come again
    assert stream.queued[0] == 40


def test_the_next_address_takes_over(started: list[Collector | Stream]) -> None:
    first, second = Collector(), Collector()
    started += [first, second]
    stream = make_stream(started, first.port, second.port)
    stream.offer(1, b"a")
    until(lambda: stream.queued[0] == 0)
    first.kill()
    started.remove(first)
    stream.offer(2, b"b")
    until(lambda: stream.queued[0] == 0)
    assert second.batches == [b"b"]


def test_a_dead_collector_blocks_nobody_and_the_queue_is_bounded(
    started: list[Collector | Stream],
) -> None:
    stream = make_stream(started, 1, max_batches=10)
    for i in range(1, 31):
        stream.offer(i, b"x")
    assert stream.queued == (10, 10)
    assert stream.totals().dropped_queue == 20
    assert stream.close(0.1) is False


def test_closing_waits_for_what_is_queued(started: list[Collector | Stream]) -> None:
    collector = Collector()
    started.append(collector)
    stream = make_stream(started, collector.port)
    for i in range(1, 51):
        stream.offer(i, b"%d" % i)
    assert stream.close(10.0) is True
    assert len(collector.batches) == 50


def test_closing_before_anything_was_queued_is_quick(started: list[Collector | Stream]) -> None:
    collector = Collector()
    started.append(collector)
    stream = make_stream(started, collector.port)
    until(lambda: stream.connected)
    assert stream.close(10.0) is True
    until(lambda: "stream" not in {thread.name for thread in threading.enumerate()})


# -- outbox --------------------------------------------------------------------------------


def test_the_oldest_goes_first_but_not_what_is_on_its_way() -> None:
    outbox = Outbox(max_batches=3, max_bytes=1000)
    for i in range(1, 4):
        outbox.put(i, b"x")
    item, _ = outbox.next(0.0)
    assert item is not None
    assert item.sequence == 1
    outbox.put(4, b"x")
    outbox.all_again()
    left = []
    while (item := outbox.next(0.0)[0]) is not None:
        left.append(item.sequence)
    assert left == [1, 3, 4]
    assert outbox.dropped["queue_full"] == 1


def test_bytes_are_bounded_but_the_newest_stays() -> None:
    outbox = Outbox(max_batches=10, max_bytes=5)
    outbox.put(1, b"123")
    outbox.put(2, b"123456789")
    assert (len(outbox), outbox.bytes, outbox.dropped["queue_full"]) == (1, 9, 1)


def due(outbox: Outbox, *times: float) -> list[int]:
    """The numbers of what is given out when it is asked at these times."""
    return [item.sequence for now in times if (item := outbox.next(now)[0])]


def test_a_batch_that_must_wait_holds_those_behind_it() -> None:
    outbox = Outbox(max_batches=10, max_bytes=100)
    outbox.put(1, b"a")
    outbox.put(2, b"b")
    outbox.next(0.0)
    outbox.again((0, 1), not_before=5.0)
    assert outbox.next(4.0) == (None, 1.0)
    assert due(outbox, 5.0) == [1]


def taken(count: int) -> Outbox:
    """So many batches, all taken by a collector whose disk does not answer."""
    outbox = Outbox(max_batches=100, max_bytes=1 << 20)
    for n in range(1, count + 1):
        outbox.put(n, b"old")
        outbox.next(0.0)
        outbox.again((0, n), not_before=5.0 + n, taken=True)
    return outbox


def test_what_has_been_taken_holds_nothing_up() -> None:
    outbox = taken(3)
    assert outbox.next(4.0) == (None, 2.0)
    outbox.put(4, b"new")
    outbox.put(5, b"new")
    # Before those that are due for the second time, and while they are not.
    assert due(outbox, 4.0, 6.5, 6.5, 6.5) == [4, 5, 1]


def test_a_batch_that_was_not_taken_holds_those_behind_it_and_none_that_were() -> None:
    outbox = taken(2)
    outbox.put(3, b"new")
    outbox.put(4, b"new")
    outbox.next(0.0)
    outbox.again((0, 3), not_before=9.0)
    assert outbox.next(4.0) == (None, 2.0)
    assert due(outbox, 6.0) == [1]
    assert outbox.next(6.0) == (None, 1.0)
    assert due(outbox, 9.0) == [3]


def test_after_a_lost_connection_nothing_counts_as_taken() -> None:
    outbox = taken(2)
    outbox.put(3, b"new")
    outbox.all_again()
    assert due(outbox, 0.0, 0.0, 0.0) == [1, 2, 3]


# -- spool and several collectors ------------------------------------------------------------


def with_spool(folder: Path, epoch: int) -> tuple[Outbox, Keeper]:
    outbox = Outbox(max_batches=2, max_bytes=1 << 20, epoch=epoch)
    return outbox, Keeper(Spool(folder, 1 << 20), outbox, 0.05)


def test_what_a_killed_run_left_arrives_before_the_next_one(
    started: list[Collector | Stream], tmp_path: Path
) -> None:
    outbox, keeper = with_spool(tmp_path / "spool", 1)
    keeper.start()
    stream = make_stream(started, 1, outbox=outbox)  # nobody is there
    for i in range(1, 21):
        stream.offer(i, b"first %d" % i)
        until(lambda i=i: keeper.state().batches == i)
    stream.close(0)
    keeper.close(10)
    assert stream.totals().lost() == dict.fromkeys(stream.totals().lost(), 0)

    collector = Collector()
    started.append(collector)
    outbox, keeper = with_spool(tmp_path / "spool", 2)
    keeper.start()
    stream = make_stream(started, collector.port, outbox=outbox)
    stream.offer(1, b"second 1")
    until(lambda: stream.queued[0] == 0)
    assert collector.batches == [b"first %d" % i for i in range(1, 21)] + [b"second 1"]
    until(lambda: keeper.state().bytes == 0)
    keeper.close(10)


def test_a_batch_that_cannot_be_read_again_is_counted_and_the_rest_goes_on(
    started: list[Collector | Stream], tmp_path: Path
) -> None:
    outbox, keeper = with_spool(tmp_path / "spool", 1)
    keeper.start()
    stream = make_stream(started, 1, outbox=outbox)
    for i in range(1, 11):
        stream.offer(i, b"batch %d" % i)
        until(lambda i=i: keeper.state().batches == i)
    stream.close(0)
    for path in (tmp_path / "spool").glob("*.seg"):
        data = bytearray(path.read_bytes())
        data[data.index(b"batch 4")] ^= 1
        path.write_bytes(data)
    collector = Collector()
    started.append(collector)
    again = make_stream(started, collector.port, outbox=outbox)
    until(lambda: again.queued[0] == 0)
    assert collector.batches == [b"batch %d" % i for i in range(1, 11) if i != 4]
    assert again.totals().lost()["spool_damaged"] == 1
    keeper.close(10)


def test_the_first_collector_is_returned_to_and_nothing_is_lost(
    started: list[Collector | Stream],
) -> None:
    first, second = Collector(), Collector()
    started += [first, second]
    stream = make_stream(started, first.port, second.port, return_seconds=0.2)
    stream.offer(1, b"a")
    until(lambda: stream.queued[0] == 0)
    first.kill()
    started.remove(first)
    stream.offer(2, b"b")
    until(lambda: second.batches == [b"b"])
    back = Collector(port=first.port)
    started.append(back)
    sequence = 3

    def offered() -> bool:
        nonlocal sequence
        stream.offer(sequence, b"%d" % sequence)
        sequence += 1
        return bool(back.batches)

    until(offered)
    until(lambda: stream.queued[0] == 0)
    numbers = [b"%d" % n for n in range(3, sequence)]
    assert second.batches[1:] + back.batches == numbers
    assert stream.totals().lost()["queue_full"] == 0


def test_while_the_first_does_not_answer_the_second_is_kept(
    started: list[Collector | Stream],
) -> None:
    second = Collector()
    started.append(second)
    with socket.socket() as mute:  # takes connections and says nothing
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        stream = make_stream(started, 1, second.port, return_seconds=0.05)
        until(lambda: stream.connected)
        stream.use([f"127.0.0.1:{mute.getsockname()[1]}", f"127.0.0.1:{second.port}"], 0.1, 0.3)
        seen = len(second.frames)
        until(lambda: len(second.frames) > seen + 3)
        assert stream.totals().connects == 1
