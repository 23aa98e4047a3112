"""The HTTP server of the agent's own pages: it is privileged, and anybody may connect.

`connections` has the sockets; here a request that is whole goes through the standard library's
parser and WSGI handler, which prometheus_client has in memory already.
"""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote_to_bytes
from wsgiref.handlers import SimpleHandler

from lanterne.service.connections import BACKLOG, Answer, Connections, Request
from lanterne.service.guard import SOCKET, Guard

log = logging.getLogger(__name__)

CONNECTIONS = 64  # at a time
SECONDS = 10.0  # for a whole request; three times that for the answer
THREADS = 2  # one may be busy with a password
SHUTDOWN_SECONDS = 1.0

App = Callable[..., Any]


class _Parser(BaseHTTPRequestHandler):
    """Of one head; where it is none of HTTP's, `answer` says so."""

    def __init__(self, request: Request) -> None:
        self.client_address = (request.address, request.port)
        self.answer = io.BytesIO()
        self.rfile, self.wfile = io.BytesIO(request.head), self.answer
        self.raw_requestline = self.rfile.readline()
        self.valid = self.parse_request()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class _Handler(SimpleHandler):
    os_environ = {}  # noqa: RUF012  (not the process's own, which would be in every request)
    server_software = "lanterne-agent"

    def log_exception(self, exc_info: Any) -> None:
        log.error("a page failed", exc_info=exc_info)


class PageServer:
    """Serves `app` in its own threads until closed. Raises OSError where the address is taken."""

    def __init__(self, host: str, port: int, app: App, guard: Guard | None = None) -> None:
        guard = guard or Guard("")
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=host == "::",
        )
        self.server_port = int(listener.getsockname()[1])
        self._app = guard.protect(app)
        self._connections = Connections(
            listener,
            self._answer,
            refused=guard.refused,
            context=lambda: guard.config().context,
            threads=THREADS,
            seconds=SECONDS,
            most=CONNECTIONS,
        )
        self._connections.start()

    def _answer(self, request: Request) -> Answer:
        parsed = _Parser(request)
        if not parsed.valid:
            return Answer([parsed.answer.getvalue()])
        handler = _Handler(
            io.BytesIO(), parsed.answer, io.StringIO(), self._environ(request, parsed)
        )
        handler.run(self._app)
        page = parsed.answer.getvalue()
        if parsed.command == "HEAD":
            page = page[: page.find(b"\r\n\r\n") + 4]
        return Answer([page])

    def _environ(self, request: Request, parsed: _Parser) -> dict[str, Any]:
        path, _, query = parsed.path.partition("?")
        environ = {
            f"HTTP_{name.upper().replace('-', '_')}": value
            for name, value in parsed.headers.items()
        }
        return environ | {
            "REQUEST_METHOD": parsed.command,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query,
            "REMOTE_ADDR": request.address,
            "SERVER_NAME": "lanterne-agent",
            "SERVER_PORT": str(self.server_port),
            "SERVER_PROTOCOL": parsed.request_version,
            SOCKET: request.tls,
        }

    def close(self) -> None:
        self._connections.stop(SHUTDOWN_SECONDS)
