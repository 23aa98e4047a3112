"""The gRPC side: the server, its health service, and the streams of agents. The only file that
knows grpc.

One event loop in its own thread serves every agent (a thread per stream would be thousands), and
never waits for a disk. What a frame is answered is in `frames`. A batch is acknowledged only once
it has been taken, and the journal (if there is one) has it on disk: sent again to the next run of
the collector, it is a duplicate. Without a journal it counts there, where nothing else is known.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from lanterne.collector.admission import Admission, Peer, peer_of
from lanterne.collector.answers import Disk
from lanterne.collector.certificates import Certificates, Pair
from lanterne.collector.errors import ListenError, StreamRefused
from lanterne.collector.frames import Frames, Item
from lanterne.collector.ingest_config import IngestConfig
from lanterne.collector.journal import Journal
from lanterne.collector.origins import Origins
from lanterne.collector.recording import Received
from lanterne.collector.seen import Seen
from lanterne.collector.server_options import server_options
from lanterne.collector.streams import Streams
from lanterne.proto import telemetry_pb2 as pb

SERVICE = "lanterne.v1.Telemetry"

_END: Any = cast(Any, grpc.aio).EOF  # what read() gives at the end; missing from grpc's stubs


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
        self._config = config or IngestConfig()
        self._frames = Frames(on_batch=on_batch, config=self._config)
        self._streams = Streams(
            self._frames, self._config, stride=stride, trust=self._trust, end=_END
        )
        self._certificates: Certificates | None = None
        self._shown: Pair | None = None  # the pair that gRPC has
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Any = None
        self._serving = False

    # ---- reading, from any thread

    def counts(self) -> Mapping[str, int]:
        """Totals of frames and batches, by what became of them."""
        return dict(self._frames.counts)

    def refused(self) -> Mapping[str, int]:
        """Refused batches by reason code."""
        return dict(self._frames.refused)

    def connected(self) -> frozenset[str]:
        """Nodes with an open stream."""
        return self._streams.connected()

    # ---- what it is told

    @property
    def origins(self) -> Origins:
        return self._streams.origins

    @property
    def seen(self) -> Seen:
        """Which batches were taken."""
        return self._frames.seen

    def record(self, take: Callable[[Received], object]) -> None:
        """Before `start`: `take` gets the frames of which something was taken, without blocking."""
        self._frames.on_frame = take

    def keep(self, journal: Journal) -> None:
        """Before `start`: acknowledge only what this has kept; it knows what `seen` does."""
        self._frames.journal = journal
        self._streams.disk = Disk(journal)

    # ---- life

    def listen(self, address: str) -> int:
        """Bind "host:port" (port 0: any free one) -> the port.

        Raises ListenError, and CertificateError where a certificate or token cannot be used.
        """
        access = self._config.access
        if access.cert:
            self._certificates = Certificates(access.cert, access.key, access.client_ca)
        self._frames.admission = Admission(access.shared_names, access.token_file)
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
        certified = self._shown is not None and self._shown.client_ca is not None
        peer = peer_of(context.peer(), context.auth_context(), certified=certified)
        try:
            self._frames.admission.check_token(context.invocation_metadata())
            await self._streams.serve(context, peer)
        except StreamRefused as refusal:
            code = self._turn_away(peer, refusal)
            await context.abort(code, str(refusal))

    def _trust(self) -> tuple[int, bytes | None]:
        """Changes with whom we trust: streams of before are then looked at anew."""
        admission = self._frames.admission
        admission.look()
        if self._certificates is None:
            return admission.generation, None
        self._certificates.renew()
        return admission.generation, self._certificates.pair.client_ca

    def _turn_away(self, peer: Peer, refusal: StreamRefused) -> grpc.StatusCode:
        self._frames.counts[f"streams_{refusal.cause}"] += 1
        self._frames.complaints.stream(peer.host, refusal.cause, str(refusal))
        known = grpc.StatusCode
        return known.UNAUTHENTICATED if refusal.cause == "token" else known.PERMISSION_DENIED


def _configuration(pair: Pair) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(pair.key, pair.chain)], root_certificates=pair.client_ca
    )
