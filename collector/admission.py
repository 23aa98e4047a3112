"""Who may report, and for which node: bearer tokens, and the names in agents' certificates.

A certificate speaks for the node that it names: its DNS names, or its common name where it has
none. Names that the configuration lists as shared may speak for any node. Compared as host names
are, without regard to case; a wildcard is nothing but a name. Without client certificates
nothing is known about a stream's node, and whoever has the token may name any.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from lanterne.collector.certificates import content
from lanterne.collector.errors import StreamRefused
from lanterne.service.changes import Watch
from lanterne.service.errors import CertificateError

log = logging.getLogger(__name__)

SCHEME = "bearer "
MIN_TOKEN = 16  # characters; `openssl rand -base64 32` gives 44
MAX_TOKENS = 16
MAX_SHOWN = 8  # names of a certificate in one message


@dataclass(frozen=True)
class Access:
    """The part of the configuration that says who may report; empty texts for what is not used."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""
    shared_names: tuple[str, ...] = ()
    token_file: str = ""


@dataclass(frozen=True)
class Peer:
    """The other end of one stream; `names` is None where no certificate was asked for."""

    host: str
    names: tuple[str, ...] | None = None


def peer_of(address: str, auth: Mapping[str, Sequence[bytes]], *, certified: bool) -> Peer:
    """From gRPC's text of an address, such as ipv6:%5B::1%5D:4711, and its authentication."""
    host = unquote(address).partition(":")[2].rpartition(":")[0].strip("[]") or address
    if not certified:
        return Peer(host)
    found = auth.get("peer_dns") or auth.get("x509_common_name") or ()
    return Peer(host, tuple(name.decode("utf-8", "replace") for name in found))


class Admission:
    """Used in one thread. `token_file`: one token a line, each of them good: so a new one can be
    known here before agents show it."""

    def __init__(self, shared_names: Iterable[str] = (), token_file: str = "") -> None:
        """Raises CertificateError where the file cannot be used."""
        self._shared = frozenset(name.lower() for name in shared_names)
        self._file = token_file
        self._tokens = _tokens(token_file) if token_file else ()
        self._watch = Watch([token_file] if token_file else [])
        self.generation = 0  # goes up when tokens were exchanged

    def look(self) -> None:
        """Read the tokens again where they have changed; cheap."""
        if not self._file or not self._watch.changed():
            return
        try:
            found = _tokens(self._file)
        except CertificateError as error:
            self._watch.again()
            log.error("token not renewed", extra={"reason": str(error)})
            return
        if found != self._tokens:
            self._tokens = found
            self.generation += 1
            fields = {"path": self._file, "renewals": self.generation}
            log.info("token renewed", extra=fields)

    def check_token(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Of the call that opens a stream. Raises StreamRefused("token")."""
        if not self._file:
            return
        shown = next((value for key, value in metadata if key == "authorization"), None)
        if shown is None:
            raise StreamRefused(
                "token", "no bearer token was shown: set collector.token_file of the agent"
            )
        text = shown if isinstance(shown, bytes) else shown.encode()
        given = text[len(SCHEME) :] if text[: len(SCHEME)].lower() == SCHEME.encode() else b""
        # All are compared, in a time that does not tell which one, or how much of it, was right.
        if not sum([hmac.compare_digest(given, token) for token in self._tokens]):
            raise StreamRefused("token", "the bearer token is not one that this collector knows")

    def check_node(self, peer: Peer, node: str) -> None:
        """Raises StreamRefused("node_name") where the certificate does not speak for the node."""
        if peer.names is None:
            return
        names = [name.lower() for name in peer.names]
        if node.lower() in names or not self._shared.isdisjoint(names):
            return
        shown = ", ".join(name[:256] for name in peer.names[:MAX_SHOWN]) or "nobody"
        raise StreamRefused(
            "node_name",
            f"the certificate names {shown}, the agent calls itself {node}: give it its own "
            "certificate, set node.name, or list the name in tls.shared_names of the collector",
        )


def _tokens(path: str) -> tuple[bytes, ...]:
    lines = [line.strip() for line in content(path).splitlines()]
    tokens = tuple(line for line in lines if line)
    short = [token for token in tokens if len(token) < MIN_TOKEN]
    if short or len(tokens) > MAX_TOKENS:
        raise CertificateError(
            f"{path} must hold at most {MAX_TOKENS} tokens, one a line, each of {MIN_TOKEN} or "
            "more characters; `openssl rand -base64 32` makes one"
        )
    return tokens
