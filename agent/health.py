"""/healthz and /readyz beside the metrics page, for Kubernetes' probes and load balancers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class HealthPages:
    """A WSGI application before another one.

    /healthz: 200 where `stalled` gives "", else 503: start it again. /readyz: the same for
    `problem`: it lives, and cannot do its work. Both are called from HTTP threads.
    """

    def __init__(self, others: App, problem: Callable[[], str], stalled: Callable[[], str]):
        self._others = others
        self._problem = problem
        self._stalled = stalled

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/healthz":
            stalled = self._stalled()
            return _answer(start_response, not stalled, {"status": stalled or "alive"})
        if path == "/readyz":
            problem = self._problem()
            page = {"ready": not problem, "checks": {"probes": problem or "ok"}}
            return _answer(start_response, not problem, page)
        return self._others(environ, start_response)


def _answer(start_response: Callable[..., Any], good: bool, body: object) -> list[bytes]:
    page = json.dumps(body).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(page)))]
    start_response("200 OK" if good else "503 Service Unavailable", headers)
    return [page]
