"""What doctor says of certificates, collectors, spool and kubelet: real files and sockets."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.agent import certificate
from lanterne.agent import config as configuration
from lanterne.agent import doctor_deployment as deployment
from lanterne.agent.doctor import deployment_rows
from lanterne.agent.errors import CredentialsError
from tests.stack import SCRIPTS, Stack, free_port

DAY = 86_400


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a server's certificate for localhost that ends in 60 days."""
    folder = tmp_path_factory.mktemp("pki")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "3650",
            "-subj", "/CN=test authority", cwd=folder)  # fmt: skip
    openssl("req", *curve, "-keyout", "server.key", "-out", "server.csr",
            "-subj", "/CN=localhost", cwd=folder)  # fmt: skip
    (folder / "ext").write_text("subjectAltName=DNS:localhost\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "60", "-extfile", "ext", "-out", "server.pem",
            cwd=folder)  # fmt: skip
    return folder


def statuses(rows: Iterator[deployment.Row]) -> list[tuple[str, str]]:
    return [(row.check, row.status) for row in rows]


# ---- certificates


def test_when_a_certificate_is_valid(pki: Path) -> None:
    ((begins, ends),) = certificate.validity((pki / "server.pem").read_bytes())
    assert ends - begins == 60 * DAY
    assert abs(begins - time.time()) < 3600
    both = (pki / "server.pem").read_bytes() + (pki / "ca.pem").read_bytes()
    assert [round((e - b) / DAY) for b, e in certificate.validity(both)] == [60, 3650]


def test_what_is_no_certificate_is_told() -> None:
    head, tail = b"-----BEGIN CERTIFICATE-----\n", b"\n-----END CERTIFICATE-----\n"
    for bad in (b"", b"\xff" * 50, head + b"MAAA" + tail, head + b"!!" + tail, head + tail):
        with pytest.raises(CredentialsError):
            certificate.validity(bad)


def test_every_cut_of_a_certificate_is_told(pki: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert((pki / "server.pem").read_text())
    refused = 0
    for length in range(len(der)):
        pem = ssl.DER_cert_to_PEM_cert(der[:length]).encode()
        with pytest.raises(CredentialsError):
            certificate.validity(pem)
        refused += 1
    assert refused == len(der)


@given(data=st.data())
def test_mutated_certificates_are_read_or_told(pki: Path, data: st.DataObject) -> None:
    der = bytearray(ssl.PEM_cert_to_DER_cert((pki / "server.pem").read_text()))
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    try:
        ((begins, ends),) = certificate.validity(ssl.DER_cert_to_PEM_cert(bytes(der)).encode())
    except CredentialsError:
        return
    assert isinstance(begins, float)
    assert isinstance(ends, float)


def test_a_pair_that_is_in_order(pki: Path) -> None:
    (pki / "server.key").chmod(0o600)
    rows = list(
        deployment.tls_rows(*(str(pki / n) for n in ("ca.pem", "server.pem", "server.key")))
    )
    assert [(r.check, r.status) for r in rows] == [
        ("tls.ca", "ok"), ("tls.cert", "ok"), ("tls.key", "ok")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("days", "status", "word"),
    [(-2, "fail", "not valid before"), (50, "warn", "renewal"), (61, "fail", "expired")],
)
def test_the_time_of_a_certificate(pki: Path, days: int, status: str, word: str) -> None:
    now = time.time() + days * DAY
    rows = deployment.tls_rows(str(pki / "ca.pem"), str(pki / "server.pem"), "", now)
    row = next(row for row in rows if row.check == "tls.cert")
    assert row.status == status
    assert word in row.detail + row.remedy
    assert row.remedy


def test_an_old_authority_beside_the_new_one_is_no_fault(pki: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes((pki / "server.pem").read_bytes() + (pki / "ca.pem").read_bytes())
    (row,) = deployment.tls_rows(str(bundle), "", "", time.time() + 100 * DAY)
    assert row.status == "ok"


def test_faults_of_tls_files_are_told_with_their_remedy(pki: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose.key"
    loose.write_bytes((pki / "server.key").read_bytes())
    loose.chmod(0o644)
    ca, cert = str(pki / "ca.pem"), str(pki / "server.pem")
    cases = {
        (ca, cert, str(pki / "ca.key")): ("tls.key", "fail", "do not belong together"),
        (ca, cert, str(loose)): ("tls.key", "warn", "open to every user"),
        (ca, "", str(loose)): ("TLS", "fail", "only one of"),
        ("/nowhere/ca.pem", "", ""): ("tls.ca", "fail", "No such file"),
        (str(pki / "ca.key"), "", ""): ("tls.ca", "fail", "no certificate"),
    }
    for files, (check, status, word) in cases.items():
        rows = [r for r in deployment.tls_rows(*files) if (r.check, r.status) == (check, status)]
        assert any(word in row.detail and row.remedy for row in rows), (files, rows)


# ---- the collector as a server


@contextmanager
def tls_server(pki: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "server.pem", pki / "server.key")
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    plain, _ = server.accept()
                except TimeoutError:
                    continue
                plain.settimeout(5)
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def test_a_handshake_tells_name_authority_and_expiry(pki: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", "k", "-out", "ca.pem", "-subj", "/CN=other", cwd=other)  # fmt: skip
    with tls_server(pki) as port:
        address, ca = f"127.0.0.1:{port}", str(pki / "ca.pem")
        good = deployment.tls_server_row(address, ca, "", "", "localhost")
        assert (good.status, "localhost" in good.detail) == ("ok", True)
        wrong = deployment.tls_server_row(address, ca, "", "", "elsewhere")
        assert wrong.status == "fail"
        assert "elsewhere" in wrong.detail + wrong.remedy
        stranger = deployment.tls_server_row(address, str(other / "ca.pem"), "", "", "localhost")
        assert stranger.status == "fail"
        assert "tls.ca" in stranger.remedy


def test_a_server_without_tls_is_told(pki: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def plain() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400\r\n")

        answer = threading.Thread(target=plain)
        answer.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        row = deployment.tls_server_row(address, str(pki / "ca.pem"), "", "", "localhost")
        answer.join()
    assert row.status == "fail"
    assert "TLS" in row.remedy


def test_names_are_resolved() -> None:
    row, numbers = deployment.resolved("localhost:4319")
    assert row.status == "ok"
    assert set(numbers) & {"127.0.0.1", "::1"}
    for bad in ("no-such-host.invalid:4319", "a" * 80 + ".invalid:1"):
        row, numbers = deployment.resolved(bad)
        assert (row.status, numbers) == ("warn", ())
        assert row.remedy


def test_a_real_collector_answers_and_clocks_are_compared(tmp_path: Path) -> None:
    with Stack(tmp_path, ["/nowhere/*"]) as stack:
        stack.start_collector()
        address = f"127.0.0.1:{stack.grpc_port}"
        config = configuration.load(None, {}, {"collector.addresses": address, "node.name": "n"})
        rows = {row.check: row for row in deployment_rows(config)}
        assert rows[f"stream {address}"].status == "ok", rows
        assert "clocks are compared to within" in rows[f"stream {address}"].detail
        assert stack.stop_one("collector") == 0
    rows = {row.check: row for row in deployment_rows(config)}
    assert rows[f"collector {address}"].status == "warn"
    assert f"stream {address}" not in rows


def test_what_listens_there_and_is_no_collector() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def hang_up() -> None:
            server.settimeout(0.2)
            while not stop.is_set():
                try:
                    server.accept()[0].close()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        try:
            config = configuration.load(None, {}, {"collector.addresses": address})
            rows = {row.check: row for row in deployment_rows(config)}
        finally:
            stop.set()
            thread.join()
    assert rows[f"stream {address}"].status == "warn"
    assert rows[f"stream {address}"].remedy


def test_a_slow_way_to_the_collector_is_a_warning() -> None:
    assert deployment.clock_row("a:1", 0.0001, "").status == "ok"
    slow = deployment.clock_row("a:1", 0.05, "")
    assert (slow.status, "50000 µs" in slow.detail) == ("warn", True)
    assert "UNAVAILABLE" in deployment.clock_row("a:1", None, "UNAVAILABLE").detail


# ---- spool, files, kubelet, addresses


def test_spool(tmp_path: Path) -> None:
    (off,) = deployment.spool_rows("", 1)
    assert off.status == "info"
    folder = tmp_path / "spool"
    assert statuses(deployment.spool_rows(str(folder), 1 << 20)) == [("spool", "ok")]
    assert not folder.exists()
    folder.mkdir(mode=0o755)
    (loose,) = (r for r in deployment.spool_rows(str(folder), 1 << 20) if r.status == "warn")
    assert "chmod 0700" in loose.remedy
    folder.chmod(0o700)
    assert statuses(deployment.spool_rows(str(folder), 1 << 20)) == [("spool", "ok")]
    assert statuses(deployment.spool_rows(str(folder), 1 << 60)) == [("spool", "warn")]
    file = tmp_path / "file"
    file.write_text("")
    assert statuses(deployment.spool_rows(str(file), 1)) == [("spool", "fail")]
    assert statuses(deployment.spool_rows(str(file / "below"), 1)) == [("spool", "fail")]


def test_secrets_and_configuration_that_others_may_touch(tmp_path: Path) -> None:
    file = tmp_path / "token"
    (missing,) = deployment.secret_rows(("collector.token_file", str(file)))
    assert missing.status == "fail"
    file.write_text("secret")
    file.chmod(0o604)
    (loose,) = deployment.secret_rows(("collector.token_file", str(file)))
    assert (loose.status, "0604" in loose.detail) == ("warn", True)
    file.chmod(0o640)
    assert not list(deployment.secret_rows(("collector.token_file", str(file))))
    file.chmod(0o602)
    (writable,) = deployment.writable_by_others("configuration", file)
    assert writable.remedy == f"chmod o-w {file}"


def test_kubelet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kubelet.sock"
    assert statuses(deployment.kubelet_rows("off", str(path), "")) == [("kubelet", "info")]
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert statuses(deployment.kubelet_rows("auto", str(path), "")) == [("kubelet", "info")]
    (missing,) = deployment.kubelet_rows("on", str(path), "")
    assert (missing.status, "pod-resources" in missing.remedy) == ("fail", True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert statuses(deployment.kubelet_rows("auto", str(path), "")) == [("kubelet", "fail")]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        (refused,) = deployment.kubelet_rows("on", str(path), "")
        assert refused.status == "fail"
        server.listen()
        found = statuses(deployment.kubelet_rows("on", str(path), str(tmp_path / "none")))
        assert found == [("kubelet", "ok"), ("kubelet", "warn")]


def test_addresses_to_listen_on() -> None:
    assert deployment.listen_row("metrics.listen", "") is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        taken = deployment.listen_row("metrics.listen", address)
        assert taken is not None
        assert (taken.status, "metrics.listen" in taken.remedy) == ("warn", True)
    free = deployment.listen_row("metrics.listen", f"127.0.0.1:{free_port()}")
    assert free is not None
    assert free.status == "ok"


# ---- dry run


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / "lanterne-agent"), "--dry-run", "--set", "probes.include=/nowhere/*",
         "--metrics", f"127.0.0.1:{free_port()}", *arguments],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_dry_run_says_what_would_happen_and_changes_nothing(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    done = dry_run("--set", f"spool.path={spool}", "--node", "n7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It would report as node n7 to 127.0.0.1:4319, every 1 s." in done.stdout
    assert f"It would keep what is not acknowledged in {spool}." in done.stdout
    assert not spool.exists()
    as_json = dry_run("doctor", "--json")
    report = json.loads(as_json.stdout)
    assert report["would"]
    assert not any(row["check"] == "self-test" for row in report["rows"])


def test_a_dry_run_of_what_cannot_work_fails_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[tls]\nca = "/nowhere/ca.pem"\n')
    file.chmod(0o666)
    done = dry_run("--config", str(file))
    assert "can be changed by every user" in " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "It would not work as configured: tls.ca" in done.stdout
    done = dry_run("--interpreter", sys.executable)
    assert done.returncode == 1
    assert "bcc" in done.stdout.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root might load one")
def test_a_dry_run_loads_no_program(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    agent = str(SCRIPTS / "lanterne-agent")
    done = subprocess.run(
        ["strace", "-f", "-e", "trace=bpf,perf_event_open", "-o", str(trace), agent, "--dry-run",
         "--set", "probes.include=/nowhere/*", "--metrics", ""],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bpf(" not in trace.read_text()
    assert "perf_event_open(" not in trace.read_text()
