"""What an agent that runs on this host tells on its own page, for `doctor`."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request

SECONDS = 2.0
MAX_BYTES = 8 << 20
ANYWHERE = ("", "0.0.0.0", "::")  # as an address to listen on

_PLAIN = re.compile(rb"^(lanterne_agent_\w+) ([0-9.e+]+)$", re.MULTILINE)


def read(listen: str) -> dict[str, float]:
    """Its figures without labels, by name of the metric; nothing where no agent answers.

    `listen` is HOST:PORT as the agent is configured."""
    host, _, port = listen.rpartition(":")
    if host.strip("[]") in ANYWHERE:
        host = "127.0.0.1"
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=SECONDS) as reply:
            return parse(reply.read(MAX_BYTES))
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError):
        return {}


def parse(page: bytes) -> dict[str, float]:
    return {name.decode(): float(value) for name, value in _PLAIN.findall(page)}
