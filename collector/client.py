"""How `top`, `diagnose` and `plan` show themselves to a collector whose HTTP side has TLS or
passwords."""

from __future__ import annotations

import argparse
import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lanterne.service.errors import CertificateError

PASSWORD_VARIABLE = "LANTERNE_PASSWORD"


@dataclass(frozen=True)
class Client:
    """For urllib; nothing of it is used where the collector is asked in plain text."""

    context: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def scheme(self) -> str:
        """Of an address that names none."""
        return "https" if self.context else "http"


def client(
    *, ca: str = "", cert: str = "", key: str = "", user: str = "", password_file: str = ""
) -> Client:
    """Paths and a name, "" for none. A password is never a flag: any user could read it in the
    list of processes. Raises CertificateError."""
    context = None
    try:
        if ca or cert:
            context = ssl.create_default_context(cafile=ca or None)
        if context is not None and cert:
            context.load_cert_chain(cert, key or None, password="")
    except (OSError, ValueError) as error:
        raise CertificateError(f"--ca, --cert or --key cannot be used: {error}") from None
    headers = {}
    if user:
        both = f"{user}:{_password(password_file)}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(both).decode("ascii")
    return Client(context, headers)


def client_of(arguments: argparse.Namespace) -> Client:
    """By the flags of `cli_offline.add_client_flags`. Raises CertificateError."""
    return client(
        ca=arguments.ca,
        cert=arguments.cert,
        key=arguments.key,
        user=arguments.user,
        password_file=arguments.password_file,
    )


def _password(path: str) -> str:
    if not path:
        found = os.environ.get(PASSWORD_VARIABLE)
        if found is None:
            raise CertificateError(
                f"--user needs the password: in a file (--password-file) or in {PASSWORD_VARIABLE}"
            )
        return found
    try:
        return Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(f"--password-file {path} cannot be read: {error}") from None
