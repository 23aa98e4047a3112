"""The stream to the collector: in order, acknowledged, resent after a loss, in its own thread.

`offer` never blocks and never fails; the drain loop knows nothing of the network. Each frame is
stamped when it leaves, and carries the four timestamps of the last answered one, for the clock
estimate. Several addresses are tried in turn, with growing, jittered pauses.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from lanterne.agent.outbox import Item, Outbox
from lanterne.proto import telemetry_pb2 as pb
from lanterne.proto import telemetry_pb2_grpc as rpc

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 32
FIRST_PAUSE = 0.2
ANSWER_TIMEOUT = 15.0  # a collector that answers nothing for so long is given up
MAX_STRIDE = 65_536
OPTIONS = (
    ("grpc.max_send_message_length", 8 << 20),
    ("grpc.max_receive_message_length", 1 << 20),
    # A peer that vanished without a word is noticed by an unanswered ping. Servers tolerate pings
    # between data frames, and the heartbeat makes such.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, no inherited pause
)


@dataclass(frozen=True)
class Totals:
    """Since the start; `dropped` by cause."""

    sent: int = 0
    resent: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    retries: int = 0
    refused: int = 0
    dropped_queue: int = 0
    connects: int = 0
    failures: int = 0


class Stream:
    """Start it after privileges were dropped: threads inherit them from their creator."""

    def __init__(
        self,
        addresses: Sequence[str],
        node: str,
        *,
        max_batches: int = 600,
        max_bytes: int = 16 << 20,
        heartbeat: float = 1.0,
        longest_pause: float = 10.0,
    ):
        self._addresses = tuple(addresses)
        self._node = node
        self._heartbeat = heartbeat
        self._longest_pause = longest_pause
        self._outbox = Outbox(max_batches=max_batches, max_bytes=max_bytes)
        self._closing = threading.Event()
        self._stopped = threading.Event()
        self._session: _Session | None = None
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self.counts = dict.fromkeys(Totals.__dataclass_fields__, 0)
        self.stride = 1
        self.connected = False
        self.last_error = ""

    def start(self) -> None:
        self._thread.start()

    def offer(self, sequence: int, batch: bytes) -> None:
        """Queue one encoded batch; the oldest is dropped where the bounds are reached."""
        self._outbox.put(sequence, batch)

    @property
    def queued(self) -> tuple[int, int]:
        """(batches, bytes) not acknowledged."""
        return len(self._outbox), self._outbox.bytes

    def totals(self) -> Totals:
        return Totals(**{**self.counts, "dropped_queue": self._outbox.dropped})

    def close(self, timeout: float) -> bool:
        """Wait so long for what is queued; -> whether everything was acknowledged."""
        self._closing.set()
        with self._outbox.changed:
            self._outbox.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._stopped.set()
        session = self._session
        if session is not None:
            session.end()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        return len(self._outbox) == 0

    def _run(self) -> None:
        turn = failed = 0
        while not self._stopped.is_set() and not (self._closing.is_set() and not len(self._outbox)):
            answered = self._once(self._addresses[turn % len(self._addresses)])
            turn += 1
            failed = 0 if answered else failed + 1
            if self._closing.is_set() and not len(self._outbox):
                break
            rounds = min(failed // len(self._addresses), 16)
            pause = min(FIRST_PAUSE * 2**rounds, self._longest_pause)
            # Half fixed, half random: agents that lost one collector together spread out.
            self._stopped.wait(pause * (0.5 + random.random() / 2))

    def _once(self, address: str) -> bool:
        """One connection until it ends; -> whether the collector answered at all."""
        session = self._session = _Session(self, address)
        answered = False
        try:
            with grpc.insecure_channel(address, options=OPTIONS) as channel:
                stub = rpc.TelemetryStub(channel)
                session.call = stub.Report(session.frames())
                for ack in session.call:  # type: ignore[union-attr]
                    if not answered:
                        answered = self.connected = True
                        self.counts["connects"] += 1
                        self.last_error = ""
                        log.info("connected to the collector", extra={"address": address})
                    session.answered(ack)
        except grpc.RpcError as error:
            if not self._stopped.is_set():
                self.counts["failures"] += 1
                text = _reason(error)
                level = logging.WARNING if text != self.last_error else logging.DEBUG
                log.log(level, "no collector", extra={"address": address, "reason": text})
                self.last_error = text
        finally:
            self.connected = False
            session.end()
            self._outbox.all_again()
        return answered


class _Session:
    """One connection: what is on its way, in order, since answers come in the same order."""

    def __init__(self, stream: Stream, address: str):
        self._stream = stream
        self._outbox = stream._outbox
        self._sent: deque[tuple[int | None, float]] = deque()
        self._clock: pb.ClockSample | None = None
        self._ended = threading.Event()
        self.address = address
        self.call: grpc.Call | None = None

    def frames(self) -> Iterator[pb.Frame]:
        """Runs in a thread of gRPC, one frame ahead of the wire."""
        last = 0.0
        while not self._ended.is_set():
            now = time.monotonic()
            if self._sent and now - self._sent[0][1] > ANSWER_TIMEOUT:
                log.warning("collector does not answer", extra={"address": self.address})
                self.end()
                return
            item, wait = (None, None)
            # The first frame is a bare one: batches go to a collector that has answered.
            if len(self._sent) < MAX_IN_FLIGHT and self._clock is not None:
                item, wait = self._outbox.next(now)
            if item is not None or (now - last >= self._stream._heartbeat and not self._sent):
                last = now
                yield self._frame(item, now)
                continue
            if self._stream._closing.is_set() and not len(self._outbox):
                return  # half-close: the collector ends the call when it has answered
            idle = self._stream._heartbeat - (now - last) if not self._sent else 0.5
            with self._outbox.changed:
                if not self._ended.is_set():
                    self._outbox.changed.wait(min(max(idle, 0.005), wait or 0.5, 0.5))

    def _frame(self, item: Item | None, now: float) -> pb.Frame:
        frame = pb.Frame(node=self._stream._node, clock=self._clock)
        self._sent.append((item.sequence if item else None, now))
        if item is not None:
            frame.batch = item.data
            self._stream.counts["resent" if item.sent_before else "sent"] += 1
            item.sent_before = True
        frame.sent_ns = time.monotonic_ns()
        return frame

    def answered(self, ack: pb.Ack) -> None:
        received_ns = time.monotonic_ns()
        stream, counts = self._stream, self._stream.counts
        self._clock = pb.ClockSample(
            agent_sent_ns=ack.frame_sent_ns,
            collector_received_ns=ack.collector_received_ns,
            collector_sent_ns=ack.collector_sent_ns,
            agent_received_ns=received_ns,
        )
        stream.stride = min(max(ack.stride, 1), MAX_STRIDE)
        expected = self._sent.popleft()[0] if self._sent else None
        with self._outbox.changed:
            self._outbox.changed.notify_all()
        if expected is None:
            return
        if ack.status == pb.STATUS_RETRY:
            counts["retries"] += 1
            self._outbox.again(expected, time.monotonic() + 0.5 + random.random() / 2)
            return
        self._outbox.done(expected)
        if ack.status == pb.STATUS_ACCEPTED:
            counts["acknowledged"] += 1
        elif ack.status == pb.STATUS_DUPLICATE:
            counts["acknowledged"] += 1
            counts["duplicates"] += 1
        else:
            counts["refused"] += 1
            log.error(
                "batch refused",
                extra={"sequence": expected, "reason": ack.reason[:200], "address": self.address},
            )

    def end(self) -> None:
        self._ended.set()
        with self._outbox.changed:
            self._outbox.changed.notify_all()
        if self.call is not None:
            with contextlib.suppress(Exception):
                self.call.cancel()  # type: ignore[no-untyped-call]


def _reason(error: grpc.RpcError) -> str:
    # grpc raises an RpcError that is a Call, too; its stubs do not say so.
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    name = code().name if code else "error"
    return f"{name}: {str(details() if details else error)[:160]}"
