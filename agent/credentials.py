"""Certificates and token for the stream to the collector, read again when their files change.

What is on disk is taken over only when it fits together: a certificate that was written before its
key leaves the old pair in force. A Kubernetes secret is renewed by exchanging a symbolic link,
other programs rename; the signature follows links, so that each of these shows.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lanterne.agent.errors import CredentialsError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
LOOK_SECONDS = 1.0  # between two looks at the files


@dataclass(frozen=True)
class Files:
    """Paths, "" for none; `ca` alone: the collector is known by its certificate; with `cert` and
    `key` the agent is, too. Without `ca` nothing is encrypted."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""
    server_name: str = ""  # that the collector's certificate must name; "": the address's

    @property
    def tls(self) -> bool:
        return bool(self.ca)

    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key, self.token) if path)


@dataclass(frozen=True)
class Shown:
    """What a connection is made with; PEM, None for what there is none of."""

    ca: bytes | None = None
    chain: bytes | None = None
    key: bytes | None = None
    token: str = ""


def read(files: Files) -> Shown:
    """Read and checked. Raises CredentialsError naming the file."""
    before = _signature(files.paths())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca = chain = key = None
    if files.ca:
        ca = _content(files.ca)
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError) as error:
            raise CredentialsError(f"{files.ca} holds no PEM certificates: {error}") from None
    if files.cert:
        chain, key = _content(files.cert), _content(files.key)
        try:
            # Without a password: an encrypted key would ask for one at the terminal.
            context.load_cert_chain(files.cert, files.key, password="")
        except (OSError, ValueError) as error:
            raise CredentialsError(
                f"{files.cert} and {files.key} are no certificate and its unencrypted key: {error}"
            ) from None
    token = _token(files.token) if files.token else ""
    if _signature(files.paths()) != before:
        raise CredentialsError("certificates or token changed while they were read")
    return Shown(ca, chain, key, token)


class Credentials:
    """Thread-safe. Until something usable has been found, every look reads the files again."""

    def __init__(self, files: Files, clock: Callable[[], float] = time.monotonic) -> None:
        self.files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: Shown | None = None
        self._known: object = None
        self._due = 0.0
        self._problem = ""
        self._renewals = 0

    def shown(self) -> Shown:
        """What is in force; raises CredentialsError where nothing usable has been found yet."""
        self._look()
        with self._lock:
            if self._shown is None:
                raise CredentialsError(self._problem or "not read yet")
            return self._shown

    def newer_than(self, shown: Shown | None) -> bool:
        """Whether a new connection would be made with something else; cheap."""
        self._look()
        return self._shown is not shown

    def _look(self) -> None:
        with self._lock:
            now = self._clock()
            if now < self._due and self._shown is not None:
                return
            self._due = now + LOOK_SECONDS
            signature = _signature(self.files.paths())
            if signature == self._known:
                return
            try:
                found = read(self.files)
            except CredentialsError as error:
                if self._shown is not None and str(error) != self._problem:
                    log.error("certificates not renewed", extra={"reason": str(error)})
                self._problem = str(error)
                return
            self._known, self._problem = signature, ""
            if found == self._shown:
                return
            if self._shown is not None:
                self._renewals += 1
                log.info("certificates renewed", extra={"renewals": self._renewals})
            self._shown = found


def _signature(paths: Sequence[str]) -> tuple[tuple[int, ...] | None, ...]:
    found: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            s = os.stat(path)  # noqa: PTH116  (called often)
        except OSError:
            found.append(None)
        else:
            found.append((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return tuple(found)


def _content(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}; check its path") from None
    if not data.strip() or len(data) > MAX_BYTES:
        raise CredentialsError(f"{path} is empty, or larger than {MAX_BYTES} bytes")
    return data


def _token(path: str) -> str:
    """The first line that holds something: the collector knows them all, an agent shows one."""
    line = next(line for line in _content(path).splitlines() if line.strip()).strip()
    if not line.isascii() or not line.decode("ascii").isprintable():
        raise CredentialsError(f"{path} must hold a token of printable ASCII characters")
    return line.decode("ascii")
