"""The HTTP side: /metrics, /healthz, /readyz and the JSON views, as a WSGI application.

Read only. Errors are JSON, {"error": text}. Requests are bounded in size, time and number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from lanterne.collector.advice_json import advice_json
from lanterne.collector.experts_json import experts_json
from lanterne.collector.json_view import communicators_json, nodes_json, snapshot_json
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.view import MAX_ROWS, view

log = logging.getLogger(__name__)


JSON = "application/json"
INDEX = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Lanterne collector</title></head><body>
<h1>Lanterne collector</h1>
<ul>
<li><a href="api/v1/stragglers">api/v1/stragglers</a>: the worst ranks, worst first</li>
<li><a href="api/v1/snapshot">api/v1/snapshot</a>: everything that is known now</li>
<li><a href="api/v1/communicators">api/v1/communicators</a>: the same of some, chosen by
<code>?workload=</code>, <code>comm=</code>, <code>comm_hash=</code></li>
<li><a href="api/v1/experts">api/v1/experts</a>: load of each expert, what engines tell</li>
<li><a href="api/v1/advice">api/v1/advice</a>: what could be done about the experts</li>
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
    header. ready: what is checked -> "" when it holds, else what is wrong. stalled: "" while the
    analysis gets on, else why it should be started again.
    """

    def __init__(
        self,
        *,
        latest: Callable[[], Snapshot | None],
        metrics: Callable[[str], tuple[str, bytes]],
        ready: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.time,
        stalled: Callable[[], str] = lambda: "",
    ) -> None:
        self._latest = latest
        self._stalled = stalled
        self._metrics = metrics
        self._ready = ready
        self._clock = clock
        self._lock = threading.Lock()
        self._json: tuple[Snapshot, bytes] | None = None
        self._routes: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "/": lambda _: ("200 OK", "text/html; charset=utf-8", INDEX),
            "/metrics": self._get_metrics,
            "/healthz": self._get_health,
            "/readyz": self._get_ready,
            "/api/v1/snapshot": self._get_snapshot,
            "/api/v1/communicators": self._get_communicators,
            "/api/v1/stragglers": self._get_stragglers,
            "/api/v1/nodes": self._get_nodes,
            "/api/v1/experts": self._get_experts,
            "/api/v1/advice": self._get_advice,
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

    def _get_health(self, _: Mapping[str, Any]) -> Answer:
        stalled = self._stalled()
        status = "503 Service Unavailable" if stalled else "200 OK"
        return _answer(status, {"status": stalled or "alive"})

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

    def _get_communicators(self, environ: Mapping[str, Any]) -> Answer:
        """?comm_hash=0x…, ?workload=…, ?comm=…, or any of them together."""
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True, max_num_fields=8)
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        asked = {name: query.get(name, [""])[-1] for name in ("comm_hash", "workload", "comm")}
        shown = communicators_json(
            snapshot,
            comm_hash=asked["comm_hash"],
            workload=asked["workload"],
            name=asked["comm"],
        )
        return "200 OK", JSON, shown

    def _get_nodes(self, _: Mapping[str, Any]) -> Answer:
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        return "200 OK", JSON, nodes_json(snapshot)

    def _get_advice(self, _: Mapping[str, Any]) -> Answer:
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        return "200 OK", JSON, advice_json(snapshot)

    def _get_experts(self, _: Mapping[str, Any]) -> Answer:
        snapshot = self._latest()
        if snapshot is None:
            return _no_snapshot()
        return "200 OK", JSON, experts_json(snapshot)


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
