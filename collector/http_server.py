"""cheroot's WSGI server, bounded: silent and slow clients, TLS handshakes, whole requests.

TLS is not cheroot's: its adapter shakes hands in the one thread that accepts, where a client that
stops in the middle would hold up all others. Here a worker does it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any

from cheroot import wsgi
from cheroot.makefile import MakeFile
from cheroot.server import HTTPConnection
from cheroot.ssl import Adapter

from lanterne.collector.errors import ListenError
from lanterne.collector.guard import SOCKET, Application, Guard

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16_384
MAX_BODY_BYTES = 4096  # nothing here reads a body
BACKLOG = 64
SHUTDOWN_SECONDS = 3
DEFER_SECONDS = 30
WHOLE_REQUEST = 3  # timeouts; the timeout itself is that of a single read or write


class _Tls(Adapter):
    """Sockets that are going to be TLS; the context may be another one for each."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def bind(self, sock: socket.socket) -> socket.socket:
        return sock

    def wrap(self, sock: socket.socket) -> tuple[socket.socket, Mapping[str, Any]]:
        context = self._guard.config().context
        if context is None:  # cannot be: it is not switched off in flight
            raise ssl.SSLError("no certificate")
        wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return wrapped, {"wsgi.url_scheme": "https", "HTTPS": "on", SOCKET: wrapped}

    def get_environ(self) -> Mapping[str, Any]:
        return {}

    def makefile(self, sock: socket.socket, mode: str = "r", bufsize: int = -1) -> Any:
        return MakeFile(sock, mode, bufsize)


class _Connection(HTTPConnection):
    _shaken = False

    def communicate(self) -> bool:
        """One request, in a worker's thread; -> whether the connection stays open."""
        # `timeout` is between two bytes only: one a second would hold a worker for ever.
        end = threading.Timer(WHOLE_REQUEST * self.server.timeout, self._end)
        end.daemon = True
        end.start()
        try:
            if isinstance(self.socket, ssl.SSLSocket) and not self._shaken:
                self.socket.do_handshake()
                self._shaken = True
            return bool(super().communicate())  # type: ignore[no-untyped-call]
        except OSError as error:
            self._broken(error)
            return False
        finally:
            end.cancel()

    def _broken(self, error: OSError) -> None:
        if not self._shaken and isinstance(error, ssl.SSLError):
            self.server.guard.refused["certificate"] += 1
            log.warning(
                "http: TLS handshake failed",
                extra={"peer": self.remote_addr, "reason": str(error)[:200]},
            )

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            # Not SSLSocket's own, which takes its TLS state away from under the worker.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class _Server(wsgi.Server):
    ConnectionClass = _Connection
    guard: Guard

    @staticmethod
    def bind_socket(socket_: socket.socket, bind_addr: tuple[str, int]) -> socket.socket:
        """Closes the socket where it cannot be bound.

        A connection is handed over only once it has said something (TCP_DEFER_ACCEPT): a worker
        waits for the first bytes of whatever is accepted, and a few silent clients would hold all.
        """
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_SECONDS)
        try:
            socket_.bind(bind_addr)
        except OSError:
            socket_.close()
            raise
        return socket_

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
        self._server = _Server(
            (host, port),
            guard.protect(app),
            numthreads=threads,
            max=threads,
            server_name="lanterne-collector",
            request_queue_size=BACKLOG,
            timeout=timeout,
            shutdown_timeout=SHUTDOWN_SECONDS,
            accepted_queue_size=BACKLOG,
            accepted_queue_timeout=timeout,
        )
        self._server.guard = guard
        self._server.max_request_header_size = MAX_HEADER_BYTES
        self._server.max_request_body_size = MAX_BODY_BYTES
        if guard.encrypted:
            self._server.ssl_adapter = _Tls(guard)
        try:
            self._server.prepare()
        except OSError as error:
            raise ListenError(
                f"HTTP cannot listen on {host}:{port}: {error}. Stop what uses that port "
                "(`ss -ltnp` lists it) or choose another address with --http-address"
            ) from error
        self.port: int = self._server.bind_addr[1]
        self._thread = threading.Thread(target=self._server.serve, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answers what is being answered, then closes."""
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(SHUTDOWN_SECONDS + 1)
