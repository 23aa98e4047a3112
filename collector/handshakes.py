"""What the ingest process writes on its stderr: log lines pass, failed TLS handshakes are counted.

gRPC gives its program no sign of a handshake that failed, but writes a line of its own for each,
and, traced (`traced`), one that holds the address. Strangers could fill a disk with them: they are
counted by cause, and told once an hour for each address and cause. All other lines of the trace are
left out. No promise of gRPC's stands behind any of these lines: the tests see that they come.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import BinaryIO

from lanterne.collector.complaints import Complaints

MAX_LINE = 1 << 16
MAX_NAMELESS = 64  # failures in a row without an address: gRPC writes its trace in another way
UNKNOWN = "unknown"
_FAILED = re.compile(rb"^[IWE]\d{4} .*\] Handshake failed with error (.*)")
_TRACE = re.compile(rb"^[IWE]\d{4} [^\]]*\b(?:handshaker\.cc|channel_trace\.h|trace\.cc):\d+\] ")
_TRACED = re.compile(rb"error=\w+: Ssl handshake failed \(\w+\): (.*)")
# An error of gRPC's has several lines: where it arose, and then what else the record says.
_MORE = re.compile(rb"^(?:=== Source Location Trace|src/core/| shutdown=|$)")
_ADDRESS = re.compile(
    rb"endpoint_peer_address=ipv[46]:(?:%5B|\[)?([0-9a-fA-F:.]+?)(?:%\w*)?(?:%5D|\])?:\d+[,}]"
)

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


def traced(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose gRPC is to tell of failed handshakes."""
    asked = [name for name in (environment.get("GRPC_TRACE", ""), "handshaker") if name]
    found = {**environment, "GRPC_TRACE": ",".join(asked)}
    if found.get("GRPC_VERBOSITY", "").lower() != "debug":  # less than usual would hide them
        found.pop("GRPC_VERBOSITY", None)
    return found


def cause_of(line: bytes) -> str:
    """Of a failed handshake; "" for any other line."""
    found = _FAILED.match(line)
    return "" if found is None else _cause(found[1])


def _cause(reason: bytes) -> str:
    return next(cause for cause, text in CAUSES.items() if text in reason)


class Handshakes:
    """Reads `source` to its end in a thread of its own; what is not counted goes to `passed_on`."""

    def __init__(
        self,
        source: BinaryIO,
        passed_on: Callable[[bytes], object] = lambda line: os.write(2, line),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
        self._source, self._passed_on = source, passed_on
        self._complaints = Complaints(clock)
        self._reason = b""  # of the failure whose address comes next
        self._nameless = 0
        self._thread = threading.Thread(target=self._run, name="child-stderr", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """After the other end was closed."""
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._source:
            while line := self._source.readline(MAX_LINE):
                if failed := _FAILED.match(line):
                    self._count(failed[1])
                elif _TRACE.match(line):
                    found = _TRACED.search(line)
                    self._reason = found[1].removesuffix(b": OK") if found else b""
                elif _MORE.match(line):
                    self._name(line)
                else:
                    self._passed_on(line)

    def _count(self, reason: bytes) -> None:
        self.failed[_cause(reason)] += 1
        self._nameless += 1
        if self._nameless > MAX_NAMELESS:
            self._say(UNKNOWN, reason)

    def _name(self, line: bytes) -> None:
        address = _ADDRESS.search(line) if self._reason else None
        if address is not None:
            self._say(address[1].decode("ascii"), self._reason)
            self._reason = b""

    def _say(self, peer: str, reason: bytes) -> None:
        self._nameless = 0
        cause, text = _cause(reason), reason.decode(errors="replace").strip()[:300]
        self._complaints.handshake(peer, cause, REMEDIES[cause], text)
