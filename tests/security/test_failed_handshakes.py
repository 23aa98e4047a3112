"""TLS handshakes that fail at the port for agents: counted by cause, named once by address."""

from __future__ import annotations

import io
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.collector import complaints, handshakes
from lanterne.collector.handshakes import Handshakes, traced
from tests.fixtures.authority import Authority, Pair
from tests.stack import Stack, wait_for

ERROR = b"SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
UNTRUSTED = ERROR + b"CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"
EXPIRED = ERROR + b"CERTIFICATE_VERIFY_FAILED: certificate has expired"
START = b"I1130 02:55:16.610788   14708 "


def failed(reason: bytes) -> bytes:
    return START + b"ssl_transport_security.cc:2563] Handshake failed with error " + reason + b"\n"


def trace(reason: bytes, address: bytes) -> bytes:
    """What gRPC 1.85 writes after the line above, pointers and all."""
    told = b"UNKNOWN: Ssl handshake failed (TSI_PROTOCOL_FAILURE): " + reason + b": OK\n"
    where = b"=== Source Location Trace: === \nsrc/core/util/status_helper.cc:68\n"
    return (
        START + b"handshaker.cc:155] CallNextHandshakerLocked: error=" + told + where
        + b" shutdown=false index=2, args={endpoint=0x7f, args={"
        b"grpc.internal.endpoint_local_address=ipv4:10.0.0.9:4319, "
        b"grpc.internal.endpoint_peer_address=" + address
        + b", grpc.resource_quota=0x55}, read_buffer.Length()=0, exit_early=0}\n"
        + START + b"channel_trace.h:396] handshake manager 0x7f: Failed with error: " + told + where
        + b"\n"
    )  # fmt: skip


def good(address: bytes) -> bytes:
    """Of a handshake that succeeds."""
    calls = START + b"channel_trace.h:396] handshake manager 0x7f:  calling handshaker security\n"
    return (
        calls
        + START + b"handshaker.cc:155] CallNextHandshakerLocked: error=OK shutdown=false index=2, "
        b"args={args={grpc.internal.endpoint_peer_address=" + address + b"}}\n"
    )  # fmt: skip


def read(text: bytes) -> tuple[Handshakes, bytes]:
    """-> the counts, and what passes."""
    passed = io.BytesIO()
    found = Handshakes(io.BytesIO(text), passed.write)  # type: ignore[arg-type]
    found.join(30)
    return found, passed.getvalue()


def test_each_address_and_cause_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = b"2026-01-01T00:00:00.000Z warning agent refused peer=1.2.3.4\n    | a traceback\n"
    text = b""
    for address in (b"ipv4:10.0.0.1:5001", b"ipv4:10.0.0.1:5002", b"ipv6:%5Bfd00::1%5D:5003"):
        text += failed(UNTRUSTED) + trace(UNTRUSTED, address) + ours + good(b"ipv4:10.9.9.9:1")
    text += failed(EXPIRED) + trace(EXPIRED, b"ipv4:10.0.0.1:5004")
    text += failed(UNTRUSTED) + trace(UNTRUSTED, b"ipv6:[fe80::1%25eth0]:5005")
    found, passed = read(text)
    assert +found.failed == {"tls_untrusted": 4, "tls_expired": 1}
    assert passed == 3 * ours
    named = [(record.peer, record.cause) for record in caplog.records]  # type: ignore[attr-defined]
    assert named == [
        ("10.0.0.1", "tls_untrusted"),
        ("fd00::1", "tls_untrusted"),
        ("10.0.0.1", "tls_expired"),
        ("fe80::1", "tls_untrusted"),
    ]
    assert caplog.records[0].reason == UNTRUSTED.decode()  # type: ignore[attr-defined]


def test_failures_of_several_threads_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Records are whole lines, but those of two handshakes may alternate."""
    text = failed(UNTRUSTED) + failed(EXPIRED)
    text += trace(EXPIRED, b"ipv4:10.0.0.2:1") + trace(UNTRUSTED, b"ipv4:10.0.0.1:1")
    read(text)
    named = {record.peer: record.cause for record in caplog.records}  # type: ignore[attr-defined]
    assert named == {"10.0.0.1": "tls_untrusted", "10.0.0.2": "tls_expired"}


def test_where_no_address_is_told_the_cause_still_is(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = read(failed(UNTRUSTED) * (3 * handshakes.MAX_NAMELESS))
    assert found.failed["tls_untrusted"] == 3 * handshakes.MAX_NAMELESS
    (record,) = caplog.records
    assert record.peer == handshakes.UNKNOWN  # type: ignore[attr-defined]


def test_lines_of_many_strangers_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    text = b"".join(
        failed(UNTRUSTED) + trace(UNTRUSTED, b"ipv4:10.0.%d.%d:9" % divmod(n, 250))
        for n in range(1000)
    )
    found, _ = read(text)
    assert found.failed["tls_untrusted"] == 1000
    assert len(caplog.records) == complaints.MOST_A_MINUTE


def test_the_environment_of_the_ingest_process() -> None:
    assert traced({"A": "b"}) == {"A": "b", "GRPC_TRACE": "handshaker"}
    assert traced({"GRPC_TRACE": "tcp", "GRPC_VERBOSITY": "debug"}) == {
        "GRPC_TRACE": "tcp,handshaker",
        "GRPC_VERBOSITY": "debug",
    }
    assert traced({"GRPC_VERBOSITY": "ERROR"}) == {"GRPC_TRACE": "handshaker"}


# ---- the real gRPC


class Site:
    def __init__(self, folder: Path) -> None:
        self.ca = Authority(folder)
        server = self.ca.issue("server", "localhost", "127.0.0.1")
        tls = {"cert": str(server.cert), "key": str(server.key), "client_ca": str(self.ca.file)}
        # As an operator might have it who wants less of gRPC in the log.
        env = {"GRPC_VERBOSITY": "error"}
        self.stack = Stack(folder, [], collector={"tls": tls}, env=os.environ | env)
        self.stack.start_collector()

    def knock(self, source: str, pair: Pair | None) -> None:
        """A handshake with this certificate, from this address, to its end."""
        context = ssl.create_default_context(cafile=self.ca.file)
        context.set_alpn_protocols(["h2"])
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        where = ("127.0.0.1", self.stack.grpc_port)
        with socket.create_connection(where, 30, (source, 0)) as plain:
            try:
                with context.wrap_socket(plain, server_hostname="localhost") as secure:
                    while secure.recv(4096):  # TLS 1.3: the refusal comes after our half
                        pass
            except OSError:
                pass

    def refused(self) -> dict[str, float]:
        name = "lanterne_collector_streams_refused_total"
        found = self.stack.collector_metrics().get(name)
        return {labels["reason"]: value for labels, value in found if value}

    def lines(self) -> list[str]:
        log = (self.stack.folder / "lanterne-collector.log").read_text()
        return [line for line in log.splitlines() if "connection refused" in line]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.stack.stop()


def test_wrong_certificates_are_refused_counted_and_named_once(site: Site) -> None:
    folder = site.stack.folder
    strangers = {
        ("127.0.0.2", "tls_untrusted"): Authority(folder, "other").issue("stranger", "node-a"),
        ("127.0.0.3", "tls_untrusted"): Authority(folder, "more").issue("more", "node-b"),
        ("127.0.0.4", "tls_expired"): site.ca.issue("old", "node-c", expired=True),
        ("127.0.0.5", "tls_no_certificate"): None,
    }
    for _ in range(5):
        for (address, _), pair in strangers.items():
            site.knock(address, pair)
    expected = {"tls_untrusted": 10, "tls_expired": 5, "tls_no_certificate": 5}
    wait_for(lambda: site.refused() == expected, 60, "all are counted")
    wait_for(lambda: len(site.lines()) >= len(strangers), 60, "all are named")
    named = sorted(
        (re.findall(r"peer=(\S+)", line)[0], re.findall(r"cause=(\S+)", line)[0])
        for line in site.lines()
    )
    assert named == sorted(strangers)
    # Of what gRPC was asked to write, nothing else reaches the log.
    log = (folder / "lanterne-collector.log").read_text()
    assert not re.search(r"handshaker|Source Location|status_helper|shutdown=", log), log
