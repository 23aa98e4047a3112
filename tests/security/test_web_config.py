"""The HTTP side behind Prometheus' web configuration: a real server, real clients, real TLS."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from lanterne.collector.http_server import HttpServer
from lanterne.service.errors import CertificateError
from lanterne.service.guard import Guard
from lanterne.service.passwords import Passwords
from lanterne.service.web_config import read
from tests.fixtures.authority import Authority, write
from tests.stack import wait_for

PASSWORD = "correct horse"
SECRET = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def page(environ: Mapping[str, Any], start: Any) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.own = self.ca.issue("web", "localhost", "127.0.0.1")
        self.server: HttpServer | None = None

    def configure(self, **sections: object) -> Path:
        path = self.folder / "web.yml"
        write(path, yaml.safe_dump(sections).encode())
        return path

    def tls(self, **more: object) -> dict[str, object]:
        return {"cert_file": self.own.cert.name, "key_file": self.own.key.name, **more}

    def start(self, *, timeout: int = 2, **sections: object) -> Guard:
        guard = Guard(str(self.configure(**sections)))
        self.server = HttpServer(page, "127.0.0.1", 0, threads=2, timeout=timeout, guard=guard)
        self.server.start()
        return guard

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.port

    def get(
        self, path: str = "/metrics", *, context: ssl.SSLContext | None = None,
        user: str | None = None, password: str = PASSWORD,
    ) -> tuple[int, dict[str, str]]:  # fmt: skip
        headers = {}
        if user is not None:
            both = base64.b64encode(f"{user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {both}"
        connection = (
            http.client.HTTPSConnection("localhost", self.port, timeout=20, context=context)
            if context
            else http.client.HTTPConnection("localhost", self.port, timeout=20)
        )
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def client(self, *names: str) -> ssl.SSLContext:
        """Trusts the authority; shows a certificate with these names."""
        context = ssl.create_default_context(cafile=self.ca.file)
        if names:
            pair = self.ca.issue("client", *names)
            context.load_cert_chain(pair.cert, pair.key)
        return context


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    if found.server is not None:
        found.server.stop()


def test_encrypted_and_with_headers(site: Site) -> None:
    headers = {"Strict-Transport-Security": "max-age=60"}
    site.start(tls_server_config=site.tls(), http_server_config={"headers": headers})
    status, found = site.get(context=site.client())
    assert status == 200
    assert found["strict-transport-security"] == "max-age=60"
    with pytest.raises(OSError):
        site.get()
    with pytest.raises(ssl.SSLCertVerificationError):
        site.get(context=ssl.create_default_context())
    old = site.client()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)):
        site.get(context=old)


def test_client_certificates_and_their_names(site: Site) -> None:
    guard = site.start(
        tls_server_config=site.tls(
            client_auth_type="RequireAndVerifyClientCert",
            client_ca_file=site.ca.file.name,
            client_allowed_sans=["prometheus"],
        )
    )
    assert site.get(context=site.client("prometheus"))[0] == 200
    assert site.get(context=site.client("somebody"))[0] == 403
    with pytest.raises(OSError):
        site.get(context=site.client())
    wait_for(lambda: guard.refused["certificate"] == 2, 20, "both were counted")


def test_passwords(site: Site) -> None:
    guard = site.start(basic_auth_users={"prometheus": SECRET})
    status, headers = site.get()
    assert status == 401
    assert headers["www-authenticate"].startswith("Basic ")
    assert site.get(user="prometheus")[0] == 200
    assert site.get(user="prometheus", password="wrong")[0] == 401
    assert site.get(user="nobody")[0] == 401
    assert guard.refused["password"] == 3
    for path in ("/healthz", "/readyz"):
        assert site.get(path)[0] == 200
    for path in ("/healthz/", "//healthz", "/metrics?/healthz", "/healthz/../metrics"):
        assert site.get(path)[0] in (400, 401)


def test_guesses_are_bounded_and_known_passwords_still_pass(site: Site) -> None:
    guard = site.start(basic_auth_users={"prometheus": SECRET})
    assert site.get(user="prometheus")[0] == 200
    answers = [site.get(user="prometheus", password=f"guess{n}")[0] for n in range(15)]
    assert answers[:10] == [401] * 10
    assert 429 in answers[10:]
    assert guard.refused["guesses"] >= 1
    assert site.get(user="prometheus")[0] == 200


def test_a_user_that_does_not_exist_costs_a_hash_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer must not tell which users there are."""
    asked: list[bytes] = []
    real = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda p, h: asked.append(h) or real(p, h))
    header = "Basic " + base64.b64encode(f"nobody:{PASSWORD}".encode()).decode()
    assert Passwords().check({"prometheus": SECRET.encode()}, header, "::1") == "wrong"
    assert asked == [SECRET.encode()]


def test_a_remembered_password_ends_with_its_hash() -> None:
    passwords = Passwords()
    header = "Basic " + base64.b64encode(f"a:{PASSWORD}".encode()).decode()
    assert passwords.check({"a": SECRET.encode()}, header, "::1") == "right"
    other = bcrypt.hashpw(b"another", bcrypt.gensalt(4))
    assert passwords.check({"a": other}, header, "::1") == "wrong"
    assert passwords.check({"b": SECRET.encode()}, header, "::1") == "wrong"


@pytest.mark.parametrize("prefix", ["$2a$", "$2b$", "$2y$"])
def test_hashes_as_htpasswd_and_others_make_them(prefix: str) -> None:
    header = "Basic " + base64.b64encode(f"a:{PASSWORD}".encode()).decode()
    stored = (prefix + SECRET[4:]).encode()
    assert Passwords().check({"a": stored}, header, "::1") == "right"


def test_what_changes_on_disk_is_taken_over_in_flight(site: Site) -> None:
    site.start(tls_server_config=site.tls(), basic_auth_users={"a": SECRET})
    before = site.client()
    assert site.get(context=before, user="a")[0] == 200
    site.configure(tls_server_config=site.tls(), basic_auth_users={"b": SECRET})
    wait_for(lambda: site.get(context=before, user="b")[0] == 200, 20, "the new user is known")
    assert site.get(context=before, user="a")[0] == 401
    other = Authority(site.folder, "other")
    site.own.replace_by(other.issue("web-2", "localhost"))
    after = ssl.create_default_context(cafile=other.file)

    def renewed() -> bool:
        try:
            return site.get(context=after, user="b")[0] == 200
        except ssl.SSLError:
            return False

    wait_for(renewed, 20, "the new certificate is shown")


def test_a_broken_file_leaves_in_force_what_was(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.start(tls_server_config=site.tls(), basic_auth_users={"a": SECRET})
    write(site.folder / "web.yml", b"basic_auth_users: [")
    context = site.client()

    def told() -> bool:
        assert site.get(context=context, user="a")[0] == 200
        return "web configuration not renewed" in caplog.text

    wait_for(told, 20, "the log says so")
    # Without its section the side would be open to all: TLS does not go in flight.
    site.configure(basic_auth_users={"a": SECRET})
    assert site.get(context=context, user="a")[0] == 200


def test_clients_that_stop_in_the_handshake_hold_up_nobody(site: Site) -> None:
    site.start(timeout=60, tls_server_config=site.tls())  # longer than our client waits
    with socket.create_connection(("127.0.0.1", site.port)) as stuck:
        stuck.sendall(b"\x16\x03\x01\x02")  # the beginning of a ClientHello
        for _ in range(3):
            assert site.get(context=site.client())[0] == 200


def test_a_request_that_trickles_in_is_ended(site: Site) -> None:
    """A byte now and then would keep a worker for ever."""
    site.start(http_server_config={})
    ended = threading.Event()
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as trickle:

        def send() -> None:
            try:
                while not ended.wait(0.5):
                    trickle.sendall(b"x")
            except OSError:
                pass

        sender = threading.Thread(target=send)
        sender.start()
        try:
            while trickle.recv(4096):
                pass
        except ConnectionError:
            pass
        finally:
            ended.set()
            sender.join()
    assert site.get()[0] == 200


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- a", "must be a mapping"),
        ("tls_config: {}", "tls_config is not known"),
        ("tls_server_config: {cert_file: web.crt}", "tls_server_config.key_file"),
        ("tls_server_config: {cert_file: web.crt, key_file: none}", "unencrypted key"),
        ("tls_server_config: {cert_file: web.crt, key_file: web.key, min_version: TLS10}", "TLS12"),
        (
            "tls_server_config: {cert_file: web.crt, key_file: web.key, client_auth_type: [x]}",
            "client_auth_type",
        ),
        (
            "tls_server_config: {cert_file: web.crt, key_file: web.key, client_ca_file: ca.crt}",
            "client_auth_type",
        ),
        (
            "tls_server_config: {cert_file: web.crt, key_file: web.key, "
            "client_auth_type: RequestClientCert}",
            "RequireAndVerifyClientCert",
        ),
        (
            "tls_server_config: {cert_file: web.crt, key_file: web.key, "
            "cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}",
            "cipher_suites",
        ),
        ("basic_auth_users: {a: secret}", "bcrypt"),
        ("basic_auth_users: {a: 1}", "bcrypt"),
        ("http_server_config: {headers: {Set-Cookie: a}}", "Set-Cookie"),
        ('http_server_config: {headers: {X-Frame-Options: "a\\r\\nSet-Cookie: b"}}', "text"),
        ("a: !!python/object/apply:os.system [true]", "cannot be read"),
        ("&a [*a", "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(site: Site, text: str, named: str) -> None:
    path = site.folder / "web.yml"
    path.write_text(text)
    with pytest.raises(CertificateError, match=named):
        read(path)


def test_ciphers_and_versions_as_go_names_them(site: Site) -> None:
    path = site.configure(
        tls_server_config=site.tls(
            min_version="TLS12",
            max_version="TLS12",
            cipher_suites=["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_AES_128_GCM_SHA256"],
            prefer_server_cipher_suites=True,
        )
    )
    context = read(path).context
    assert context is not None
    assert context.maximum_version is ssl.TLSVersion.TLSv1_2
    two = [c["name"] for c in context.get_ciphers() if c["protocol"] == "TLSv1.2"]
    assert two == ["ECDHE-ECDSA-AES256-GCM-SHA384"]
