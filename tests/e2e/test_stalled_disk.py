"""The disk under the collector's state stalls: everybody is answered, nothing is acknowledged that
is not on it, and once it is well all has been delivered, once."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lanterne.collector import acknowledged, answers, journal
from lanterne.collector.seen import Seen
from lanterne.proto import telemetry_pb2 as pb
from tests.faults.preload import Preload
from tests.fixtures import feeder
from tests.stack import Stack, fetch, wait_for

pytestmark = [pytest.mark.timeout(240)]

NS = 10**9
STALL_MS = 600_000
ACKNOWLEDGED = (pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE)


class Agent:
    """The stream of one node."""

    def __init__(self, port: int, node: str) -> None:
        self.node = node
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self._frames: queue.Queue[bytes | None] = queue.Queue()
        call = self._channel.stream_stream(
            "/lanterne.v1.Telemetry/Report", response_deserializer=pb.Ack.FromString
        )
        self._acks = call(iter(self._frames.get, None), timeout=200)

    def put(self, sequence: int | None) -> None:
        """Of a batch, or (None) a bare frame."""
        data = b""
        if sequence is not None:
            data = feeder.batch(self.node, 1, sequence, sequence * NS, 40 * sequence, 40)
        self._frames.put(pb.Frame(node=self.node, sent_ns=1, batch=data).SerializeToString())

    def answer(self) -> pb.Ack:
        ack: pb.Ack = next(self._acks)
        return ack

    def send(self, sequence: int | None) -> pb.Ack:
        self.put(sequence)
        return self.answer()

    def close(self) -> None:
        self._frames.put(None)
        self._channel.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Preload]:
    preload = Preload(tmp_path, slow=tmp_path / "state")
    yield preload
    preload.set()
    preload.close()


@pytest.fixture
def stack(tmp_path: Path, slow: Preload) -> Iterator[Stack]:
    keep = {
        "state": {"path": str(tmp_path / "state"), "seconds": 1},
        "analysis": {"snapshot_seconds": 0.5},
    }
    with Stack(tmp_path, [], collector=keep, env=slow.env) as stack:
        stack.start_collector()
        yield stack
        slow.set()  # for the stop


@pytest.fixture
def agent(stack: Stack) -> Iterator[Callable[[str], Agent]]:
    made: list[Agent] = []

    def make(node: str) -> Agent:
        made.append(Agent(stack.grpc_port, node))
        return made[-1]

    yield make
    for one in made:
        one.close()


def in_file(state: Path, node: str) -> list[list[int]]:
    seen = Seen()
    acknowledged.unpack((state / journal.NAME).read_bytes(), seen)
    entry = dict(seen.items()).get(node)
    return entry.epochs[1].ranges if entry else []


def batches(stack: Stack, status: str) -> float:
    """By the page, which the ingest process feeds now and then."""
    return stack.collector_metrics().total("lanterne_collector_batches_total", status=status)


def errors(stack: Stack, reason: str) -> float:
    metrics = stack.collector_metrics()
    return metrics.total("lanterne_collector_state_errors_total", reason=reason)


def healthy(stack: Stack) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_a_stalled_disk_holds_up_acknowledgements_and_nothing_else(
    stack: Stack, slow: Preload, agent: Callable[[str], Agent], tmp_path: Path
) -> None:
    first, second, bare = agent("a"), agent("b"), agent("c")
    for n in range(1, 11):
        assert first.send(n).status == pb.STATUS_ACCEPTED
        assert in_file(tmp_path / "state", "a") == [[1, n]]
    slow.set(sync_ms=STALL_MS)
    for n in range(11, 31):
        first.put(n)
    second.put(1)
    told = [first.answer() for _ in range(11, 31)] + [second.answer()]
    # What was being synced in the moment of the stall may be through.
    late = [ack for ack in told if ack.status not in ACKNOWLEDGED]
    assert len(late) >= len(told) - 1
    assert all(ack.status == pb.STATUS_RETRY and ack.taken for ack in late)
    assert all("disk does not answer: send again later" in ack.reason for ack in late)
    # Everything else goes on, and the analysis has the batches already.
    assert bare.send(None).status == pb.STATUS_ACCEPTED
    assert second.send(1).status == pb.STATUS_RETRY
    assert healthy(stack)
    for page in ("/healthz", "/readyz", "/metrics", "/"):
        assert fetch(f"{stack.collector_url}{page}", timeout=30)
    wait_for(lambda: errors(stack, "journal_stalled") == 1, 30, "the stall is counted")
    wait_for(lambda: errors(stack, "stalled") == 1, 30, "that of the load history, too")
    wait_for(lambda: batches(stack, "unkept") >= len(late), 30, "they are counted")
    windows = stack.collector_metrics().get("lanterne_collector_last_window_timestamp_seconds")
    assert {labels["node"] for labels, _ in windows} >= {"a", "b"}
    assert batches(stack, "accepted") == 31

    slow.set()
    wait_for(lambda: second.send(1).status == pb.STATUS_DUPLICATE, 60, "b's batch acknowledged")
    for n in range(11, 31):
        wait_for(lambda: first.send(n).status == pb.STATUS_DUPLICATE, 60, f"{n}")  # noqa: B023
        assert in_file(tmp_path / "state", "a")[0][1] >= n
    assert first.send(31).status == pb.STATUS_ACCEPTED
    assert in_file(tmp_path / "state", "a") == [[1, 31]]
    wait_for(lambda: batches(stack, "accepted") == 32, 30, "each taken once")
    log = stack.logs(1 << 20)
    assert len(re.findall(r"state/acknowledged: the disk does not answer", log)) == 1
    assert len(re.findall(r"state/acknowledged: the disk answers again", log)) == 1


def test_killed_in_a_stall_it_has_acknowledged_nothing_that_it_forgets(
    stack: Stack, slow: Preload, agent: Callable[[str], Agent]
) -> None:
    one = agent("a")
    answered = {n: one.send(n).status for n in range(1, 6)}
    slow.set(sync_ms=STALL_MS)
    for n in range(6, 41):
        one.put(n)
    answered |= {n: one.answer().status for n in range(6, 41)}
    assert pb.STATUS_RETRY in answered.values()
    # More answers behind one than may wait: reading pauses, and nothing is left out.
    other = agent("b")
    other.put(1)
    for _ in range(2 * answers.MOST_WAITING):
        other.put(None)
    statuses = [other.answer().status for _ in range(2 * answers.MOST_WAITING + 1)]
    assert statuses == [pb.STATUS_RETRY] + [pb.STATUS_ACCEPTED] * (2 * answers.MOST_WAITING)
    stack.kill("collector")
    slow.set()
    stack.start_collector()
    again = agent("a")
    for n, before in answered.items():
        after = again.send(n).status
        assert after in ACKNOWLEDGED
        if before in ACKNOWLEDGED:
            assert after == pb.STATUS_DUPLICATE, n


def test_told_to_stop_in_a_stall_it_ends_and_says_what_is_missing(
    stack: Stack, slow: Preload, agent: Callable[[str], Agent]
) -> None:
    one = agent("a")
    assert one.send(1).status == pb.STATUS_ACCEPTED
    slow.set(sync_ms=STALL_MS)
    for n in range(2, 12):
        one.put(n)
    assert [one.answer().status for _ in range(2, 12)][-1] == pb.STATUS_RETRY
    assert stack.stop_one("collector", timeout=100) == 0
    assert re.search(r"state/acknowledged: \d+ batches not written within", stack.logs(1 << 20))
