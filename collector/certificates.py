"""The collector's certificate, its key, and whose clients it trusts; renewed without a restart.

What is on disk is taken over only when it fits together: a certificate that was written before its
key leaves the old pair in force, and one line of the log.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from lanterne.service.changes import Watch, signature
from lanterne.service.errors import CertificateError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Pair:
    """PEM: what a server shows, its private key, and the authorities of clients (None: any)."""

    chain: bytes
    key: bytes
    client_ca: bytes | None


def read(cert: str, key: str, client_ca: str) -> Pair:
    """Read and checked. Raises CertificateError naming the file."""
    before = signature((cert, key))
    chain, secret = content(cert), content(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password: an encrypted key would ask for one at the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{cert} and {key} are no certificate and its unencrypted key: {error}"
        ) from None
    if signature((cert, key)) != before:
        raise CertificateError(f"{cert} or {key} changed while they were read")
    return Pair(chain, secret, authorities(client_ca) if client_ca else None)


def authorities(path: str) -> bytes:
    """Raises CertificateError where the file holds no certificate of an authority."""
    data = content(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise CertificateError(f"{path} holds no certificates in PEM form: {error}") from None
    return data


def content(path: str) -> bytes:
    """Raises CertificateError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}; check its path") from None
    if not data.strip() or len(data) > MAX_BYTES:
        raise CertificateError(f"{path} is empty, or larger than {MAX_BYTES} bytes")
    return data


class Certificates:
    """The pair in force. Thread-safe: gRPC asks from threads of its own, at every handshake."""

    def __init__(self, cert: str, key: str, client_ca: str) -> None:
        """Raises CertificateError."""
        self._paths = (cert, key, client_ca)
        self._watch = Watch([path for path in self._paths if path])
        self._lock = threading.Lock()
        self._problem = ""
        self.pair = read(*self._paths)
        self.renewals = 0

    def renew(self) -> None:
        """Take over what has changed on disk; cheap where nothing has."""
        with self._lock:
            if not self._watch.changed():
                return
            try:
                found = read(*self._paths)
            except CertificateError as error:
                if str(error) != self._problem:
                    log.error("certificate not renewed", extra={"reason": str(error)})
                self._problem = str(error)
                self._watch.again()
                return
            self._problem = ""
            if found != self.pair:
                self.pair = found
                self.renewals += 1
                fields = {"path": self._paths[0], "renewals": self.renewals}
                log.info("certificate renewed", extra=fields)
