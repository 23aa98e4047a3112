"""The collector's command line: what is no command, and how the commands that ask a collector get
past its TLS and its passwords."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest
import yaml

from lanterne.collector.cli import parser, with_command
from lanterne.collector.export import Exposition
from lanterne.collector.http import App
from lanterne.collector.http_server import HttpServer
from lanterne.collector.main import main
from lanterne.collector.series_nodes import Runtime
from lanterne.service.guard import Guard
from tests.fixtures.authority import Authority, write
from tests.fixtures.snapshots import snapshot

PASSWORD = "correct horse"


def test_the_wrong_half_installed_is_explained() -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['cheroot'] = None\n"
        "from lanterne.collector.console import run\n"
        "sys.argv = ['lanterne-collector', 'run']; run()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert "cheroot is missing" in result.stderr
    assert "pip install 'lanterne[collector]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_word_that_is_no_command_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(with_command(["repaly", "job.ltr"]))
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "'repaly'" in told
    assert "'replay'" in told


@pytest.mark.parametrize("command", ["run", "record", "replay", "compare", "diagnose", "plan"])
def test_help_of_a_command_says_how_it_is_called(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lanterne-collector {command} [-h]")


@dataclass
class Site:
    address: str
    ca: str
    password: str  # file


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A collector's HTTP side with TLS and a password."""
    folder = tmp_path_factory.mktemp("site")
    authority = Authority(folder)
    own = authority.issue("web", "localhost", "127.0.0.1")
    secret = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    settings = {
        "tls_server_config": {"cert_file": own.cert.name, "key_file": own.key.name},
        "basic_auth_users": {"operator": secret},
    }
    write(folder / "web.yml", yaml.safe_dump(settings).encode())
    (folder / "password").write_text(PASSWORD + "\n")
    latest = snapshot(taken_at=time.time())
    page = Exposition(lambda: latest, lambda: Runtime("0.1.0", 0, 0))
    app = App(latest=lambda: latest, metrics=page.page, ready=dict)
    guard = Guard(str(folder / "web.yml"))
    server = HttpServer(app, "127.0.0.1", 0, timeout=5, guard=guard)
    server.start()
    yield Site(f"localhost:{server.port}", str(authority.file), str(folder / "password"))
    server.stop()


def test_diagnose_and_plan_get_in(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = ["--ca", site.ca, "--user", "operator", "--password-file", site.password]
    out = tmp_path / "found.json"
    assert main(["diagnose", site.address, *who, "--json", str(out)]) in (0, 3)
    steps = {step["state"] for step in json.loads(out.read_text())["steps"]}
    assert steps - {"unknown"}, "something was looked at"
    assert main(["plan", site.address, *who]) == 1
    assert "answers" not in capsys.readouterr().err, "it answered: there is just no plan"


@pytest.mark.parametrize("command", ["diagnose", "plan"])
def test_who_is_not_let_in_is_told_what_to_give(
    site: Site, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, site.address, "--ca", site.ca]) == 1
    told = capsys.readouterr().err
    assert "401" in told
    assert "--user" in told
    assert main([command, site.address]) == 1  # plain text is spoken to it
    assert "--ca" in capsys.readouterr().err
    assert main([command, site.address, "--ca", site.ca, "--user", "operator"]) == 1
    assert "--password-file" in capsys.readouterr().err
