"""In front of the HTTP side: TLS at its sockets, passwords and names of clients before its pages.

What the web configuration and the files it names say is taken over when they change. A file that
cannot be used leaves in force what was; encryption cannot be switched on or off in flight.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lanterne.service.changes import Watch
from lanterne.service.connections import CAUSES
from lanterne.service.errors import CertificateError
from lanterne.service.web_config import WebConfig, read

if TYPE_CHECKING:
    from lanterne.service.passwords import Passwords

log = logging.getLogger(__name__)

# Kubelets and load balancers have no password; these pages tell nothing of any job.
OPEN_PAGES = ("/healthz", "/readyz")
SOCKET = "lanterne.tls_socket"  # in the WSGI environment

Start = Callable[[str, list[tuple[str, str]]], object]
Application = Callable[[Mapping[str, Any], Start], Iterable[bytes]]


class Guard:
    """The web configuration in force, for all threads of the server."""

    def __init__(self, path: str) -> None:
        """path: of the web configuration, "" for none. Raises CertificateError."""
        self._path = path
        self._config = read(Path(path)) if path else WebConfig()
        self._watch = Watch(self._config.files)
        self._lock = threading.Lock()
        self._problem = ""
        self._passwords: Passwords | None = None
        if path:  # else bcrypt need not be in memory
            from lanterne.service.passwords import Passwords

            self._passwords = Passwords()
        self._renewals = 0
        self.refused: Counter[str] = Counter(dict.fromkeys(("password", "guesses", *CAUSES), 0))

    @property
    def encrypted(self) -> bool:
        return self._config.context is not None

    def config(self) -> WebConfig:
        """Read again where something has changed; cheap."""
        with self._lock:
            if self._path and self._watch.changed():
                self._renew()
            return self._config

    def _renew(self) -> None:
        try:
            found = read(Path(self._path))
            if (found.context is None) != (self._config.context is None):
                raise CertificateError(
                    f"{self._path}: TLS cannot be switched on or off in flight: restart"
                )
        except CertificateError as error:
            self._watch.again()
            if str(error) != self._problem:
                log.error("web configuration not renewed", extra={"reason": str(error)})
            self._problem = str(error)
            return
        self._problem = ""
        self._renewals += 1
        self._config, self._watch = found, Watch(found.files)
        log.info("web configuration renewed", extra={"renewals": self._renewals})

    def protect(self, app: Application) -> Application:
        """The application behind it."""

        def protected(environ: Mapping[str, Any], start: Start) -> Iterable[bytes]:
            config = self.config()
            answer = self._refusal(config, environ)
            if answer is None:
                return app(environ, lambda s, h: start(s, [*h, *config.headers.items()]))
            status, text, more = answer
            body = msgspec.json.encode({"error": text})
            start(
                status,
                [
                    *more,
                    ("Content-Type", "application/json"),
                    ("Content-Length", str(len(body))),
                    *config.headers.items(),
                ],
            )
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        return protected

    def _refusal(
        self, config: WebConfig, environ: Mapping[str, Any]
    ) -> tuple[str, str, list[tuple[str, str]]] | None:
        """None: may pass."""
        if config.allowed_sans and not config.allowed_sans & _names(environ.get(SOCKET)):
            self.refused["certificate"] += 1
            return "403 Forbidden", "no name in the client's certificate is allowed here", []
        if not config.users or environ.get("PATH_INFO") in OPEN_PAGES or self._passwords is None:
            return None
        verdict = self._passwords.check(
            config.users, environ.get("HTTP_AUTHORIZATION", ""), environ.get("REMOTE_ADDR", "")
        )
        if verdict == "right":
            return None
        if verdict == "busy":
            self.refused["guesses"] += 1
            return "429 Too Many Requests", "too many wrong passwords", [("Retry-After", "60")]
        self.refused["password"] += 1
        ask = [("WWW-Authenticate", 'Basic realm="lanterne"')]
        return "401 Unauthorized", "user and password are needed", ask


def _names(socket: object) -> set[str]:
    """DNS names, addresses and URIs in the other end's certificate."""
    if not isinstance(socket, ssl.SSLSocket):
        return set()
    found: Any = (socket.getpeercert() or {}).get("subjectAltName", ())
    return {str(value) for _, value in found}
