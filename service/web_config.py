"""Prometheus' web configuration: TLS, passwords and headers of the HTTP side, one YAML file.

The form is that of Prometheus itself and its exporters, so that one file does for all of them; keys
that mean something there and cannot be done here are refused, never passed over. Paths in it are
relative to its folder.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lanterne.service.errors import CertificateError

MAX_BYTES = 1 << 20
MAX_USERS = 256

_SECTIONS = ("tls_server_config", "http_server_config", "basic_auth_users")
_TLS_KEYS = (
    "cert_file", "key_file", "client_auth_type", "client_ca_file", "client_allowed_sans",
    "min_version", "max_version", "cipher_suites", "prefer_server_cipher_suites",
)  # fmt: skip
_VERSIONS = {
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
# "RequestClientCert" and "RequireAnyClientCert" are not here: Python's ssl checks what it asks for.
_CLIENTS = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# TLS 1.2 names of Go's crypto/tls and of OpenSSL; TLS 1.3 has no choice in either.
_CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{suite}": f"ECDHE-{key}-{name}"
    for key in ("RSA", "ECDSA")
    for suite, name in {
        "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
        "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
        "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
    }.items()
}
_TLS13_CIPHERS = {
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
}
_HEADERS = (
    "Content-Security-Policy", "Strict-Transport-Security", "X-Content-Type-Options",
    "X-Frame-Options", "X-XSS-Protection",
)  # fmt: skip


@dataclass(frozen=True)
class WebConfig:
    """One file, read and checked."""

    users: Mapping[str, bytes] = field(default_factory=dict)  # name -> bcrypt hash
    headers: Mapping[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None  # None: plain text
    allowed_sans: frozenset[str] = frozenset()  # of client certificates; empty: any
    files: tuple[str, ...] = ()  # it was made from


def read(path: Path) -> WebConfig:
    """Raises CertificateError naming the file, the key and what is allowed."""
    import yaml  # here: who has no such file has no YAML in memory

    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        document = yaml.safe_load(text[:MAX_BYTES])
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise CertificateError(
            f"{path}: cannot be read: {reason}; name a YAML file that this user may read"
        ) from None
    document = _mapping(path, "the file", document)
    _known(path, "", document, _SECTIONS)
    tls = _mapping(path, "tls_server_config", document.get("tls_server_config"))
    context = _context(path, tls) if tls else None
    files = [str(path)]
    files += [_file(path, tls, k) for k in ("cert_file", "key_file", "client_ca_file") if k in tls]
    return WebConfig(
        users=_users(path, document.get("basic_auth_users")),
        headers=_headers(path, document.get("http_server_config")),
        context=context,
        allowed_sans=frozenset(_texts(path, tls, "client_allowed_sans")),
        files=tuple(files),
    )


def _context(path: Path, tls: Mapping[str, Any]) -> ssl.SSLContext:
    _known(path, "tls_server_config.", tls, _TLS_KEYS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _choice(path, tls, "min_version", "TLS12", _VERSIONS)
    context.maximum_version = _choice(path, tls, "max_version", "TLS13", _VERSIONS)
    cert, key = _file(path, tls, "cert_file"), _file(path, tls, "key_file")
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{path}: {cert} and {key} are no certificate and its unencrypted key: {error}"
        ) from None
    verify = _choice(path, tls, "client_auth_type", "", _CLIENTS)
    if verify is not ssl.CERT_NONE:
        ca = _file(path, tls, "client_ca_file")
        try:
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise CertificateError(f"{path}: {ca} holds no certificates: {error}") from None
        context.verify_mode = verify
    elif "client_ca_file" in tls or tls.get("client_allowed_sans"):
        raise CertificateError(
            f"{path}: tls_server_config.client_ca_file is nothing without client_auth_type: "
            "RequireAndVerifyClientCert"
        )
    _set_ciphers(path, tls, context)
    return context


def _set_ciphers(path: Path, tls: Mapping[str, Any], context: ssl.SSLContext) -> None:
    names = _texts(path, tls, "cipher_suites")
    unknown = [name for name in names if name not in _CIPHERS and name not in _TLS13_CIPHERS]
    if unknown:
        raise CertificateError(
            f"{path}: tls_server_config.cipher_suites: {unknown[0]!r} is not one of "
            f"{', '.join(_CIPHERS)}"
        )
    chosen = [_CIPHERS[name] for name in names if name in _CIPHERS]
    if chosen:
        context.set_ciphers(":".join(chosen))
    if tls.get("prefer_server_cipher_suites", True) is False:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE


def _users(path: Path, found: object) -> Mapping[str, bytes]:
    users: dict[str, bytes] = {}
    for name, secret in _mapping(path, "basic_auth_users", found).items():
        text = secret if isinstance(secret, str) else ""
        if not text.startswith(("$2a$", "$2b$", "$2y$")) or len(text) != 60 or not text.isascii():
            raise CertificateError(
                f"{path}: basic_auth_users.{name} must be a bcrypt hash, as `htpasswd -nBC 10 "
                f"{name}` makes it"
            )
        if ":" in str(name):
            raise CertificateError(f"{path}: basic_auth_users: {name!r} must not hold a colon")
        users[str(name)] = text.encode("ascii")
    if len(users) > MAX_USERS:
        raise CertificateError(f"{path}: basic_auth_users has more than {MAX_USERS} entries")
    return users


def _headers(path: Path, found: object) -> Mapping[str, str]:
    http = _mapping(path, "http_server_config", found)
    _known(path, "http_server_config.", http, ("headers", "http2"))  # HTTP/1.1 is always spoken
    headers = _mapping(path, "http_server_config.headers", http.get("headers"))
    _known(path, "http_server_config.headers.", headers, _HEADERS)
    for name, value in headers.items():
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise CertificateError(
                f"{path}: http_server_config.headers.{name} = {value!r:.50} must be a text of "
                "printable ASCII characters"
            )
    return dict(headers)


def _mapping(path: Path, key: str, found: object) -> Mapping[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise CertificateError(
            f"{path}: {key} must be a mapping, `key: value` lines, not {found!r:.50}"
        )
    return found


def _known(path: Path, prefix: str, found: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in found:
        if key not in allowed:
            raise CertificateError(
                f"{path}: {prefix}{key} is not known here; allowed are {', '.join(allowed)}"
            )


def _file(path: Path, tls: Mapping[str, Any], key: str) -> str:
    value = tls.get(key)
    if not isinstance(value, str) or not value:
        raise CertificateError(
            f"{path}: tls_server_config.{key} = {value!r} must be the path of a file"
        )
    return str(path.parent / value)


def _texts(path: Path, tls: Mapping[str, Any], key: str) -> list[str]:
    found = tls.get(key) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise CertificateError(
            f"{path}: tls_server_config.{key} = {found!r:.50} must be a list of texts"
        )
    return found


def _choice(
    path: Path, tls: Mapping[str, Any], key: str, default: str, among: Mapping[str, Any]
) -> Any:
    value = tls.get(key, default)
    if not isinstance(value, str) or value not in among:
        allowed = ", ".join(repr(name) for name in among if name)
        raise CertificateError(
            f"{path}: tls_server_config.{key} = {value!r}: allowed are {allowed}"
        )
    return among[value]
