"""The HTTP server of the agent's own pages, bounded: it is privileged, and anybody may connect.

The standard library's, which prometheus_client has in memory already; but that one starts a thread
for each connection and waits for ever for a request.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

CONNECTIONS = 16  # at a time; what comes beyond is closed at once
SECONDS = 10.0  # of a connection, from first byte to last


class _Handler(WSGIRequestHandler):
    timeout = SECONDS

    def handle(self) -> None:
        # `timeout` is between two bytes only: one a second would hold a connection for ever.
        end = threading.Timer(SECONDS, self._end)
        end.daemon = True
        end.start()
        try:
            super().handle()
        except OSError:  # the client has gone, or its time was over
            pass
        finally:
            end.cancel()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


class PageServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves `app` in its own threads until closed. Raises OSError where the address is taken."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, app: Callable[..., Any]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self.refused = 0
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(target=self.serve_forever, name="pages", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        # HTTPServer's asks the resolver for a name that nobody needs.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "lanterne-agent", int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.refused += 1
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing of a client's is worth a traceback."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(2.0)
