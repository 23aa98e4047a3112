"""Whoever can reach the collector's ports: agents and Prometheus must not notice."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from lanterne.proto import telemetry_pb2 as pb
from tests.faults.authority import Authority
from tests.faults.fleet import PATIENCE, SLOW, Fleet, assert_bounded, scale
from tests.faults.ledger import METHOD
from tests.faults.strangers import allow_descriptors, connections, slow_readers
from tests.faults.test_outages import judged, nothing_lost
from tests.fixtures import feeder
from tests.fuzz import corpus
from tests.fuzz.mutate import blind, message
from tests.stack import try_fetch, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.faults, pytest.mark.timeout(1200)]

STRANGERS = int(scale("STRANGERS", 1000))
MALFORMED = int(scale("MALFORMED", 2000))
Figures = Callable[..., None]


def test_strangers(tmp_path: Path, figures: Figures) -> None:
    wanted = min(STRANGERS, allow_descriptors(STRANGERS))
    with Fleet(tmp_path, relay=False) as fleet, judged(fleet) as job:
        before = fleet.use()
        collector = fleet.collector
        # The pages have few threads, and a stranger who says nothing holds one until the timeout.
        with connections({collector.grpc_port: wanted, collector.http_port: 20}) as held:
            seen = fleet.nodes["a"].agent_metrics().total("lanterne_agent_batches_acked_total")
            wait_for(
                lambda: (
                    fleet.nodes["a"].agent_metrics().total("lanterne_agent_batches_acked_total")
                    > seen + 5
                ),
                PATIENCE,
                "batches acknowledged among strangers",
            )
            during = fleet.use()
            number = len(held)
        verdict = fleet.wait_named_anew(("w", SLOW))
        job.stop()
        delivered = fleet.wait_counted(job)
        nothing_lost(fleet)
        wait_for(
            lambda: fleet.use()["collector"]["fds"] <= before["collector"]["fds"] + 6,
            PATIENCE,
            "descriptors given back",
        )
        after = fleet.use()
    figures(
        connections=number,
        verdict_seconds=round(verdict, 1),
        operations=delivered,
        before=before,
        during=during,
        after=after,
    )
    assert number >= wanted // 2
    assert_bounded(before, after)


def test_slow_readers(tmp_path: Path, figures: Figures) -> None:
    """More than there are threads, of a page that no socket buffer holds. They are dropped after
    http.timeout_seconds; then Prometheus gets its page."""
    with Fleet(tmp_path, relay=False, collector={"http": {"timeout_seconds": 2}}) as fleet:
        with judged(fleet) as job:
            before = fleet.use()
            with slow_readers(fleet.collector.http_port, "/metrics", 64) as held:
                wait_for(
                    lambda: try_fetch(f"{fleet.collector.collector_url}/metrics"),
                    PATIENCE,
                    "a page for Prometheus",
                )
                number = len(held)
            verdict = fleet.wait_named_anew(("w", SLOW))
            job.stop()
            delivered = fleet.wait_counted(job)
            nothing_lost(fleet)
            after = fleet.use()
    figures(
        readers=number,
        operations=delivered,
        verdict_seconds=round(verdict, 1),
        before=before,
        after=after,
    )
    assert_bounded(before, after)


def nonsense(number: int) -> Iterator[bytes]:
    """Frames that no agent of ours sends; nearly all are refused."""
    rng = random.Random(5)
    valid = corpus.frames()
    damage = message(pb.Frame)
    batch = pb.Batch.FromString(feeder.batch("evil", 5, 1, 10**9, 0, 2))
    old, billion = pb.Batch(), pb.Batch()
    for made in (old, billion):
        made.CopyFrom(batch)
    old.schema = 0
    billion.communicators[0].n_ranks = 1_000_000_000
    yield from (
        pb.Frame(node="evil", batch=m.SerializeToString()).SerializeToString()
        for m in (old, billion)
    )
    for mib in (8, 12):
        yield pb.Frame(node="evil", batch=b"\xff" * (mib << 20)).SerializeToString()
    for turn in range(number):
        base = rng.choice(valid)
        yield (blind if turn % 2 else damage)(rng, base, valid)


def send_nonsense(fleet: Fleet, answers: Counter[int]) -> None:
    """All of it, and three messages larger than gRPC takes: those end their own stream."""
    with grpc.insecure_channel(f"127.0.0.1:{fleet.collector.grpc_port}") as channel:
        call = channel.stream_stream(METHOD)
        answers.update(pb.Ack.FromString(ack).status for ack in call(nonsense(MALFORMED)))
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                list(call(iter([b"\0" * (24 << 20)])))


def test_malformed_and_oversized(tmp_path: Path, figures: Figures) -> None:
    with Fleet(tmp_path, relay=False) as fleet, judged(fleet) as job:
        before = fleet.use()
        answers: Counter[int] = Counter()
        # The tables of the analysis grow once, up to their bounds, for what of it was taken.
        send_nonsense(fleet, answers)
        grown = fleet.use()
        send_nonsense(fleet, answers)
        verdict = fleet.wait_named_anew(("w", SLOW))
        job.stop()
        delivered = fleet.wait_counted(job)
        nothing_lost(fleet)
        refused = fleet.collector.collector_metrics()
        counted = refused.total("lanterne_collector_batches_refused_total")
        reasons = {
            labels["reason"]
            for labels, value in refused.get("lanterne_collector_batches_refused_total")
            if value
        }
        log = fleet.collector.logs(1 << 20)
        after = fleet.use()
    figures(
        operations=delivered,
        frames=sum(answers.values()),
        refused=counted,
        reasons=len(reasons),
        verdict_seconds=round(verdict, 1),
        before=before,
        after=after,
    )
    assert counted == answers[pb.STATUS_REFUSED] > MALFORMED // 2
    assert {"schema", "n_ranks", "proto", "size"} <= reasons
    for cause in ("schema", "n_ranks"):
        assert len(re.findall(rf"node=evil .*cause={cause} ", log)) == 1, "named in the log once"
    assert_bounded(grown, after)


def test_certificates_renewed_in_flight(tmp_path: Path, figures: Figures) -> None:
    """mTLS. Everybody gets a certificate of a new authority while both are trusted, then the old
    one is no longer; an agent with another node's certificate is refused all the while."""
    pki = tmp_path / "pki"
    pki.mkdir()
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    trusted = pki / "trusted.pem"
    trusted.write_bytes(old.cert.read_bytes())
    for name in ("a", "b", "localhost"):
        old.issue(name, pki / name, address="127.0.0.1" if name == "localhost" else "")
    collector = {
        "tls": {
            "cert": str(pki / "localhost.pem"),
            "key": str(pki / "localhost.key"),
            "client_ca": str(trusted),
        }
    }
    folder = tmp_path / "fleet"
    folder.mkdir()
    fleet = Fleet(folder, collector=collector, relay=False)
    for name, node in fleet.nodes.items():
        tls = {
            "ca": str(trusted),
            "cert": str(pki / f"{name}.pem"),
            "key": str(pki / f"{name}.key"),
        }
        lines = ["[tls]", *(f'{key} = "{value}"' for key, value in tls.items())]
        node.agent_config.write_text(node.agent_config.read_text() + "\n".join(lines) + "\n")
    with fleet, judged(fleet) as job:
        before = fleet.use()
        connects = total_connects(fleet)
        began = time.monotonic()
        trusted.write_bytes(old.cert.read_bytes() + new.cert.read_bytes())
        acknowledged(fleet, 3)
        for name in ("a", "b", "localhost"):
            new.issue(name, pki / name, address="127.0.0.1" if name == "localhost" else "")
        acknowledged(fleet, 3)
        trusted.write_bytes(new.cert.read_bytes())
        wait_for(lambda: total_connects(fleet) > connects, PATIENCE, "connected anew")
        acknowledged(fleet, 3)
        seconds = time.monotonic() - began
        assert stolen_name(fleet, trusted, pki) == grpc.StatusCode.PERMISSION_DENIED
        verdict = fleet.wait_named_anew(("w", SLOW))
        job.stop()
        delivered = fleet.wait_counted(job)
        nothing_lost(fleet)
        log = fleet.collector.logs(1 << 20)
        after = fleet.use()
    figures(
        rotations=2,
        seconds=round(seconds, 1),
        verdict_seconds=round(verdict, 1),
        operations=delivered,
        before=before,
        after=after,
    )
    assert "node_name" in log
    assert_bounded(before, after)


def total_connects(fleet: Fleet) -> float:
    return min(
        node.agent_metrics().total("lanterne_agent_collector_connects_total")
        for node in fleet.nodes.values()
    )


def acknowledged(fleet: Fleet, more: int) -> None:
    """Until each agent has had so many more batches acknowledged."""

    def acked() -> dict[str, float]:
        return {
            name: node.agent_metrics().total("lanterne_agent_batches_acked_total")
            for name, node in fleet.nodes.items()
        }

    was = acked()
    wait_for(
        lambda: all(now >= was[name] + more for name, now in acked().items()),
        PATIENCE,
        f"batches acknowledged\n{fleet.logs()}",
    )


def stolen_name(fleet: Fleet, trusted: Path, pki: Path) -> grpc.StatusCode:
    """Speaks for node b with a's certificate."""
    credentials = grpc.ssl_channel_credentials(
        trusted.read_bytes(), (pki / "a.key").read_bytes(), (pki / "a.pem").read_bytes()
    )
    address = f"127.0.0.1:{fleet.collector.grpc_port}"
    frame = pb.Frame(node="b", batch=feeder.batch("b", 5, 1, 10**9, 0, 2)).SerializeToString()
    with grpc.secure_channel(address, credentials) as channel:
        try:
            list(channel.stream_stream(METHOD)(iter([frame])))
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            return code
    return grpc.StatusCode.OK
