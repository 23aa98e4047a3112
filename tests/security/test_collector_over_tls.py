"""A real collector whose HTTP side has TLS and passwords: its start, `top`, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
import yaml

from tests.fixtures.authority import Authority
from tests.stack import SCRIPTS, wait_for

PASSWORD = "correct horse"


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.ca.issue("web", "localhost", "127.0.0.1")
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
        web = {
            "tls_server_config": {"cert_file": "web.crt", "key_file": "web.key"},
            "basic_auth_users": {"me": hashed},
        }
        self.web = folder / "web.yml"
        self.web.write_text(yaml.safe_dump(web))
        (folder / "password").write_text(PASSWORD + "\n")
        self.ports = folder / "ports.json"
        self.process: subprocess.Popen[str] | None = None

    def environment(self, **more: str) -> dict[str, str]:
        return os.environ | {"LANTERNE_COLLECTOR_STATE_PATH": ""} | more

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPTS / "lanterne-collector", *arguments],
            env=self.environment(**variables), text=True, capture_output=True, timeout=60,
        )  # fmt: skip

    def start(self) -> int:
        """-> the HTTP port."""
        command = [
            SCRIPTS / "lanterne-collector", "--ingest-address", "127.0.0.1:0",
            "--http-address", "127.0.0.1:0", "--ports-file", self.ports,
        ]  # fmt: skip
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, text=True, stdout=log, stderr=log,
                env=self.environment(LANTERNE_COLLECTOR_HTTP_WEB_CONFIG=str(self.web)),
            )  # fmt: skip
        wait_for(self.ports.exists, 60, "the collector has started")
        port: int = json.loads(self.ports.read_text())["http"]
        return port

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    if found.process is not None:
        found.process.terminate()
        assert found.process.wait(30) == 0


def test_top_with_authority_and_password(site: Site) -> None:
    port = site.start()
    assert "metrics at https://" in site.log()
    where = ("top", "--once", "--address", f"localhost:{port}", "--ca", str(site.ca.file))
    with_file = site.run(*where, "--user", "me", "--password-file", str(site.folder / "password"))
    assert with_file.returncode == 0, with_file.stdout + with_file.stderr
    with_variable = site.run(*where, "--user", "me", LANTERNE_PASSWORD=PASSWORD)
    assert with_variable.returncode == 0, with_variable.stdout + with_variable.stderr
    without = site.run(*where)
    assert without.returncode == 1
    assert "401" in without.stdout
    unknown = site.run("top", "--once", "--address", f"https://localhost:{port}")
    assert unknown.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in unknown.stdout
    nobody = site.run(*where, "--user", "me")
    assert nobody.returncode == 2
    assert "--password-file" in nobody.stderr
    # Never a flag, which the list of processes would show.
    assert "--password " not in site.run("top", "-h").stdout


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HTTP_WEB_CONFIG": "/nowhere.yml"}, "/nowhere.yml"),
        ({"TLS_CERT": "/a.crt"}, "tls.cert and tls.key belong together"),
        ({"TLS_CLIENT_CA": "/a.crt"}, "tls.client_ca is nothing without"),
        ({"TLS_SHARED_NAMES": "a,b"}, "tls.shared_names"),
        ({"TLS_CERT": "/a.crt", "TLS_KEY": "/a.key"}, "/a.crt cannot be read"),
        ({"INGEST_TOKEN_FILE": "/nowhere.token"}, "/nowhere.token cannot be read"),
        ({"TLS_CERT": "relative.crt"}, "absolute path"),
    ],
)
def test_mistakes_end_it_with_the_remedy_and_never_in_plain_text(
    site: Site, variables: dict[str, str], named: str
) -> None:
    given = {f"LANTERNE_COLLECTOR_{name}": value for name, value in variables.items()}
    ended = site.run(
        "--ingest-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", **given
    )  # fmt: skip
    assert ended.returncode in (1, 2)
    assert named in ended.stderr
    assert "agents report to" not in ended.stderr


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"TLS_CERT": "/a.crt"}, "tls.cert and tls.key belong together"),
        ({"TLS_CERT": "/a.crt", "TLS_KEY": "/a.key"}, "nothing without tls.ca"),
        ({"TLS_SERVER_NAME": "a"}, "nothing without tls.ca"),
        ({"COLLECTOR_TOKEN_FILE": "token"}, "absolute path"),
    ],
)
def test_mistakes_of_an_agent(variables: dict[str, str], named: str) -> None:
    given = {f"LANTERNE_AGENT_{name}": value for name, value in variables.items()}
    ended = subprocess.run(
        [SCRIPTS / "lanterne-agent", "--check-config"],
        env=os.environ | given, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    assert named in ended.stderr
