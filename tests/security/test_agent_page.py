"""The agent's own pages: TLS and passwords in the form of Prometheus' web configuration."""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
import yaml

from lanterne.agent import running
from lanterne.agent.export import AgentState, Exporter
from lanterne.service.errors import CertificateError
from lanterne.service.guard import Guard
from tests.fixtures.authority import Authority, write
from tests.stack import SCRIPTS, Stack, wait_for

PASSWORD = "correct horse"
SECRET = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
STATE = AgentState(node="n1", steps=7)


class Site:
    """The page of an agent that is not one; its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.own = self.ca.issue("web", "localhost", "127.0.0.1")
        self.web = folder / "web.yml"
        self.exporter: Exporter | None = None
        self.port = 0

    def configure(self, **tls: object) -> None:
        files = {"cert_file": self.own.cert.name, "key_file": self.own.key.name}
        sections = {"tls_server_config": files | tls, "basic_auth_users": {"me": SECRET}}
        write(self.web, yaml.safe_dump(sections).encode())

    def start(self) -> Guard:
        guard = Guard(str(self.web))
        self.exporter = Exporter("127.0.0.1:0", lambda: STATE, guard=guard)
        self.port = self.exporter.port
        return guard

    def client(self, *names: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca.file)
        if names:
            pair = self.ca.issue("client", *names)
            context.load_cert_chain(pair.cert, pair.key)
        return context

    def get(
        self, path: str = "/metrics", *, context: ssl.SSLContext | None = None,
        password: str = PASSWORD, method: str = "GET",
    ) -> tuple[int, bytes]:  # fmt: skip
        connection = http.client.HTTPSConnection(
            "localhost", self.port, timeout=30, context=context or self.client()
        )
        word = base64.b64encode(f"me:{password}".encode()).decode()
        try:
            headers = {"Authorization": f"Basic {word}"} if password else {}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    found.configure()
    yield found
    if found.exporter is not None:
        found.exporter.close()


def test_encrypted_and_with_a_password(site: Site) -> None:
    guard = site.start()
    status, page = site.get()
    assert status == 200
    assert b'lanterne_agent_http_refused_total{reason="slow"} 0.0' in page
    assert site.get(password="")[0] == 401
    assert site.get(password="wrong")[0] == 401
    assert site.get("/healthz", password="") == (200, b'{"status": "alive"}')
    assert site.get("/healthz", method="HEAD") == (200, b"")
    with pytest.raises(ssl.SSLCertVerificationError):
        site.get(context=ssl.create_default_context())
    plain = http.client.HTTPConnection("localhost", site.port, timeout=30)
    plain.request("GET", "/metrics")
    with pytest.raises((OSError, http.client.HTTPException)):
        plain.getresponse()
    plain.close()
    wait_for(lambda: guard.refused["certificate"] >= 2, 30, "both handshakes are counted")
    assert guard.refused["password"] == 2
    page = site.get()[1]
    assert b'lanterne_agent_http_refused_total{reason="password"} 2.0' in page


def test_client_certificates_and_their_names(site: Site) -> None:
    site.configure(
        client_auth_type="RequireAndVerifyClientCert",
        client_ca_file=site.ca.file.name,
        client_allowed_sans=["prometheus"],
    )
    site.start()
    assert site.get(context=site.client("prometheus"))[0] == 200
    assert site.get(context=site.client("somebody"))[0] == 403
    with pytest.raises((OSError, http.client.HTTPException)):
        site.get()


def test_a_certificate_is_renewed_in_flight(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.start()
    assert site.get()[0] == 200
    new = Authority(site.folder, "new")
    site.own.replace_by(new.issue("web-2", "localhost"))

    def renewed() -> bool:
        try:
            return site.get(context=ssl.create_default_context(cafile=new.file))[0] == 200
        except ssl.SSLError:
            return False

    wait_for(renewed, 30, "the new certificate is shown")
    write(site.web, b"basic_auth_users: {me: not a hash}")
    wait_for(lambda: renewed() and "not renewed" in caplog.text, 30, "what is wrong is told")
    assert "basic_auth_users.me must be a bcrypt hash" in str(caplog.records[-1].__dict__)
    assert site.get(context=ssl.create_default_context(cafile=new.file))[0] == 200


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tls_server_config: {cert_file: nowhere.crt, key_file: web.key}", "nowhere.crt"),
        ("tls_server_config: {cert_file: 7, key_file: web.key}", "cert_file = 7 must be the path"),
        ("basic_auth_users: {me: plain}", "htpasswd -nBC 10 me"),
        ("basic_auth: {}", "basic_auth is not known here; allowed are tls_server_config"),
        ("[", "cannot be read"),
        ("[" * 5000, "cannot be read"),
        ("a: 2020-99-99", "cannot be read"),
    ],
)
def test_mistakes_are_named_with_their_remedy(site: Site, text: str, named: str) -> None:
    write(site.web, text.encode())
    with pytest.raises(CertificateError) as found:
        Guard(str(site.web))
    assert str(site.web) in str(found.value)
    assert named in str(found.value)


def agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    settings = ("--set", "probes.enabled=false", "--set", "experts.socket=")
    return subprocess.run(
        [SCRIPTS / "lanterne-agent", *arguments, *settings],
        text=True, capture_output=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip


def test_an_agent_never_starts_in_plain_text_for_want_of_a_certificate(site: Site) -> None:
    wrong = ("--set", f"metrics.web_config={site.folder}/nowhere.yml")
    ended = agent("--metrics", "127.0.0.1:0", *wrong)
    assert ended.returncode == 1
    assert f"{site.folder}/nowhere.yml: cannot be read" in ended.stderr
    dry = agent("--dry-run", *wrong)
    assert dry.returncode == 1
    assert "fail  metrics.web_config" in dry.stdout
    relative = agent("--check-config", "--set", "metrics.web_config=web.yml")
    assert relative.returncode == 2
    assert "an absolute path" in relative.stderr


def test_dry_run_and_doctor_cover_it(site: Site) -> None:
    rows = json.loads(
        agent("doctor", "--json", "--set", f"metrics.web_config={site.web}").stdout
    )["rows"]  # fmt: skip
    found = {row["check"]: (row["status"], row["detail"]) for row in rows}
    assert found["metrics.web_config"] == ("ok", f"{site.web}: TLS, 1 users with passwords")
    assert found["metrics.web_config cert_file"][0] in ("ok", "warn")
    site.own.replace_by(site.ca.issue("old", "localhost", expired=True))
    dry = agent("--dry-run", "--set", f"metrics.web_config={site.web}")
    assert "fail  metrics.web_config cert_file" in dry.stdout
    assert "has expired" in " ".join(dry.stdout.split())
    open_to_all = agent("--dry-run", "--metrics", ":0")
    assert "info  metrics.web_config" in open_to_all.stdout
    assert "plaintext" in open_to_all.stdout


def test_a_real_agent_shows_it(site: Site) -> None:
    """And `doctor` still reads what it tells of blind steps, where it asks for no password."""
    files = {"cert_file": site.own.cert.name, "key_file": site.own.key.name}
    write(site.web, yaml.safe_dump({"tls_server_config": files}).encode())
    sections = {
        "probes": {"enabled": False},
        "experts": {"socket": ""},
        "metrics": {"web_config": str(site.web)},
    }
    stack = Stack(site.folder, [], agent=sections)
    stack.agent = stack._start("lanterne-agent", stack.agent_config)
    site.port = stack.agent_port
    listen = f"127.0.0.1:{stack.agent_port}"
    try:
        wait_for(lambda: running.read(listen, secured=True), 60, "it answers")
        assert "lanterne_agent_steps_total" in running.read(listen, secured=True)
        assert running.read(listen) == {}
        assert b"lanterne_agent_info" in site.get()[1]
        assert "scheme=https" in stack.logs()
    finally:
        stack.stop()
