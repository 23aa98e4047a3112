"""/healthz and /readyz of the agent, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from lanterne.agent.export import AgentState, Exporter
from tests.stack import free_port


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ready_or_why_not() -> None:
    problem = stalled = ""
    address = f"127.0.0.1:{free_port()}"
    exporter = Exporter(address, AgentState, lambda: problem, lambda: stalled)
    base = f"http://127.0.0.1:{exporter.port}"
    try:
        assert get(f"{base}/healthz") == (200, '{"status": "alive"}')
        status, body = get(f"{base}/readyz")
        assert (status, json.loads(body)) == (200, {"ready": True, "checks": {"probes": "ok"}})
        problem = "not loaded: no bcc"
        status, body = get(f"{base}/readyz")
        assert (status, json.loads(body)) == (503, {"ready": False, "checks": {"probes": problem}})
        assert get(f"{base}/healthz")[0] == 200
        stalled = "no progress for 61 s"
        assert get(f"{base}/healthz") == (503, json.dumps({"status": stalled}))
        assert "lanterne_agent_info" in get(f"{base}/metrics")[1]
    finally:
        exporter.close()
