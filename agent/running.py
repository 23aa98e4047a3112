"""What an agent that runs on this host tells on its own page, for `doctor`."""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from contextlib import suppress

SECONDS = 2.0
MAX_BYTES = 8 << 20
ANYWHERE = ("", "0.0.0.0", "::")  # as an address to listen on

_PLAIN = re.compile(rb"^(lanterne_agent_\w+) ([0-9.e+]+)$", re.MULTILINE)


def read(listen: str, *, secured: bool = False) -> dict[str, float]:
    """Its figures without labels, by name of the metric; nothing where no agent answers, or it asks
    for a password or a certificate.

    `listen` is HOST:PORT as the agent is configured; secured: with a web configuration."""
    host, _, port = listen.rpartition(":")
    if host.strip("[]") in ANYWHERE:
        host = "127.0.0.1"
    for scheme in ("http", "https") if secured else ("http",):
        url = f"{scheme}://{host}:{port}/metrics"
        with suppress(OSError, urllib.error.URLError, http.client.HTTPException, ValueError):
            with urllib.request.urlopen(url, timeout=SECONDS, context=_anybody()) as reply:
                return parse(reply.read(MAX_BYTES))
    return {}


def _anybody() -> ssl.SSLContext:
    """It is this host's own, and is told nothing: whoever its certificate names."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def parse(page: bytes) -> dict[str, float]:
    return {name.decode(): float(value) for name, value in _PLAIN.findall(page)}
