"""What is wrong with an agent's frames: refused with a reason, counted by cause, logged once."""

from __future__ import annotations

import logging
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from lanterne.collector import complaints
from lanterne.collector.admission import Access, Admission, Peer, peer_of
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.checks import Limits
from lanterne.collector.complaints import Complaints
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused, StreamRefused
from lanterne.collector.frames import Item
from lanterne.collector.handshakes import CAUSES, REMEDIES, cause_of
from lanterne.collector.ingest import Ingest
from lanterne.collector.ingest_config import IngestConfig
from lanterne.collector.rates import BURST_SECONDS, REMEMBERED, Rate, Rates
from lanterne.proto import telemetry_pb2 as pb
from lanterne.service.errors import CertificateError
from tests.fixtures.authority import Authority
from tests.unit.test_core_ingest import Agent, batch, frame

A_BILLION = 1_000_000_000
OWN = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@contextmanager
def running(config: IngestConfig) -> Iterator[tuple[Ingest, list[Item], int]]:
    items: list[Item] = []

    def take(item: Item) -> bool:
        items.append(item)
        return True

    ingest = Ingest(on_batch=take, config=config)
    port = ingest.listen("127.0.0.1:0")
    ingest.start()
    try:
        yield ingest, items, port
    finally:
        ingest.stop(0)


def told(caplog: pytest.LogCaptureFixture, cause: str) -> list[logging.LogRecord]:
    return [r for r in caplog.records if getattr(r, "cause", "") == cause]


def changed(**changes: object) -> Callable[[int], bytes]:
    """sequence -> an encoded batch with one communicator."""

    def make(sequence: int) -> bytes:
        message = pb.Batch(schema=1, node="a", epoch=1, sequence=sequence, stride=1)
        message.communicators.add(comm_hash=1, library=pb.LIBRARY_NCCL, n_ranks=2, rank=0)
        for name, value in changes.items():
            where = message if name in pb.Batch.DESCRIPTOR.fields_by_name else None
            setattr(where or message.communicators[0], name, value)
        return message.SerializeToString()

    return make


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("schema", changed(schema=0)),
        ("schema", changed(schema=2)),
        ("n_ranks", changed(n_ranks=A_BILLION, rank=7)),
        ("rank", changed(rank=2)),
        ("text", changed(workload="x" * 257)),
        ("text", changed(workload="\x1b[2J")),
        ("text", changed(workload="a\nlanterne_forged 1")),
        ("text", changed(name="\u202eevil")),
        ("size", lambda n: batch(n, boot="x" * 200_000)),
        ("proto", lambda n: b"\xff" * 100),
        ("node", lambda n: batch(n, node="b")),
    ],
)
def test_what_can_never_be_applied(
    code: str, make: Callable[[int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with running(IngestConfig(limits=Limits(batch_bytes=100_000))) as (ingest, items, port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            agent = Agent(channel)
            for sequence in (1, 2, 3):
                ack = agent.send(frame(make(sequence)))
                assert ack.status == pb.STATUS_REFUSED
                assert ack.reason.startswith(f"{code}: ")
            # The stream goes on.
            assert agent.send(frame(batch(9))).status == pb.STATUS_ACCEPTED
            agent.close()
        assert ingest.refused() == {code: 3}
        assert [i.sequence for i in items if isinstance(i, DecodedBatch)] == [9]
    assert len(told(caplog, code)) == 1
    record = told(caplog, code)[0]
    assert (getattr(record, "node", ""), getattr(record, "peer", "")) == ("a", "127.0.0.1")


def test_a_billion_ranks_cost_nothing() -> None:
    """They are refused before anything of that size is made."""
    tracemalloc.start()
    try:
        with pytest.raises(BatchRefused, match="n_ranks 1000000000"):
            decode(changed(n_ranks=A_BILLION)(1))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_more_than_one_node_may_send_comes_again_later(caplog: pytest.LogCaptureFixture) -> None:
    """Told to retry, which loses nothing; other nodes do not suffer; once it waits, it goes on."""
    rate = Rate(batches=1.0)
    with running(IngestConfig(rate=rate)) as (ingest, _, port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            agent, other = Agent(channel), Agent(channel)
            answers = [agent.send(frame(batch(n))).status for n in range(1, 6)]
            assert answers[: int(BURST_SECONDS)] == [pb.STATUS_ACCEPTED] * int(BURST_SECONDS)
            assert pb.STATUS_RETRY in answers
            first = other.send(frame(batch(1, node="b"), node="b"))
            assert first.status == pb.STATUS_ACCEPTED
            missing = answers.index(pb.STATUS_RETRY) + 1
            deadline = time.monotonic() + 30
            while agent.send(frame(batch(missing))).status == pb.STATUS_RETRY:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            agent.close()
            other.close()
        assert ingest.counts()["batches_rate_limited"] >= 1
        assert ingest.counts()["batches_refused"] == 0


def test_rates_in_bytes_and_in_batches() -> None:
    rates = Rates(Rate(batches=10, num_bytes=1000), nodes=2)
    assert [rates.take("a", 1, 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert rates.take("a", 1, 0.1)
    assert rates.take("b", 5000, 0.0)  # the largest batch passes, and is paid for
    assert not rates.take("b", 1, 1.0)
    assert rates.take("b", 1, 4.0)
    for name in ("c", "d"):  # of more nodes than are remembered the idlest begins anew
        rates.take(name, 1, 5.0)
    assert [rates.take("a", 1, 5.0) for _ in range(21)] == [True] * 20 + [False]


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    rates = Rates(Rate(batches=1), nodes=2)
    assert [rates.take("a", 1, 10.0) for _ in range(3)] == [True, True, False]
    assert not rates.take("a", 1, 5.0)


def table(first: int, count: int) -> DecodedBatch:
    message = pb.Batch(schema=1, node="a", epoch=1, sequence=1, stride=1)
    for number in range(first, first + count):
        message.communicators.add(
            comm_hash=number + 1, library=pb.LIBRARY_NCCL, n_ranks=2, rank=0, workload="w"
        )
    return decode(message.SerializeToString())


def test_inventing_communicators_is_bounded_and_having_many_is_not() -> None:
    rates = Rates(Rate(communicators=10, communicators_at_once=100), nodes=4)
    for second in range(50):
        assert rates.communicators("a", table(0, 90).communicators, float(second) / 100)
    assert not rates.communicators("a", table(1000, 90).communicators, 0.5)
    assert rates.communicators("b", table(1000, 90).communicators, 0.5)
    # Lists that come and go are not new.
    rates = Rates(Rate(communicators=0, communicators_at_once=100), nodes=4)
    for turn in range(20):
        assert rates.communicators("a", table(50 * (turn % 2), 50).communicators, 0.0)


def test_what_is_remembered_of_a_node_is_bounded() -> None:
    rates = Rates(Rate(communicators=1e9, communicators_at_once=1e9), nodes=4)
    for turn in range(5):
        assert rates.communicators("a", table(turn * 4000, 4000).communicators, float(turn))
        assert len(rates._nodes["a"].known) <= REMEMBERED


def test_cardinality_is_refused_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rate = Rate(communicators=0.0, communicators_at_once=1.0)
    with running(IngestConfig(rate=rate)) as (ingest, _, port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            agent = Agent(channel)
            assert agent.send(frame(changed()(1))).status == pb.STATUS_ACCEPTED
            for sequence in (2, 3):
                ack = agent.send(frame(changed(comm_hash=sequence)(sequence)))
                assert ack.reason.startswith("cardinality: ")
            agent.close()
        assert ingest.refused() == {"cardinality": 2}
    assert len(told(caplog, "cardinality")) == 1


def test_names_in_a_certificate() -> None:
    admission = Admission(["lanterne-agent"])
    for names in (
        ("node-a",),
        ("NODE-A",),
        ("x", "node-a"),
        ("lanterne-agent",),
        ("Lanterne-Agent",),
    ):
        admission.check_node(Peer("::1", names), "node-a")
    admission.check_node(Peer("::1", None), "any")
    for names in ((), ("node-b",), ("*",), ("node-*",), ("node-a.example",), ("",)):
        with pytest.raises(StreamRefused, match="node-a") as refusal:
            admission.check_node(Peer("::1", names), "node-a")
        assert refusal.value.cause == "node_name"


def test_names_come_from_the_certificate_only() -> None:
    both = {"peer_dns": [b"a", b"b"], "x509_common_name": [b"c"]}
    assert peer_of("ipv4:1.2.3.4:5", both, certified=True) == Peer("1.2.3.4", ("a", "b"))
    assert peer_of("ipv6:%5B::1%5D:5", {"x509_common_name": [b"c"]}, certified=True) == Peer(
        "::1", ("c",)
    )
    assert peer_of("ipv4:1.2.3.4:5", {}, certified=True).names == ()
    assert peer_of("ipv4:1.2.3.4:5", both, certified=False).names is None


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "token"
    one, two = "1" * 16, "2" * 40
    path.write_text(f"\n{one}\n\n  {two}  \n")
    admission = Admission(token_file=str(path))
    for shown in (f"Bearer {one}", f"bearer {two}", f"Bearer {one}".encode()):
        admission.check_token([("other", "x"), ("authorization", shown)])
    for shown in ("", "Bearer ", one, f"Basic {one}", f"Bearer {one}x", f"Bearer {one} {two}"):
        with pytest.raises(StreamRefused, match="token"):
            admission.check_token([("authorization", shown)])
    with pytest.raises(StreamRefused, match="no bearer token"):
        admission.check_token([])


@pytest.mark.parametrize(
    "text", ["", "\n", "short\n", "1" * 16 + "\nshort", ("1" * 16 + "\n") * 17]
)
def test_a_token_file_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(CertificateError, match=str(path)):
        Admission(token_file=str(path))


def test_a_certificate_that_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    one, other = ca.issue("one", "localhost"), ca.issue("other", "localhost")
    good = Access(cert=str(one.cert), key=str(one.key), client_ca=str(ca.file))
    for cert, key, client_ca in (
        (good.cert, str(other.key), good.client_ca),
        (good.cert, "/nowhere", good.client_ca),
        (good.cert, good.key, str(one.key)),
    ):
        access = Access(cert=cert, key=key, client_ca=client_ca)
        with pytest.raises(CertificateError):
            Ingest(on_batch=lambda _: True, config=IngestConfig(access=access)).listen(
                "127.0.0.1:0"
            )


def test_complaints_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    said = Complaints(clock=lambda: now[0])
    for number in range(1000):
        said.batch("10.0.0.1", f"node{number}", "schema", "old")
        said.stream("10.0.0.1", "token", "wrong")
    assert len(caplog.records) == complaints.MOST_A_MINUTE
    now[0] = complaints.AGAIN_SECONDS + 1
    said.stream("10.0.0.1", "token", "wrong")
    assert len(caplog.records) == complaints.MOST_A_MINUTE + 1


def test_lines_of_failed_handshakes() -> None:
    line = (
        b"I1129 23:55:06.485815   17593 ssl_transport_security.cc:2563] Handshake failed with "
        b"error SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:%s\n"
    )
    for text, cause in (
        (b"CERTIFICATE_VERIFY_FAILED: certificate has expired", "tls_expired"),
        (b"CERTIFICATE_VERIFY_FAILED: unable to get local issuer", "tls_untrusted"),
        (b"PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid", "tls_no_certificate"),
        (b"TLSV1_ALERT_UNKNOWN_CA: Invalid", "tls_we_are_untrusted"),
        (b"WRONG_VERSION_NUMBER: Invalid", "tls_no_tls"),
    ):
        assert cause_of(line % text) == cause
    assert cause_of(b"2026-01-01 warning agent refused reason=Handshake failed with error\n") == ""
    assert cause_of(b"I1129 other.cc:1] Something else\n") == ""
    assert set(CAUSES) == set(REMEDIES)


def test_connections_are_bounded() -> None:
    """Strangers get so many and are closed when they do not shake hands; then there is room."""
    with running(IngestConfig(connections=4)) as (_, _, port):
        strangers = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(20)]
        try:
            closed = 0
            for stranger in strangers[4:]:
                stranger.settimeout(30)
                try:
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    pass
                closed += 1
            assert closed == 16
            deadline = time.monotonic() + 60
            while True:
                with grpc.insecure_channel(f"127.0.0.1:{port}", options=OWN) as channel:
                    try:
                        agent = Agent(channel)
                        assert agent.send(frame(batch(1))).status == pb.STATUS_ACCEPTED
                        agent.close()
                        break
                    except grpc.RpcError:
                        assert time.monotonic() < deadline
                        time.sleep(0.5)
        finally:
            for stranger in strangers:
                stranger.close()
