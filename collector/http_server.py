"""The HTTP side: cheroot reads requests and writes answers, `connections` has the sockets.

cheroot's own server waits in its few workers for whatever a client says next: some that say nothing
would hold all of them. Here a worker gets a request that is whole, and gives its answer back.
"""

from __future__ import annotations

import io
import logging
import re
import socket

from cheroot import wsgi
from cheroot.server import HTTPConnection

from lanterne.collector.errors import ListenError
from lanterne.service.connections import BACKLOG, HEAD_BYTES, Answer, Connections, Request
from lanterne.service.guard import SOCKET, Application, Guard

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4096  # nothing here reads a body
MAX_CONNECTIONS = 512
SHUTDOWN_SECONDS = 3
_HAS_BODY = re.compile(rb"\r\n(?:content-length|transfer-encoding)[ \t]*:", re.IGNORECASE)


class _Head(io.BytesIO):
    bytes_read = 0

    def has_data(self) -> bool:
        return False


class _Parts:
    """What cheroot writes, in the pieces in which it does: a page of megabytes is not copied."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.bytes_written = 0

    def write(self, data: bytes) -> int:
        self.parts.append(data)
        self.bytes_written += len(data)
        return len(data)


class _Exchange(HTTPConnection):
    """One request and its answer, in memory."""

    def __init__(self, server: _Server, request: Request) -> None:
        super().__init__(server, None, lambda *_: None)
        self.rfile, self.wfile = _Head(request.head), _Parts()
        self.remote_addr, self.remote_port = request.address, request.port
        if request.tls is not None:
            self.ssl_env = {"wsgi.url_scheme": "https", "HTTPS": "on", SOCKET: request.tls}


class _Server(wsgi.Server):
    """Never served: what cheroot's requests ask of their server."""

    can_add_keepalive_connection = True

    def answer(self, request: Request) -> Answer:
        exchange = _Exchange(self, request)
        keep = bool(exchange.communicate())  # type: ignore[no-untyped-call]
        return Answer(exchange.wfile.parts, keep and not _HAS_BODY.search(request.head))

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Into our log, not to stderr. A client that hangs up is nobody's error."""
        log.log(min(level, logging.WARNING), "http: %s", msg.strip(), exc_info=traceback)


class HttpServer:
    """Serves an application in its own threads. The socket is bound in the constructor."""

    def __init__(
        self,
        app: Application,
        host: str,
        port: int,
        *,
        threads: int = 4,
        timeout: int = 10,
        guard: Guard | None = None,
    ) -> None:
        """Raises ListenError."""
        guard = guard or Guard("")
        try:
            listener = _listen(host, port)
        except OSError as error:
            raise ListenError(
                f"HTTP cannot listen on {host}:{port}: {error}. Stop what uses that port "
                "(`ss -ltnp` lists it) or choose another address with --http-address"
            ) from error
        self.port: int = listener.getsockname()[1]
        server = _Server(
            (host, self.port),
            guard.protect(app),
            numthreads=1,
            server_name="lanterne-collector",
            timeout=timeout,
        )
        server.software = server.server_name
        server.max_request_header_size = HEAD_BYTES
        server.max_request_body_size = MAX_BODY_BYTES
        self._connections = Connections(
            listener,
            server.answer,
            refused=guard.refused,
            context=lambda: guard.config().context,
            threads=threads,
            seconds=timeout,
            most=MAX_CONNECTIONS,
        )

    def start(self) -> None:
        self._connections.start()

    def stop(self) -> None:
        """Answers what is being answered, then closes."""
        self._connections.stop(SHUTDOWN_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for number, (family, kind, protocol, _, address) in enumerate(found, 1):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(
                    socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::")
                )
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            if number == len(found):
                raise
        else:
            return listener
    raise OSError(f"{host} has no address")
