"""Real collector and real agents over TLS: who is let in, who is not, and what is said about it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lanterne.collector.recording import BATCH, Damage, read
from lanterne.proto import telemetry_pb2 as pb
from tests.fixtures.authority import Authority, Pair, write
from tests.stack import Stack, wait_for

NODE = "node-a"


class Site:
    """A collector with TLS, and agents without probes that report to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.server = self.ca.issue("server", "localhost", "127.0.0.1")
        self.agent = self.ca.issue("agent", NODE)
        self.stack: Stack | None = None

    def start(
        self,
        *,
        agent: Pair | None = None,
        agent_ca: Path | None = None,
        node: str = NODE,
        tls: dict[str, object] | None = None,
        token: tuple[str, str] | None = None,
        start_agent: bool = True,
    ) -> Stack:
        """token: the collector's, the agent's."""
        own = agent or self.agent
        agent_tls = {"ca": str(agent_ca or self.ca.file)}
        if own.cert.name:
            agent_tls |= {"cert": str(own.cert), "key": str(own.key)}
        collector_tls = {
            "cert": str(self.server.cert),
            "key": str(self.server.key),
            "client_ca": str(self.ca.file),
        }
        sections: dict[str, Any] = {
            "tls": collector_tls | (tls or {}),
            "state": {"path": ""},
            "record": {"path": str(self.folder / "all.rec")},
        }
        agent_sections: dict[str, Any] = {
            "tls": agent_tls,
            "probes": {"enabled": False},
            "window": {"seconds": 0.1},
            "collector": {"backoff_max_seconds": 0.5},
            "experts": {"socket": ""},
        }
        if token:
            theirs, ours = self.folder / "collector.token", self.folder / "agent.token"
            write(theirs, token[0].encode())
            write(ours, token[1].encode())
            sections["ingest"] = {"token_file": str(theirs)}
            agent_sections["collector"]["token_file"] = str(ours)
        self.stack = Stack(self.folder, [], node=node, agent=agent_sections, collector=sections)
        self.stack.start_collector()
        if start_agent:
            self.stack.start_agent()
        return self.stack


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    if found.stack is not None:
        found.stack.stop()


NOBODY = Pair(Path(), Path())


def acknowledged(stack: Stack) -> float:
    return stack.agent_metrics().total("lanterne_agent_batches_acked_total")


def refused(stack: Stack, reason: str) -> float:
    return stack.collector_metrics().total(
        "lanterne_collector_streams_refused_total", reason=reason
    )


def lines(stack: Stack, script: str, text: str) -> list[str]:
    log = (stack.folder / f"{script}.log").read_text()
    return [line for line in log.splitlines() if text in line]


def comes_to_be(stack: Stack, condition: Any, what: str) -> None:
    try:
        wait_for(condition, 40, what)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{stack.logs()}") from None


def assert_turned_away(stack: Stack, reason: str, text: str) -> None:
    """Counted by cause more than once, said once, and nothing of the agent's was taken."""
    comes_to_be(stack, lambda: refused(stack, reason) >= 3, f"refused: {reason}")
    assert len(lines(stack, "lanterne-collector", text)) == 1, stack.logs()
    assert acknowledged(stack) == 0
    page = stack.collector_metrics()
    assert page.total("lanterne_collector_batches_total", status="accepted") == 0


def test_an_agent_with_its_own_certificate_reports(site: Site) -> None:
    stack = site.start()
    comes_to_be(stack, lambda: acknowledged(stack) >= 5, "batches acknowledged")
    comes_to_be(
        stack, lambda: stack.collector_metrics().get("lanterne_node_info", node=NODE), "it shows"
    )
    page = stack.collector_metrics()
    assert [labels["node"] for labels, _ in page.get("lanterne_node_info")] == [NODE]
    assert page.total("lanterne_collector_streams_refused_total") == 0


def test_a_certificate_of_another_authority_is_refused(site: Site) -> None:
    other = Authority(site.folder, "other").issue("stranger", NODE)
    assert_turned_away(site.start(agent=other), "tls_untrusted", "cause=tls_untrusted")


def test_an_expired_certificate_is_refused(site: Site) -> None:
    old = site.ca.issue("old", NODE, expired=True)
    assert_turned_away(site.start(agent=old), "tls_expired", "cause=tls_expired")


def test_no_certificate_is_refused(site: Site) -> None:
    stack = site.start(agent=NOBODY)
    assert_turned_away(stack, "tls_no_certificate", "cause=tls_no_certificate")


def test_a_stolen_node_name_is_refused_and_both_names_are_told(site: Site) -> None:
    stack = site.start(node="node-b")
    assert_turned_away(stack, "node_name", "cause=node_name")
    for script in ("lanterne-collector", "lanterne-agent"):
        told = lines(stack, script, "the certificate names")
        assert told, stack.logs()
        assert "node-a" in told[0]
        assert "node-b" in told[0]


def test_a_shared_name_may_speak_for_any_node(site: Site) -> None:
    shared = site.ca.issue("shared", "lanterne-agent")
    stack = site.start(agent=shared, node="node-b", tls={"shared_names": ["lanterne-agent"]})
    comes_to_be(stack, lambda: acknowledged(stack) >= 3, "batches acknowledged")


def test_an_agent_trusts_no_other_collector(site: Site) -> None:
    other = Authority(site.folder, "other")
    stack = site.start(agent_ca=other.file)
    comes_to_be(
        stack,
        lambda: lines(stack, "lanterne-agent", "CERTIFICATE_VERIFY_FAILED"),
        "the agent says why",
    )
    assert acknowledged(stack) == 0


def test_a_wrong_token_is_refused(site: Site) -> None:
    stack = site.start(token=(secrets.token_hex(16), secrets.token_hex(16)))
    assert_turned_away(stack, "token", "cause=token")
    assert lines(stack, "lanterne-agent", "UNAUTHENTICATED")


def test_tokens_are_exchanged_in_flight(site: Site) -> None:
    """The collector knows old and new, agents change, the collector forgets the old one."""
    old, new = secrets.token_hex(16), secrets.token_hex(16)
    stack = site.start(token=(old, old))
    comes_to_be(stack, lambda: acknowledged(stack) >= 3, "the first token is good")
    write(site.folder / "collector.token", f"{old}\n{new}\n".encode())
    comes_to_be(stack, lambda: lines(stack, "lanterne-collector", "token renewed"), "both known")
    write(site.folder / "agent.token", new.encode())
    comes_to_be(stack, lambda: lines(stack, "lanterne-agent", "renewed"), "the agent has it")
    write(site.folder / "collector.token", f"{new}\n".encode())
    comes_to_be(stack, lambda: lines(stack, "lanterne-collector", "renewals=2"), "the old is gone")
    now = acknowledged(stack)
    comes_to_be(stack, lambda: acknowledged(stack) >= now + 60, "it goes on with the new one")
    assert refused(stack, "token") == 0
    assert_nothing_lost(stack)


def test_a_withdrawn_token_ends_open_streams(site: Site) -> None:
    old = secrets.token_hex(16)
    stack = site.start(token=(old, old))
    comes_to_be(stack, lambda: acknowledged(stack) >= 3, "the token is good")
    write(site.folder / "collector.token", secrets.token_hex(16).encode())
    comes_to_be(stack, lambda: refused(stack, "token") >= 1, "the stream was ended")


def test_rotation_in_flight_loses_nothing(site: Site) -> None:
    """First the trust in both authorities, then both ends' certificates, then the old one goes."""
    stack = site.start()
    comes_to_be(stack, lambda: acknowledged(stack) >= 5, "batches acknowledged")
    new = Authority(site.folder, "new")
    write(site.ca.file, site.ca.pem + new.pem)
    wait_renewed(stack, 1)
    site.server.replace_by(new.issue("server-2", "localhost", "127.0.0.1"))
    site.agent.replace_by(new.issue("agent-2", NODE))
    wait_renewed(stack, 2)
    write(site.ca.file, new.pem)
    wait_renewed(stack, 3)
    now = acknowledged(stack)
    comes_to_be(stack, lambda: acknowledged(stack) >= now + 60, "it goes on")
    assert stack.agent_metrics().total("lanterne_agent_collector_connects_total") >= 3
    assert_nothing_lost(stack)


def wait_renewed(stack: Stack, times: int) -> None:
    for script in ("lanterne-collector", "lanterne-agent"):
        comes_to_be(
            stack, lambda s=script: lines(stack, s, f"renewals={times}"), f"{script}: {times}"
        )


def assert_nothing_lost(stack: Stack) -> None:
    """After the end: the batches that were taken are all there ever were, each of them once."""
    before = stack.agent_metrics()
    assert before.total("lanterne_agent_batches_dropped_total") == 0
    stack.stop_one("agent")
    assert not lines(stack, "lanterne-agent", "not everything was acknowledged")
    stack.stop_one("collector")
    damage = Damage()
    taken = [
        pb.Batch.FromString(pb.Frame.FromString(received.frame).batch)
        for received in read(stack.folder / "all.rec", damage)
        if received.flags & BATCH
    ]
    assert not damage
    assert len({batch.epoch for batch in taken}) == 1
    sequences = [batch.sequence for batch in taken]
    assert len(sequences) > before.total("lanterne_agent_batches_acked_total")
    assert sorted(sequences) == list(range(1, len(sequences) + 1))
