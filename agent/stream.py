"""The stream to the collector: in order, acknowledged, resent after a loss, in its own thread.

`offer` never blocks and never fails; the drain loop knows nothing of the network. Each frame is
stamped when it leaves, and carries the four timestamps of the last answered one, for the clock
estimate. Several addresses are tried in turn, with growing, jittered pauses. The first is the one
to be at, so that the ranks of a job meet: from another one it is returned to, once it answers.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from lanterne.agent import origins
from lanterne.agent.credentials import Credentials, Files, Shown
from lanterne.agent.encode import MAX_BATCH_BYTES
from lanterne.agent.errors import CredentialsError
from lanterne.agent.outbox import Item, Outbox
from lanterne.agent.segments import Key
from lanterne.proto import telemetry_pb2 as pb
from lanterne.proto import telemetry_pb2_grpc as rpc

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 32
FIRST_PAUSE = 0.2
RETRY_PAUSE, TAKEN_PAUSE = 1.0, 4.0  # at most, until a batch is sent again
ANSWER_TIMEOUT = 15.0  # a collector that answers nothing for so long is given up
RETURN_SECONDS = 30.0  # so often, about, the first address is tried while at another one
RETURN_TIMEOUT = 2.0  # and so long: nothing is sent meanwhile
MAX_STRIDE = 65_536
FRAME_OVERHEAD = 64 << 10
OPTIONS = (
    ("grpc.max_send_message_length", MAX_BATCH_BYTES + FRAME_OVERHEAD),
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
    dropped_too_large: int = 0
    dropped_spool_full: int = 0  # the oldest of a full spool
    dropped_spool_damaged: int = 0  # written, and not to be read again
    connects: int = 0
    failures: int = 0

    def lost(self) -> dict[str, int]:
        """Batches that no collector has, by cause."""
        return {
            "queue_full": self.dropped_queue,
            "refused": self.refused,
            "too_large": self.dropped_too_large,
            "spool_full": self.dropped_spool_full,
            "spool_damaged": self.dropped_spool_damaged,
        }


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
        return_seconds: float = RETURN_SECONDS,
        outbox: Outbox | None = None,
        credentials: Credentials | None = None,
    ):
        """`outbox` takes the place of one in memory only, of the two bounds."""
        self._credentials = credentials or Credentials(Files())
        self._addresses = tuple(addresses)
        self._node = node
        self._heartbeat = heartbeat
        self._longest_pause = longest_pause
        if outbox is None:  # an empty one is false
            outbox = Outbox(max_batches=max_batches, max_bytes=max_bytes)
        self._outbox = outbox
        self._return_seconds = return_seconds
        self._closing = threading.Event()
        self._stopped = threading.Event()
        self._session: _Session | None = None
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self.counts = dict.fromkeys(Totals.__dataclass_fields__, 0)
        self.stride = 1
        self.origins = origins.UNTOLD
        self.connected = False
        self.last_error = ""
        self.round_trips = 0
        self.round_trip_seconds: float | None = None  # the best; half of it bounds the clocks

    def start(self) -> None:
        self._thread.start()

    def offer(self, sequence: int, batch: bytes) -> None:
        """Queue one encoded batch; the oldest is dropped where the bounds are reached."""
        self._outbox.put(sequence, batch)

    def use(self, addresses: Sequence[str], heartbeat: float, longest_pause: float) -> None:
        """From now on; a connection to an address that is not among them is ended."""
        self._addresses = tuple(addresses)
        self._heartbeat, self._longest_pause = heartbeat, longest_pause
        session = self._session
        if session is not None and session.address not in self._addresses:
            session.end()

    def measured(self, round_trip_ns: int) -> None:
        self.round_trips += 1
        best = self.round_trip_seconds
        seconds = max(0, round_trip_ns) / 1e9
        self.round_trip_seconds = seconds if best is None else min(best, seconds)

    @property
    def queued(self) -> tuple[int, int]:
        """(batches, bytes) not acknowledged."""
        return len(self._outbox), self._outbox.bytes

    def totals(self) -> Totals:
        dropped = self._outbox.dropped
        return Totals(
            **self.counts
            | {
                "dropped_queue": dropped["queue_full"],
                "dropped_too_large": dropped["too_large"],
                "dropped_spool_full": dropped["spool_full"],
                "dropped_spool_damaged": dropped["spool_damaged"],
            }
        )

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
            addresses = self._addresses
            turn %= len(addresses)
            session = self._once(addresses[turn], first=turn == 0)
            # Renewed certificates, here or there, are no reason to try another collector.
            same = session.finished and session.has_answered
            turn = 0 if session.returning else turn if same else turn + 1
            failed = 0 if session.has_answered else failed + 1
            if self._closing.is_set() and not len(self._outbox):
                break
            rounds = min(failed // len(addresses), 16)
            pause = min(FIRST_PAUSE * 2**rounds, self._longest_pause)
            # Half fixed, half random: agents that lost one collector together spread out.
            self._stopped.wait(pause * (0.5 + random.random() / 2))

    def _channel(self, address: str, shown: Shown) -> grpc.Channel:
        if shown.ca is None:
            return grpc.insecure_channel(address, options=OPTIONS)
        name = self._credentials.files.server_name
        options = (*OPTIONS, ("grpc.ssl_target_name_override", name)) if name else OPTIONS
        ours = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.chain)
        return grpc.secure_channel(address, ours, options=options)

    def _once(self, address: str, *, first: bool) -> _Session:
        """One connection until it ends; -> what became of it."""
        session = self._session = _Session(self, address, first=first)
        try:
            shown = session.shown = self._credentials.shown()
            metadata = (("authorization", f"Bearer {shown.token}"),) if shown.token else ()
            with self._channel(address, shown) as channel:
                stub = rpc.TelemetryStub(channel)
                session.call = stub.Report(session.frames(), metadata=metadata)
                for ack in session.call:  # type: ignore[union-attr]
                    if not session.has_answered:
                        session.has_answered = self.connected = True
                        self.counts["connects"] += 1
                        self.last_error = ""
                        log.info("connected to the collector", extra={"address": address})
                    session.answered(ack)
            session.finished = True
        except (grpc.RpcError, CredentialsError) as error:
            if not self._stopped.is_set():
                self.counts["failures"] += 1
                text = _reason(error)
                if self._credentials.files.cert and "closed" in text:
                    text += "; if this goes on: does it accept our certificate? Its log says"
                level = logging.WARNING if text != self.last_error else logging.DEBUG
                log.log(level, "no collector", extra={"address": address, "reason": text})
                self.last_error = text
                session.broken(_largest_message(error))
        finally:
            self.connected = False
            session.end()
            self._outbox.all_again()
        return session

    def _first_answers(self) -> bool:
        """Whether a connection to the first address can be made, within a short time."""
        try:
            with self._channel(self._addresses[0], self._credentials.shown()) as channel:
                grpc.channel_ready_future(channel).result(timeout=RETURN_TIMEOUT)
        except (grpc.FutureTimeoutError, CredentialsError):
            return False
        return True


class _Session:
    """One connection: what is on its way, in order, since answers come in the same order."""

    def __init__(self, stream: Stream, address: str, *, first: bool):
        self._stream = stream
        self._outbox = stream._outbox
        self._sent: deque[tuple[Key | None, float, int]] = deque()  # when, how many bytes
        self._clock: pb.ClockSample | None = None
        self._ended = threading.Event()
        self._return_at = float("inf") if first else self._next_return(time.monotonic())
        self.address = address
        self.call: grpc.Call | None = None
        self.has_answered = False
        self.returning = False  # ended because the first address answers again
        self.finished = False  # ended in good order, by either end
        self.shown: Shown | None = None  # the certificates it was made with

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
                frame = self._frame(item, now)
                if frame is not None:
                    last = now
                    yield frame
                continue
            if self._stream._closing.is_set() and not len(self._outbox):
                return  # half-close: the collector ends the call when it has answered
            if self._stream._credentials.newer_than(self.shown):
                return  # likewise; the next connection is made with the new ones
            if now >= self._return_at and not self._sent and not len(self._outbox):
                self._return_at = self._next_return(now)
                if self._stream._first_answers():
                    self.returning = True
                    log.info("returning to the first collector", extra={"from": self.address})
                    return
            idle = self._stream._heartbeat - (now - last) if not self._sent else 0.5
            with self._outbox.changed:
                if not self._ended.is_set():
                    self._outbox.changed.wait(min(max(idle, 0.005), wait or 0.5, 0.5))

    def _next_return(self, now: float) -> float:
        # Agents that lost the first collector together do not come back all at once.
        return now + self._stream._return_seconds * (0.5 + random.random())

    def _frame(self, item: Item | None, now: float) -> pb.Frame | None:
        """None where the item's batch is no longer to be had."""
        frame = pb.Frame(node=self._stream._node, clock=self._clock)
        if item is not None:
            data = self._outbox.data(item)
            if data is None:
                return None
            if len(data) > MAX_BATCH_BYTES:
                self._too_large(item.key, len(data), MAX_BATCH_BYTES)
                return None
            frame.batch = data
        frame.sent_ns = time.monotonic_ns()  # it has its size only with it; stamped again below
        self._sent.append((item.key if item else None, now, frame.ByteSize()))
        if item is not None:
            self._stream.counts["resent" if item.sent_before else "sent"] += 1
            item.sent_before = True
        frame.sent_ns = time.monotonic_ns()
        return frame

    def broken(self, most_bytes: int | None) -> None:
        """Ended by the other end, or by something between, which takes messages of at most so many
        bytes: a larger one would end every stream to come."""
        for key, _, size in list(self._sent):
            if key is not None and most_bytes is not None and size > most_bytes:
                self._too_large(key, size, most_bytes)

    def _too_large(self, key: Key, size: int, most: int) -> None:
        self._outbox.drop(key, "too_large")
        log.error(
            "batch dropped: it is too large",
            extra={"sequence": key[1], "bytes": size, "limit": most, "address": self.address},
        )

    def answered(self, ack: pb.Ack) -> None:
        received_ns = time.monotonic_ns()
        stream, counts = self._stream, self._stream.counts
        if ack.HasField("origins"):
            stream.origins = origins.read(ack.origins)
        elif self._clock is None:  # another collector, or another run of it: told nothing so far
            stream.origins = origins.UNTOLD
        self._clock = pb.ClockSample(
            agent_sent_ns=ack.frame_sent_ns,
            collector_received_ns=ack.collector_received_ns,
            collector_sent_ns=ack.collector_sent_ns,
            agent_received_ns=received_ns,
        )
        stream.stride = min(max(ack.stride, 1), MAX_STRIDE)
        stream.measured(
            received_ns - ack.frame_sent_ns - (ack.collector_sent_ns - ack.collector_received_ns)
        )
        expected = self._sent.popleft()[0] if self._sent else None
        with self._outbox.changed:
            self._outbox.changed.notify_all()
        if expected is None:
            return
        if ack.status == pb.STATUS_RETRY:
            counts["retries"] += 1
            pause = TAKEN_PAUSE if ack.taken else RETRY_PAUSE
            not_before = time.monotonic() + pause * (0.5 + random.random() / 2)
            self._outbox.again(expected, not_before, taken=ack.taken)
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
                extra={
                    "sequence": expected[1],
                    "reason": ack.reason[:200],
                    "address": self.address,
                },
            )

    def end(self) -> None:
        self._ended.set()
        with self._outbox.changed:
            self._outbox.changed.notify_all()
        if self.call is not None:
            with contextlib.suppress(Exception):
                self.call.cancel()  # type: ignore[no-untyped-call]


_LARGER = re.compile(r"message larger than max \(\d+ vs\. (\d+)\)")


def _largest_message(error: Exception) -> int | None:
    """Bytes; from gRPC's own words, where a message that was larger is why the stream ended."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if code is None or details is None or code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    found = _LARGER.search(str(details()))
    return int(found[1]) if found else None


def _reason(error: Exception) -> str:
    # grpc raises an RpcError that is a Call, too; its stubs do not say so.
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    name = code().name if code else "error"
    return f"{name}: {str(details() if details else error)[:160]}"
