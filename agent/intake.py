"""The agent's small HTTP intake for expert load: a Unix socket, and TCP on this host if wanted.

    POST /v1/experts   JSON {"workload": TEXT, "counts": [[...], ...]}, or a .npy body
    POST /v1/routed    a completion of vLLM that has routed_experts, ?experts=N
    GET  /healthz

The agent is privileged and whoever may write to the socket is not trusted: bodies are bounded in
size and number, connections in number and time, and nothing that comes is ever executed. The
standard library's server does: prometheus_client has it in memory already.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import socket
import socketserver
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from lanterne.agent.errors import IntakeError
from lanterne.agent.expert_counts import ExpertCounts
from lanterne.agent.expert_formats import from_json, from_npy, from_routed

log = logging.getLogger(__name__)

MODE = 0o660
CONNECTIONS = 8
SECONDS = 10.0  # of a connection, from first byte to last
DRAINED_BYTES = 1 << 20  # of a body that is refused
DRAIN_SECONDS = 0.2  # without a byte
MAX_FIELDS = 16  # of a query
NPY = ("application/x-npy", "application/octet-stream")


class Limiter:
    """At most `rate` a second on average, and as many at once."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._tokens = rate
        self._at = clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            now = self._clock()
            self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
            self._at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


class _Refused(Exception):  # noqa: N818  (an answer, not a fault of ours)
    def __init__(self, status: int, cause: str, text: str) -> None:
        super().__init__(text)
        self.status, self.cause = status, cause


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS
    protocol_version = "HTTP/1.0"  # one request a connection: there are few of them
    server_version = "lanterne-agent"
    sys_version = ""
    _body_read = False

    def handle(self) -> None:
        # `timeout` is between two bytes only: one a second would hold a connection for ever.
        end = threading.Timer(SECONDS, self._end)
        end.daemon = True
        end.start()
        try:
            super().handle()
        finally:
            end.cancel()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/healthz":
            self._answer(200, {"status": "alive"})
        else:
            self._answer(404, {"error": "there are POST /v1/experts, /v1/routed, GET /healthz"})

    def do_POST(self) -> None:
        intake = self.server.intake
        try:
            self._take(intake)
        except _Refused as refusal:
            intake.refused[refusal.cause] += 1
            self._drain()
            self._answer(refusal.status, {"error": str(refusal)})
        except (OSError, EOFError):
            intake.refused["broken"] += 1
        else:
            self._answer(200, {"status": "accepted"})

    def _take(self, intake: Intake) -> None:
        if not intake.limiter.take():
            raise _Refused(429, "rate", f"more than {intake.max_per_second:g} requests a second")
        url = urlsplit(self.path)
        if url.path not in ("/v1/experts", "/v1/routed"):
            raise _Refused(404, "path", f"no page {url.path!r}: POST /v1/experts or /v1/routed")
        body = self._body(intake.max_body_bytes)
        try:
            query = dict(parse_qsl(url.query, max_num_fields=MAX_FIELDS, keep_blank_values=True))
            kind = self.headers.get_content_type()
            if url.path == "/v1/routed":
                told, cumulative = from_routed(body, query)
            elif kind in NPY:
                told, cumulative = from_npy(body, query)
            else:
                told, cumulative = from_json(body)
        except ValueError as error:
            raise _Refused(400, "content", str(error)) from None
        intake.counts.add(told, cumulative=cumulative)

    def _body(self, limit: int) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            raise _Refused(411, "length", "chunked bodies are not read: send Content-Length")
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit():
            raise _Refused(411, "length", "send Content-Length")
        if len(text) > 12 or int(text) > limit:
            raise _Refused(413, "size", f"the body is larger than {limit} bytes")
        self._body_read = True
        body = self.rfile.read(int(text))
        if len(body) < int(text):
            raise EOFError
        return body

    def _drain(self) -> None:
        """Read what a client still sends, or it would see a broken pipe instead of the reason."""
        text = self.headers.get("Content-Length", "")
        if self._body_read or not text.isascii() or not text.isdigit() or len(text) > 12:
            return
        left = min(int(text), DRAINED_BYTES)
        with contextlib.suppress(OSError):
            self.connection.settimeout(DRAIN_SECONDS)  # it may have announced what it never sends
            while left > 0 and (part := self.rfile.read1(left)):
                left -= len(part)
        self.connection.settimeout(self.timeout)

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "local"


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: object, family: int, intake: Intake) -> None:
        self.address_family = family
        self.intake = intake
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def process_request(self, request: object, client_address: object) -> None:
        if not self.intake.slots.acquire(blocking=False):
            self.intake.refused["connections"] += 1
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self.intake.slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        self.intake.refused["broken"] += 1


class Intake:
    """Listens until closed. Loads go to `counts`."""

    def __init__(
        self,
        counts: ExpertCounts,
        *,
        path: Path | None,
        listen: str = "",
        max_body_bytes: int = 4 << 20,
        max_per_second: float = 50.0,
    ) -> None:
        """path: of the Unix socket; None: none. listen: HOST:PORT of this host; "": none.
        Raises IntakeError; nothing is left open then."""
        self.counts = counts
        self.max_body_bytes, self.max_per_second = max_body_bytes, max_per_second
        self.limiter = Limiter(max_per_second)
        self.refused: Counter[str] = Counter()
        self.slots = threading.BoundedSemaphore(CONNECTIONS)
        self.port = 0
        self._path = path
        self._servers: list[_Server] = []
        self._threads: list[threading.Thread] = []
        try:
            if path is not None:
                self._servers.append(self._unix(path))
            if listen:
                self._servers.append(self._tcp(listen))
        except (OSError, IntakeError) as error:
            where = listen if self._servers or path is None else path
            self.close()
            if isinstance(error, IntakeError):
                raise
            raise IntakeError(f"intake cannot listen at {where}: {error}") from error
        self._threads = [
            threading.Thread(target=server.serve_forever, name="intake", daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def _unix(self, path: Path) -> _Server:
        _remove_stale(path)
        before = os.umask(0o777 & ~MODE)  # never, not even for a moment, open to all
        try:
            return _Server(str(path), socket.AF_UNIX, self)
        finally:
            os.umask(before)

    def _tcp(self, listen: str) -> _Server:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = _Server((host, int(port)), family, self)
        self.port = int(server.server_address[1])
        return server

    def close(self) -> None:
        for server in self._servers:
            if self._threads:
                server.shutdown()
            server.server_close()
            if server.address_family == socket.AF_UNIX and self._path is not None:
                self._path.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join(2.0)
        self._servers, self._threads = [], []


def _remove_stale(path: Path) -> None:
    """What an agent left behind; raises IntakeError where somebody listens, or it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise IntakeError(f"intake: {path} exists and is no socket; remove it")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise IntakeError(f"intake: {path} cannot be tried: {error}") from error
        else:
            raise IntakeError(f"intake: another agent listens at {path}")
