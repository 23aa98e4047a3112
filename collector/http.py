"""The HTTP side: /metrics, /healthz, /readyz and the JSON views, on cheroot's WSGI server.

Read only. Errors are JSON, {"error": text}. Requests are bounded in size, time and number.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from cheroot import wsgi

from lanterne.collector.errors import ListenError
from lanterne.collector.json_view import nodes_json, snapshot_json
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.view import MAX_ROWS, view

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16_384
MAX_BODY_BYTES = 4096  # nothing here reads a body
BACKLOG = 64
SHUTDOWN_SECONDS = 3
DEFER_SECONDS = 30

JSON = "application/json"
INDEX = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Lanterne collector</title></head><body>
<h1>Lanterne collector</h1>
<ul>
<li><a href="api/v1/stragglers">api/v1/stragglers</a>: the worst ranks, worst first</li>
<li><a href="api/v1/snapshot">api/v1/snapshot</a>: everything that is known now</li>
<li><a href="api/v1/nodes">api/v1/nodes</a>: which agents report, and how fresh their data is</li>
<li><a href="metrics">metrics</a>: for Prometheus</li>
<li><a href="healthz">healthz</a>, <a href="readyz">readyz</a>: for probes</li>
</ul>
<p>In a terminal: <code>lanterne-collector top --address THIS_ADDRESS</code></p>
</body></html>
"""

Start = Callable[[str, list[tuple[str, str]]], object]
Answer = tuple[str, str, bytes]  # status, content type, body


class _BadRequest(Exception):  # noqa: N818  (an answer, not a fault of ours)
    pass


class App:
    """The WSGI application.

    latest: the newest snapshot, None before the first. metrics: (content type, page) for an Accept
    header. ready: what is checked -> "" when it holds, else what is wrong.
    """

    def __init__(
        self,
        *,
        latest: Callable[[], Snapshot | None],
        metrics: Callable[[str], tuple[str, bytes]],
        ready: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._latest = latest
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._lock = threading.Lock()
        self._json: tuple[Snapshot, bytes] | None = None
        self._routes: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "/": lambda _: ("200 OK", "text/html; charset=utf-8", INDEX),
            "/metrics": self._get_metrics,
            "/healthz": lambda _: _answer("200 OK", {"status": "alive"}),
            "/readyz": self._get_ready,
            "/api/v1/snapshot": self._get_snapshot,
            "/api/v1/stragglers": self._get_stragglers,
            "/api/v1/nodes": self._get_nodes,
        }

    def __call__(self, environ: Mapping[str, Any], start_response: Start) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        path = environ.get("PATH_INFO", "/")
        headers: list[tuple[str, str]] = []
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self._routes)
            status, kind, body = _error("404 Not Found", f"no page {path!r}; there are {known}")
        elif method not in ("GET", "HEAD"):
            headers.append(("Allow", "GET, HEAD"))
            status, kind, body = _error("405 Method Not Allowed", f"{method}: use GET")
        else:
            status, kind, body = self._run(route, path, environ)
        headers += [
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ]
        start_response(status, headers)
        return [] if method == "HEAD" else [body]

    def _run(
        self,
        route: Callable[[Mapping[str, Any]], Answer],
        path: str,
        environ: Mapping[str, Any],
    ) -> Answer:
        try:
            return route(environ)
        except _BadRequest as error:
            return _error("400 Bad Request", str(error))
        except Exception:
            log.exception("%s failed", path)
            return _error("500 Internal Server Error", f"{path} failed; the log says why")

    def _get_metrics(self, environ: Mapping[str, Any]) -> Answer:
        kind, body = self._metrics(environ.get("HTTP_ACCEPT", ""))
        return "200 OK", kind, body

    def _get_ready(self, _: Mapping[str, Any]) -> Answer:
        checks = self._ready()
        status = "503 Service Unavailable" if any(checks.values()) else "200 OK"
        return _answer(
            status,
            {
                "ready": not any(checks.values()),
                "checks": {name: problem or "ok" for name, problem in checks.items()},
            },
        )

    def _get_snapshot(self, _: Mapping[str, Any]) -> Answer:
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        with self._lock:  # written once a snapshot
            if self._json is None or self._json[0] is not snapshot:
                self._json = (snapshot, snapshot_json(snapshot))
            return "200 OK", JSON, self._json[1]

    def _get_stragglers(self, environ: Mapping[str, Any]) -> Answer:
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True, max_num_fields=8)
        limit = _number(query, "limit", 20, MAX_ROWS)
        named = _number(query, "named", 0, 1)
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        shown = view(snapshot, limit=limit, only_named=bool(named))
        shown = msgspec.structs.replace(shown, served_at=self._clock())
        return "200 OK", JSON, msgspec.json.encode(shown)

    def _get_nodes(self, _: Mapping[str, Any]) -> Answer:
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        return "200 OK", JSON, nodes_json(snapshot)


def _answer(status: str, body: object) -> Answer:
    return status, JSON, msgspec.json.encode(body)


def _error(status: str, text: str) -> Answer:
    return _answer(status, {"error": text})


def _no_snapshot() -> Answer:
    return _error("503 Service Unavailable", "no snapshot yet: the collector is just starting")


def _number(query: Mapping[str, list[str]], name: str, default: int, most: int) -> int:
    text = query.get(name, [str(default)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise _BadRequest(f"{name}={text!r} must be a whole number from 0 to {most}")
    return int(text)


class _Server(wsgi.Server):
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
    """Serves an App in its own threads. The socket is bound in the constructor."""

    def __init__(
        self, app: App, host: str, port: int, *, threads: int = 4, timeout: int = 10
    ) -> None:
        self._server = _Server(
            (host, port),
            app,
            numthreads=threads,
            max=threads,
            server_name="lanterne-collector",
            request_queue_size=BACKLOG,
            timeout=timeout,
            shutdown_timeout=SHUTDOWN_SECONDS,
            accepted_queue_size=BACKLOG,
            accepted_queue_timeout=timeout,
        )
        self._server.max_request_header_size = MAX_HEADER_BYTES
        self._server.max_request_body_size = MAX_BODY_BYTES
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
