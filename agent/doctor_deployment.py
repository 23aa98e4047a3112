"""What `doctor` says of the deployment: certificates, collectors, spool, permissions, kubelet.

Every check is a function of paths and values, gives rows and never raises. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lanterne.agent.certificate import validity
from lanterne.agent.doctor_view import Row
from lanterne.agent.errors import CredentialsError
from lanterne.service import web_config
from lanterne.service.errors import CertificateError

CONNECT_SECONDS = 2.0
DAY = 86_400.0
SOON = 14 * DAY  # a certificate that ends within is worth a warning
MAX_ADDRESSES = 4
MAX_FILE = 1 << 20


def tls_rows(ca: str, cert: str, key: str, now: float | None = None) -> Iterator[Row]:
    """The three files as configured; `now`: UNIX seconds."""
    now = time.time() if now is None else now
    if not (ca or cert or key):
        remedy = "set tls.ca to encrypt it, tls.cert and tls.key too for this node's identity"
        yield Row("TLS", "info", "off: the stream to the collector is plaintext", remedy)
        return
    if bool(cert) != bool(key):
        yield Row("TLS", "fail", "only one of tls.cert and tls.key is set", "set both, or none")
    for name, path in (("tls.ca", ca), ("tls.cert", cert)):
        if path:
            yield _certificate_row(name, path, now)
    if cert and key:
        yield _pair_row(cert, key)
        yield from secret_rows(("tls.key", key))


def _certificate_row(name: str, path: str, now: float) -> Row:
    remedy = "check the path, and who may read it"
    try:
        with Path(path).open("rb") as file:
            spans = validity(file.read(MAX_FILE))
    except OSError as error:
        return Row(name, "fail", f"{path} cannot be read: {error.strerror}", remedy)
    except CredentialsError as error:
        return Row(name, "fail", f"{path}: {error}", "name a file with a certificate in PEM form")
    # A certificate comes before those of its issuers; of authorities the best one counts.
    own = name != "tls.ca"
    valid = spans[:1] if own else [s for s in spans if s[0] <= now] or spans[:1]
    begins, ends = max(valid, key=lambda span: span[1])
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends))
    if now < begins:
        since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begins))
        remedy = "check this host's clock, then the certificate"
        return Row(name, "fail", f"{path} is not valid before {since}", remedy)
    if now >= ends:
        return Row(name, "fail", f"{path} has expired: {until}", "renew it; no restart is needed")
    if ends - now < SOON:
        remedy = "see to its renewal; no restart is needed"
        return Row(name, "warn", f"{path} is valid until {until}", remedy)
    return Row(name, "ok", f"{path} is valid until {until}")


def _pair_row(cert: str, key: str) -> Row:
    try:
        # Without a password: an encrypted key would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        detail = f"{cert} and {key} do not belong together, or cannot be used: {error}"
        return Row("tls.key", "fail", detail, "the key must be the certificate's, and unencrypted")
    return Row("tls.key", "ok", f"{key} is the key of {cert}")


def secret_rows(*files: tuple[str, str]) -> Iterator[Row]:
    """(key of the configuration, path): only their owner, or a group, may read them."""
    for name, path in files:
        if not path:
            continue
        try:
            mode = Path(path).stat().st_mode
        except OSError as error:
            remedy = "create it, or correct the path"
            yield Row(name, "fail", f"{path} cannot be read: {error.strerror}", remedy)
            continue
        if not os.access(path, os.R_OK):
            remedy = "give the agent's user access to it"
            yield Row(name, "fail", f"{path} may not be read by this user", remedy)
        elif mode & (stat.S_IROTH | stat.S_IWOTH):
            detail = f"{path} is open to every user of this host (mode {stat.S_IMODE(mode):04o})"
            yield Row(name, "warn", detail, f"chmod o-rwx {path}")


def web_config_rows(listen: str, path: str, now: float | None = None) -> Iterator[Row]:
    """TLS and passwords of the agent's own pages."""
    name = "metrics.web_config"
    if not listen:
        return
    if not path:
        host = listen.rpartition(":")[0].strip("[]")
        if host == "localhost" or host == "::1" or host.startswith("127."):
            return
        remedy = "name a file in the form of Prometheus' web configuration"
        yield Row(name, "info", f"off: {listen} is plaintext and asks for no password", remedy)
        return
    try:
        found = web_config.read(Path(path))
    except CertificateError as error:
        yield Row(name, "fail", str(error), "correct it: the agent does not start with it")
        return
    what = "TLS" if found.context else "no TLS"
    yield Row(name, "ok", f"{path}: {what}, {len(found.users)} users with passwords")
    if found.context:  # the files are the configuration's own, the certificate and its key
        cert, key = found.files[1:3]
        yield _certificate_row(f"{name} cert_file", cert, time.time() if now is None else now)
        yield from secret_rows((f"{name} key_file", key))
    if found.users:
        yield from secret_rows((name, path))


def writable_by_others(name: str, path: Path | None) -> Iterator[Row]:
    """A configuration that any user can change makes them the agent's master."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        if path.stat().st_mode & stat.S_IWOTH:
            yield Row(name, "warn", f"{path} can be changed by every user", f"chmod o-w {path}")


def resolved(address: str) -> tuple[Row, tuple[str, ...]]:
    """Of HOST:PORT -> the row, and the numeric addresses."""
    host, _, port = address.rpartition(":")
    check = f"name {address}"
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        remedy = "check collector.addresses, and this host's DNS (getent hosts NAME)"
        return Row(check, "warn", f"does not resolve: {why}", remedy), ()
    numbers = tuple(dict.fromkeys(str(info[4][0]) for info in found))
    more = f" and {len(numbers) - MAX_ADDRESSES} more" if len(numbers) > MAX_ADDRESSES else ""
    return Row(check, "ok", ", ".join(numbers[:MAX_ADDRESSES]) + more), numbers


def tls_server_row(address: str, ca: str, cert: str, key: str, server_name: str) -> Row:
    """A handshake as the agent would make it: the collector's certificate, name and expiry."""
    host, _, port = address.rpartition(":")
    name = server_name or host.strip("[]")
    check = f"TLS {address}"
    try:
        context = ssl.create_default_context(cafile=ca or None)
        context.set_alpn_protocols(["h2"])
        if cert and key:
            context.load_cert_chain(cert, key, password="")
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as plain:
            with context.wrap_socket(plain, server_hostname=name) as secure:
                peer = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        remedy = f"tls.ca must be its authority's, and its certificate valid for {name}"
        return Row(check, "fail", f"certificate refused: {error.verify_message}", remedy)
    except ssl.SSLError as error:
        remedy = "does the collector speak TLS there ([tls] cert, key), and take this node's cert?"
        return Row(check, "fail", f"handshake failed: {error.reason or error}", remedy)
    except (OSError, ValueError) as error:
        return Row(check, "warn", f"no handshake: {error}", "see the row of this collector")
    ends = ssl.cert_time_to_seconds(str(peer.get("notAfter", "Jan  1 00:00:00 1970 GMT")))
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends))
    if ends - time.time() < SOON:
        return Row(check, "warn", f"valid for {name} until {until}", "see to its renewal")
    return Row(check, "ok", f"certificate is valid for {name} until {until}")


def spool_rows(path: str, max_bytes: int) -> Iterator[Row]:
    if not path:
        detail = "off: what a collector misses is kept in memory only (spool.path)"
        yield Row("spool", "info", detail)
        return
    folder = Path(path)
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if there != folder:
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            detail = f"{path} does not exist and cannot be made below {there}"
            yield Row("spool", "fail", detail, "create the folder for the agent's user, mode 0700")
            return
    elif not folder.is_dir():
        yield Row("spool", "fail", f"{path} is no folder", "name a folder in spool.path")
        return
    elif not os.access(folder, os.W_OK | os.X_OK | os.R_OK):
        remedy = "the agent's user needs it; in a unit, ReadWritePaths= or StateDirectory="
        yield Row("spool", "fail", f"{path} cannot be written", remedy)
        return
    elif folder.stat().st_mode & 0o007:
        mode = f"{stat.S_IMODE(folder.stat().st_mode):04o}"
        detail = f"{path} is open to every user (mode {mode})"
        yield Row("spool", "warn", detail, f"chmod 0700 {path}")
    free = shutil.disk_usage(there).free
    used = _size(folder)
    detail = f"{path}: {_mib(used)} used of at most {_mib(max_bytes)}, {_mib(free)} free"
    if free + used < max_bytes:
        remedy = "free some, or lower spool.max_bytes: a full disk leaves memory only"
        yield Row("spool", "warn", detail, remedy)
    else:
        yield Row("spool", "ok", detail)


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def kubelet_rows(enabled: str, socket_path: str, token_file: str) -> Iterator[Row]:
    """`enabled`: auto, on or off, as configured."""
    if enabled == "off":
        yield Row("kubelet", "info", "switched off (kubernetes.enabled)")
        return
    wanted = enabled == "on" or "KUBERNETES_SERVICE_HOST" in os.environ
    remedy = "mount /var/lib/kubelet/pod-resources into the pod, read-only"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(CONNECT_SECONDS)
            client.connect(socket_path)
    except FileNotFoundError:
        if not wanted:
            yield Row("kubelet", "info", f"not here ({socket_path}): ranks get no pod names")
        else:
            yield Row("kubelet", "fail", f"{socket_path} does not exist", remedy)
        return
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        yield Row("kubelet", "fail", f"{socket_path} cannot be used: {why}", remedy)
        return
    yield Row("kubelet", "ok", f"answers at {socket_path}")
    if token_file and not os.access(token_file, os.R_OK):
        remedy = "mount the service account's token: automountServiceAccountToken: true"
        yield Row("kubelet", "warn", f"{token_file} cannot be read: no pod names", remedy)


def clock_row(address: str, error_seconds: float | None, problem: str) -> Row:
    """`error_seconds`: half of the best round trip on the stream, None where none was answered."""
    check = f"stream {address}"
    if error_seconds is None:
        remedy = "the collector's log names what it refuses; else a proxy that knows no HTTP/2?"
        return Row(check, "warn", f"no answer: {problem or 'nothing came back'}", remedy)
    detail = f"answers; clocks are compared to within {error_seconds * 1e6:.0f} µs"
    if error_seconds > 0.01:
        remedy = "waits below twice that are not told from enqueue times: put the collector closer"
        return Row(check, "warn", detail, remedy)
    return Row(check, "ok", detail)


def listen_row(name: str, address: str) -> Row | None:
    """Whether HOST:PORT of `name` could be listened on; None where it is off."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if int(port) == 0:
        return Row(name, "ok", f"{address}: any free port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host.strip("[]") or "0.0.0.0", int(port)))
    except OSError as error:
        why = error.strerror or str(error)
        remedy = f"is another one running? choose another with {name}"
        return Row(name, "warn", f"{address} cannot be used: {why}", remedy)
    return Row(name, "ok", f"{address} is free")


def worst(rows: Sequence[Row]) -> str:
    for status in ("fail", "warn"):
        if any(row.status == status for row in rows):
            return status
    return "ok"
