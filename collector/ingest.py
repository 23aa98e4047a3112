"""The gRPC side: frames in, acknowledgements out. The only file that knows grpc.

One event loop in its own thread serves every agent (a thread per stream would be thousands).
Decoding happens here; what passes goes to `on_batch`, which must not block and says whether it took
the item (False: full, the agent is told to keep the batch and come again). A batch is acknowledged
only once it has been taken, and the journal (if there is one) has it: sent again to the next run of
the collector, it is a duplicate. Without a journal it counts there, where nothing else is known.
"""

from __future__ import annotations

import asyncio
import random
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

from lanterne.collector.admission import Access, Admission, Peer, peer_of
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.certificates import Certificates, Pair
from lanterne.collector.checks import Limits, check_node
from lanterne.collector.clock import ClockObservation
from lanterne.collector.complaints import Complaints
from lanterne.collector.decode import decode
from lanterne.collector.errors import (
    BatchRefused,
    ListenError,
    StreamRefused,
)
from lanterne.collector.rates import Rate, Rates
from lanterne.collector.recording import BATCH, CLOCK, Received
from lanterne.collector.seen import Seen
from lanterne.collector.server_options import server_options
from lanterne.proto import telemetry_pb2 as pb

SERVICE = "lanterne.v1.Telemetry"
END_WITHIN_SECONDS = 5.0  # of trust withdrawn; spread, so that agents do not all come at once

_END: Any = cast(Any, grpc.aio).EOF  # what read() gives at the end; missing from grpc's stubs

Item = DecodedBatch | ClockObservation


@dataclass(frozen=True)
class IngestConfig:
    limits: Limits = default(default_factory=Limits)
    nodes: int = 8_192
    access: Access = default(default_factory=Access)
    rate: Rate = default(default_factory=Rate)
    connections: int = 16_384
    # A stream is ended then, and the agent comes again: certificate and token are looked at anew.
    stream_seconds: float = 3600.0
    keepalive_seconds: float = 30.0
    # Agents may ping this often; more often costs them the connection (ENHANCE_YOUR_CALM).
    min_ping_seconds: float = 5.0


def ingest_config(
    batch_bytes: int, nodes: int, admission: Mapping[str, Any] | None = None
) -> IngestConfig:
    """From builtin values; admission: see admission_options."""
    limits = Limits(batch_bytes=batch_bytes)
    if admission is None:
        return IngestConfig(limits=limits, nodes=nodes)
    return IngestConfig(
        limits=limits,
        nodes=nodes,
        access=Access(**admission["access"]),
        rate=Rate(**admission["rate"]),
        connections=admission["connections"],
    )


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
        # Takes the frames of which something was taken, to be recorded; set before `start`.
        self.on_frame: Callable[[Received], object] | None = None
        self._stride = stride
        self._config = config or IngestConfig()
        self.seen = Seen(self._config.nodes)
        # Told of each batch that was taken, before it is acknowledged; set before `start`.
        self.on_taken: Callable[[str, int, int], object] = lambda node, epoch, sequence: None
        self._counts: Counter[str] = Counter(
            frames=0,
            batches_accepted=0,
            batches_duplicate=0,
            batches_refused=0,
            batches_retried=0,
            batches_rate_limited=0,
            clock_dropped=0,
            unknown_communicators=0,
            unknown_rows=0,
            unknown_values=0,
            streams_token=0,
            streams_node_name=0,
        )
        self._certificates: Certificates | None = None
        self._shown: Pair | None = None  # the pair that gRPC has
        self._admission = Admission()
        self._rates = Rates(self._config.rate, self._config.nodes)
        self._complaints = Complaints()
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
        """Bind "host:port" (port 0: any free one) -> the port.

        Raises ListenError, and CertificateError where a certificate or token cannot be used.
        """
        access = self._config.access
        if access.cert:
            self._certificates = Certificates(access.cert, access.key, access.client_ca)
        self._admission = Admission(access.shared_names, access.token_file)
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
            maximum_concurrent_rpcs=2 * max(c.nodes, 512),
            options=server_options(
                batch_bytes=c.limits.batch_bytes,
                connections=c.connections,
                keepalive_seconds=c.keepalive_seconds,
                min_ping_seconds=c.min_ping_seconds,
            ),
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
        port: int
        if self._certificates is None:
            port = server.add_insecure_port(address)
        else:
            self._shown = self._certificates.pair
            credentials = grpc.dynamic_ssl_server_credentials(
                _configuration(self._shown),
                self._renewed,
                require_client_authentication=self._shown.client_ca is not None,
            )
            port = server.add_secure_port(address, credentials)
        if port == 0:
            raise OSError("the address cannot be bound")
        self._server = server
        return port

    def _renewed(self) -> Any:
        """Asked by gRPC at every handshake: the certificates, or None for those it has."""
        certificates = self._certificates
        if certificates is None:
            return None
        certificates.renew()
        if certificates.pair is self._shown:
            return None
        self._shown = certificates.pair
        return _configuration(self._shown)

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
        certified = self._shown is not None and self._shown.client_ca is not None
        peer = peer_of(context.peer(), context.auth_context(), certified=certified)
        trust = self._trust()
        end_ns = time.monotonic_ns() + _spread_ns(self._config.stream_seconds)
        try:
            self._admission.check_token(context.invocation_metadata())
            while (data := await context.read()) is not _END:
                received_ns = time.monotonic_ns()
                frame, ack = self._frame(data, received_ns, peer)
                if frame is not None and frame.node not in nodes and len(nodes) < most:
                    nodes.add(frame.node)
                    self._streams[frame.node] += 1
                ack.collector_received_ns = received_ns
                ack.stride = max(1, self._stride())
                # As late as can be: what passes between the two is taken off the round trip.
                ack.collector_sent_ns = time.monotonic_ns()
                await context.write(ack)
                if trust != (now := self._trust()):
                    trust = now
                    end_ns = min(end_ns, received_ns + _spread_ns(END_WITHIN_SECONDS))
                if received_ns >= end_ns:
                    return  # the agent comes again with what was not answered
        except StreamRefused as refusal:
            code = self._turn_away(peer, refusal)
            await context.abort(code, str(refusal))
        finally:
            for node in nodes:
                self._streams[node] -= 1
                if self._streams[node] <= 0:
                    del self._streams[node]

    def _trust(self) -> tuple[int, bytes | None]:
        """Changes with whom we trust: streams of before are then looked at anew."""
        self._admission.look()
        if self._certificates is None:
            return self._admission.generation, None
        self._certificates.renew()
        return self._admission.generation, self._certificates.pair.client_ca

    def _turn_away(self, peer: Peer, refusal: StreamRefused) -> grpc.StatusCode:
        self._counts[f"streams_{refusal.cause}"] += 1
        self._complaints.stream(peer.host, refusal.cause, str(refusal))
        known = grpc.StatusCode
        return known.UNAUTHENTICATED if refusal.cause == "token" else known.PERMISSION_DENIED

    def _frame(self, data: bytes, received_ns: int, peer: Peer) -> tuple[pb.Frame | None, pb.Ack]:
        """-> (the frame if it is one, its answer without the times). Raises StreamRefused."""
        self._counts["frames"] += 1
        try:
            frame = pb.Frame.FromString(data)
        except DecodeError as error:
            return None, self._refuse(
                peer, "", pb.Ack(), "frame", f"not a lanterne.v1.Frame: {error}"
            )
        ack = pb.Ack(frame_sent_ns=frame.sent_ns)
        try:
            check_node(frame.node)
        except BatchRefused as refusal:
            return None, self._refuse(peer, "", ack, refusal.code, str(refusal))
        self._admission.check_node(peer, frame.node)
        used = CLOCK if frame.HasField("clock") and self._clock(frame) else 0
        if not frame.batch:
            ack.status = pb.STATUS_ACCEPTED
            self._keep(frame, data, received_ns, used)
            return frame, ack
        if not self._rates.take(frame.node, len(data), received_ns / 1e9):
            self._counts["batches_rate_limited"] += 1
            ack.status = pb.STATUS_RETRY
            ack.reason = "more than one node may send: send again later"
            self._keep(frame, data, received_ns, used)
            return frame, ack
        try:
            batch = decode(
                frame.batch,
                received_ns=received_ns,
                limits=self._config.limits,
                left_out=self._counts,
            )
        except BatchRefused as refusal:
            self._keep(frame, data, received_ns, used)
            return frame, self._refuse(peer, frame.node, ack, refusal.code, str(refusal))
        ack.epoch, ack.sequence = batch.epoch, batch.sequence
        if batch.node != frame.node:
            self._keep(frame, data, received_ns, used)
            reason = f"batch of node {batch.node} in a frame of node {frame.node}"
            return frame, self._refuse(peer, frame.node, ack, "node", reason)
        if not self._rates.communicators(batch.node, batch.communicators, received_ns / 1e9):
            self._keep(frame, data, received_ns, used)
            reason = "more new communicators than one node may name"
            return frame, self._refuse(peer, frame.node, ack, "cardinality", reason)
        self._take(batch, ack, peer)
        if ack.status == pb.STATUS_ACCEPTED:
            used |= BATCH
        self._keep(frame, data, received_ns, used)
        return frame, ack

    def _keep(self, frame: pb.Frame, data: bytes, received_ns: int, used: int) -> None:
        """For the recording: as received where its batch was taken, else without the batch."""
        if self.on_frame is None or not used:
            return
        if not used & BATCH and frame.batch:
            frame.ClearField("batch")
            data = frame.SerializeToString()
        self.on_frame(Received(received_ns, used, data))

    def _clock(self, frame: pb.Frame) -> bool:
        """Whether it was taken."""
        c = frame.clock
        limit = 1 << 62
        if max(c.agent_sent_ns, c.collector_received_ns, c.collector_sent_ns) >= limit:
            return False
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
        return taken

    def _take(self, batch: DecodedBatch, ack: pb.Ack, peer: Peer) -> None:
        """Hand a new batch on, once. No await between the question and the mark: one loop."""
        verdict = self.seen.verdict(batch.node, batch.epoch, batch.sequence)
        if verdict == "duplicate":
            self._counts["batches_duplicate"] += 1
            ack.status = pb.STATUS_DUPLICATE
        elif verdict == "stale":
            reason = f"epoch {batch.epoch} is older than those remembered: cannot rule out a repeat"
            self._refuse(peer, batch.node, ack, "stale_epoch", reason)
        elif self._on_batch(batch):
            self.seen.add(batch.node, batch.epoch, batch.sequence)
            self.on_taken(batch.node, batch.epoch, batch.sequence)
            self._counts["batches_accepted"] += 1
            ack.status = pb.STATUS_ACCEPTED
        else:
            self._counts["batches_retried"] += 1
            ack.status = pb.STATUS_RETRY
            ack.reason = "the collector's queue is full: send again later"

    def _refuse(self, peer: Peer, node: str, ack: pb.Ack, code: str, reason: str) -> pb.Ack:
        self._counts["batches_refused"] += 1
        self._refused[code] += 1
        self._complaints.batch(peer.host, node, code, reason)
        ack.status = pb.STATUS_REFUSED
        ack.reason = f"{code}: {reason}"
        return ack


def _configuration(pair: Pair) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(pair.key, pair.chain)], root_certificates=pair.client_ca
    )


def _spread_ns(seconds: float) -> int:
    """Between half of it and all."""
    return int(seconds * (0.5 + random.random() / 2) * 1e9)
