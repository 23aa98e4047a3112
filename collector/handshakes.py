"""What the ingest process writes on its stderr: log lines pass, failed TLS handshakes are counted.

gRPC gives its program no sign of a handshake that failed, but writes a line of its own for each.
Strangers could fill a disk with them: they are counted by cause, and told once a cause and hour.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

log = logging.getLogger(__name__)

AGAIN_SECONDS = 3600.0
MAX_LINE = 1 << 16
_FAILED = re.compile(rb"^[IWE]\d{4} .*\] Handshake failed with error (.*)")

# cause -> what the text of BoringSSL holds; the first that fits
CAUSES = {
    "tls_expired": b"certificate has expired",
    "tls_no_certificate": b"PEER_DID_NOT_RETURN_A_CERTIFICATE",
    "tls_untrusted": b"CERTIFICATE_VERIFY_FAILED",
    "tls_we_are_untrusted": b"ALERT",  # the other end says so
    "tls_no_tls": b"",  # plain text, another protocol, an old version
}
REMEDIES = {
    "tls_expired": "an agent's certificate has expired: renew it",
    "tls_no_certificate": "an agent shows no certificate: set tls.cert and tls.key there",
    "tls_untrusted": "an agent's certificate is of no authority in tls.client_ca",
    "tls_we_are_untrusted": "an agent does not trust this collector: see tls.ca of the agent",
    "tls_no_tls": "somebody does not speak TLS: an agent without tls.ca, or a stranger",
}


def cause_of(line: bytes) -> str:
    """Of a failed handshake; "" for any other line."""
    found = _FAILED.match(line)
    if found is None:
        return ""
    return next(cause for cause, text in CAUSES.items() if text in found[1])


class Handshakes:
    """Reads `source` to its end in a thread of its own; what is not counted goes to `passed_on`."""

    def __init__(
        self,
        source: BinaryIO,
        passed_on: Callable[[bytes], object] = lambda line: os.write(2, line),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        self._source, self._passed_on, self._clock = source, passed_on, clock
        self._said: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="child-stderr", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """After the other end was closed."""
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._source:
            while line := self._source.readline(MAX_LINE):
                cause = cause_of(line)
                if cause:
                    self._count(cause, line)
                else:
                    self._passed_on(line)

    def _count(self, cause: str, line: bytes) -> None:
        self.failed[cause] += 1
        now = self._clock()
        if now - self._said.get(cause, -AGAIN_SECONDS) >= AGAIN_SECONDS:
            self._said[cause] = now
            reason = line.partition(b"Handshake failed with error ")[2].decode(errors="replace")
            log.warning(
                "connection refused: %s", REMEDIES[cause],
                extra={"cause": cause, "reason": reason.strip()[:300]},
            )  # fmt: skip
