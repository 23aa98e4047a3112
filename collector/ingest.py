"""The gRPC side: frames in, acknowledgements out. The only file that knows grpc.

One event loop in its own thread serves every agent (a thread per stream would be thousands).
Decoding happens here; what passes goes to `on_batch`, which must not block and says whether it took
the item (False: full, the agent is told to keep the batch and come again). A batch is acknowledged
only once it has been taken. If the collector is killed after that, what it knew is gone with it, so
a batch resent to the next one counts once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from lanterne.collector.batch import DecodedBatch
from lanterne.collector.checks import Limits, check_node
from lanterne.collector.clock import ClockObservation
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused, ListenError
from lanterne.collector.seen import Seen
from lanterne.proto import telemetry_pb2 as pb

SERVICE = "lanterne.v1.Telemetry"
FRAME_OVERHEAD = 64 << 10

_END: Any = cast(Any, grpc.aio).EOF  # what read() gives at the end; missing from grpc's stubs

Item = DecodedBatch | ClockObservation


@dataclass(frozen=True)
class IngestConfig:
    limits: Limits = default(default_factory=Limits)
    nodes: int = 8_192
    keepalive_seconds: float = 30.0
    # Agents may ping this often; more often costs them the connection (ENHANCE_YOUR_CALM).
    min_ping_seconds: float = 5.0


class Ingest:
    """listen(address) -> port; start(); stop(). Counters may be read from any thread."""

    def __init__(
        self,
        *,
        on_batch: Callable[[Item], bool],
        stride: Callable[[], int] = lambda: 1,
        config: IngestConfig | None = None,
    ) -> None:
        """on_batch: takes a DecodedBatch or ClockObservation without blocking; False when full.
        stride: what to ask of the agents in the next Ack. Both are called in the server's thread.
        """
        self._on_batch = on_batch
        self._stride = stride
        self._config = config or IngestConfig()
        self._seen = Seen(self._config.nodes)
        self._counts: Counter[str] = Counter(
            frames=0,
            batches_accepted=0,
            batches_duplicate=0,
            batches_refused=0,
            batches_retried=0,
            clock_dropped=0,
        )
        self._refused: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._serving = False

    # ---- reading, from any thread

    def counts(self) -> Mapping[str, int]:
        """Totals of frames and batches, by what became of them."""
        return dict(self._counts)

    def refused(self) -> Mapping[str, int]:
        """Refused batches by reason code."""
        return dict(self._refused)

    def connected(self) -> frozenset[str]:
        """Nodes with an open stream."""
        return frozenset(n for n, streams in list(self._streams.items()) if streams > 0)

    # ---- life

    def listen(self, address: str) -> int:
        """Bind "host:port" (port 0: any free one) -> the port. Raises ListenError."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="ingest", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread
        try:
            port = asyncio.run_coroutine_threadsafe(self._bind(address), loop).result()
        except (RuntimeError, OSError) as error:
            self._join()
            raise ListenError(
                f"cannot listen on {address} for agents: {error}; is another collector running, "
                "or the address not one of this machine?"
            ) from None
        return port

    async def _bind(self, address: str) -> int:
        c = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", c.limits.batch_bytes + FRAME_OVERHEAD),
                ("grpc.keepalive_time_ms", int(c.keepalive_seconds * 1000)),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", int(c.min_ping_seconds * 1000)),
                ("grpc.http2.max_ping_strikes", 2),
                # Without this a second collector would silently share the port.
                ("grpc.so_reuseport", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._report,
            request_deserializer=None,  # frames are parsed here, so that garbage is counted
            response_serializer=pb.Ack.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Report": handler}),)
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        port: int = server.add_insecure_port(address)
        if port == 0:
            raise OSError("the address cannot be bound")
        self._server = server
        return port

    def start(self) -> None:
        """Serve, and say so to health checks; call `listen` before."""
        if self._loop is None:
            raise ListenError("listen(address) must be called before start()")
        asyncio.run_coroutine_threadsafe(self._run(), self._loop).result()
        self.set_serving(True)

    async def _run(self) -> None:
        if self._server is not None:
            await self._server.start()

    @property
    def serving(self) -> bool:
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """What the gRPC health service says, for "" and for lanterne.v1.Telemetry."""
        self._serving = serving
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._set_health(serving), self._loop).result()

    async def _set_health(self, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if serving else state.NOT_SERVING
        if self._health is not None:
            for service in ("", SERVICE):
                await self._health.set(service, status)

    def stop(self, grace_seconds: float = 1.0) -> None:
        """Say NOT_SERVING, take no new streams, end the open ones, and return. Idempotent."""
        if self._loop is None:
            return
        self._serving = False
        asyncio.run_coroutine_threadsafe(self._stop(grace_seconds), self._loop).result()
        self._join()

    async def _stop(self, grace_seconds: float) -> None:
        await self._set_health(False)
        if self._server is not None:
            await self._server.stop(grace_seconds)
            self._server = None

    def _join(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    # ---- the stream

    async def _report(self, _: object, context: Any) -> None:
        """Read and answer until the agent ends its stream. By read and write, not by generators:
        those cost half as much again."""
        most = self._config.nodes
        nodes: set[str] = set()  # one for an agent's own stream, many for a relay's
        try:
            while (data := await context.read()) is not _END:
                received_ns = time.monotonic_ns()
                frame, ack = self._frame(data, received_ns)
                if frame is not None and frame.node not in nodes and len(nodes) < most:
                    nodes.add(frame.node)
                    self._streams[frame.node] += 1
                ack.collector_received_ns = received_ns
                ack.stride = max(1, self._stride())
                # As late as can be: what passes between the two is taken off the round trip.
                ack.collector_sent_ns = time.monotonic_ns()
                await context.write(ack)
        finally:
            for node in nodes:
                self._streams[node] -= 1
                if self._streams[node] <= 0:
                    del self._streams[node]

    def _frame(self, data: bytes, received_ns: int) -> tuple[pb.Frame | None, pb.Ack]:
        """-> (the frame if it is one, its answer without the times)."""
        self._counts["frames"] += 1
        try:
            frame = pb.Frame.FromString(data)
        except DecodeError as error:
            return None, self._refuse(pb.Ack(), "frame", f"not a lanterne.v1.Frame: {error}")
        ack = pb.Ack(frame_sent_ns=frame.sent_ns)
        try:
            check_node(frame.node)
        except BatchRefused as refusal:
            return None, self._refuse(ack, refusal.code, str(refusal))
        if frame.HasField("clock"):
            self._clock(frame)
        if not frame.batch:
            ack.status = pb.STATUS_ACCEPTED
            return frame, ack
        try:
            batch = decode(frame.batch, received_ns=received_ns, limits=self._config.limits)
        except BatchRefused as refusal:
            return frame, self._refuse(ack, refusal.code, str(refusal))
        ack.epoch, ack.sequence = batch.epoch, batch.sequence
        if batch.node != frame.node:
            reason = f"batch of node {batch.node} in a frame of node {frame.node}"
            return frame, self._refuse(ack, "node", reason)
        self._take(batch, ack)
        return frame, ack

    def _clock(self, frame: pb.Frame) -> None:
        c = frame.clock
        limit = 1 << 62
        if max(c.agent_sent_ns, c.collector_received_ns, c.collector_sent_ns) >= limit:
            return
        taken = c.agent_received_ns < limit and self._on_batch(
            ClockObservation(
                node=frame.node,
                agent_sent_ns=c.agent_sent_ns,
                collector_received_ns=c.collector_received_ns,
                collector_sent_ns=c.collector_sent_ns,
                agent_received_ns=c.agent_received_ns,
            )
        )
        if not taken:
            self._counts["clock_dropped"] += 1

    def _take(self, batch: DecodedBatch, ack: pb.Ack) -> None:
        """Hand a new batch on, once. No await between the question and the mark: one loop."""
        verdict = self._seen.verdict(batch.node, batch.epoch, batch.sequence)
        if verdict == "duplicate":
            self._counts["batches_duplicate"] += 1
            ack.status = pb.STATUS_DUPLICATE
        elif verdict == "stale":
            reason = f"epoch {batch.epoch} is older than those remembered: cannot rule out a repeat"
            self._refuse(ack, "stale_epoch", reason)
        elif self._on_batch(batch):
            self._seen.add(batch.node, batch.epoch, batch.sequence)
            self._counts["batches_accepted"] += 1
            ack.status = pb.STATUS_ACCEPTED
        else:
            self._counts["batches_retried"] += 1
            ack.status = pb.STATUS_RETRY
            ack.reason = "the collector's queue is full: send again later"

    def _refuse(self, ack: pb.Ack, code: str, reason: str) -> pb.Ack:
        self._counts["batches_refused"] += 1
        self._refused[code] += 1
        ack.status = pb.STATUS_REFUSED
        ack.reason = f"{code}: {reason}"
        return ack
