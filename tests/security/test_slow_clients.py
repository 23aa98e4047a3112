"""Clients that say nothing, a byte now and then, or do not read: both programs' HTTP sides."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from lanterne.agent import page_server
from lanterne.agent.page_server import PageServer
from lanterne.collector.http_server import HttpServer
from lanterne.service import connections
from lanterne.service.connections import Answer, Connections, Request
from lanterne.service.guard import Guard
from tests.fixtures.authority import Authority
from tests.stack import wait_for

MANY = 64
LONG = 600  # seconds that a server would wait: whatever passes meanwhile does not pass by that
LARGE = b"x" * (16 << 20)
HEAD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
SIDES = [(side, tls) for side in ("collector", "agent") for tls in (False, True)]


def page(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    body = LARGE if environ["PATH_INFO"] == "/large" else b"hello"
    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


class Site:
    """One side's server with or without TLS, and its clients."""

    def __init__(self, folder: Path, side: str, tls: bool, seconds: int) -> None:
        self.context: ssl.SSLContext | None = None
        config = ""
        if tls:
            ca = Authority(folder)
            own = ca.issue("web", "localhost", "127.0.0.1")
            files = {"cert_file": own.cert.name, "key_file": own.key.name}
            path = folder / "web.yml"
            path.write_text(yaml.safe_dump({"tls_server_config": files}))
            config = str(path)
            self.context = ssl.create_default_context(cafile=ca.file)
        self.stack = ExitStack()
        self.refused: Counter[str]
        if side == "collector":
            guard = Guard(config)
            server = HttpServer(page, "127.0.0.1", 0, timeout=seconds, guard=guard)
            server.start()
            self.stack.callback(server.stop)
            self.port, self.refused = server.port, guard.refused
        else:
            theirs = Guard(config)
            pages = PageServer("127.0.0.1", 0, page, theirs)
            self.stack.callback(pages.close)
            self.port, self.refused = pages.server_port, theirs.refused

    def connect(self, *, shaken: bool = False) -> socket.socket:
        """shaken: the handshake has been made, where there is one."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", self.port))
        if shaken and self.context is not None:
            sock = self.context.wrap_socket(sock, server_hostname="localhost")
        self.stack.callback(sock.close)
        return sock

    def scrape(self) -> int:
        connection = (
            http.client.HTTPSConnection("localhost", self.port, timeout=60, context=self.context)
            if self.context
            else http.client.HTTPConnection("localhost", self.port, timeout=60)
        )
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.read() == b"hello"
            return answer.status
        finally:
            connection.close()


Make = Callable[[str, bool, int], Site]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    sites: list[Site] = []

    def start(side: str, tls: bool, seconds: int) -> Site:
        monkeypatch.setattr(page_server, "SECONDS", float(seconds))
        sites.append(Site(tmp_path, side, tls, seconds))
        return sites[-1]

    yield start
    for site in sites:
        site.stack.close()


def trickle(clients: list[socket.socket], texts: list[bytes], ended: threading.Event) -> None:
    """A byte a second to each, of an endless request head; some may have been closed meanwhile."""
    sent = 0
    while True:
        for client, text in zip(clients, texts, strict=True):
            try:
                client.send(text[sent : sent + 1] or b"x")
            except OSError:
                continue
        sent += 1
        if ended.wait(1.0):
            return


def hello(context: ssl.SSLContext) -> bytes:
    """The first flight of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(("side", "tls"), SIDES)
def test_a_scrape_passes_beside_silent_and_slow_clients(make: Make, side: str, tls: bool) -> None:
    site = make(side, tls, LONG)
    silent = [site.connect() for _ in range(MANY)]
    slow = [site.connect() for _ in range(MANY // 2)]
    slow += [site.connect(shaken=True) for _ in range(MANY // 2)]
    first = hello(site.context) if site.context else HEAD
    texts = [first] * (MANY // 2) + [HEAD[:-2]] * (MANY // 2)
    ended = threading.Event()
    sender = threading.Thread(target=trickle, args=(slow, texts, ended))
    sender.start()
    try:
        for _ in range(20):
            assert site.scrape() == 200
    finally:
        ended.set()
        sender.join()
    # The collector has room for all of them; at the agent the oldest made room.
    closed = 0 if side == "collector" else 2 * MANY - page_server.CONNECTIONS
    assert closed <= site.refused["crowded"] <= closed + 20
    assert site.refused.total() == site.refused["crowded"]
    for client in (*silent, *slow):
        client.close()


@pytest.mark.parametrize(("side", "tls"), SIDES)
def test_a_scrape_passes_beside_clients_that_do_not_read(make: Make, side: str, tls: bool) -> None:
    site = make(side, tls, LONG)
    for _ in range(8):
        site.connect(shaken=True).sendall(HEAD.replace(b"/metrics", b"/large"))
    for _ in range(5):
        assert site.scrape() == 200
    assert site.refused.total() == 0


@pytest.mark.parametrize(("side", "tls"), SIDES)
def test_each_is_closed_in_time_and_counted_by_cause(make: Make, side: str, tls: bool) -> None:
    site = make(side, tls, 1)
    silent = [site.connect() for _ in range(3)]
    slow = [site.connect(shaken=True) for _ in range(4)]
    not_reading = [site.connect(shaken=True) for _ in range(2)]
    for client in slow:
        client.sendall(HEAD[:-2])
    for client in not_reading:
        client.sendall(HEAD.replace(b"/metrics", b"/large"))
    wait_for(lambda: site.refused.total() >= 9, 60, "all are counted")
    assert +site.refused == Counter(silent=3, slow=4, slow_reader=2)
    for client in (*silent, *slow):
        assert client.recv(1) == b""
    assert site.scrape() == 200


@pytest.mark.parametrize(("side", "tls"), SIDES)
def test_a_head_without_end_is_refused(make: Make, side: str, tls: bool) -> None:
    site = make(side, tls, LONG)
    client = site.connect(shaken=True)
    client.sendall(HEAD[:-2] + b"X: " + b"y" * connections.HEAD_BYTES)
    answer = b""
    while piece := client.recv(4096):
        answer += piece
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert +site.refused == Counter(oversized=1)


def test_requests_that_come_in_pieces(make: Make) -> None:
    """Slower than one read, faster than the time for it: each is answered, on one connection."""
    site = make("collector", False, LONG)
    with site.connect() as client:
        for _ in range(2):
            for byte in HEAD:
                client.sendall(bytes([byte]))
            answer = b""
            while not answer.endswith(b"hello"):
                answer += client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
    assert site.refused.total() == 0


# ---- what both rest on


class Bare:
    """`Connections` of a server that answers "hello", and tells whom it answers."""

    def __init__(self, most: int) -> None:
        self.refused: Counter[str] = Counter()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.asked = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.server = Connections(
            listener, self.answer, refused=self.refused, context=lambda: None,
            threads=1, seconds=LONG, most=most,
        )  # fmt: skip
        self.server.start()

    def answer(self, request: Request) -> Answer:
        self.asked.release()
        assert self.go.wait(60)
        return Answer([request.address.encode()])

    def connect(self, source: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60, (source, 0))

    def ask(self, source: str) -> bytes:
        with self.connect(source) as client:
            client.sendall(HEAD)
            return client.recv(100)


@pytest.fixture
def bare() -> Iterator[Bare]:
    found = Bare(most=16)
    yield found
    found.go.set()
    found.server.stop(5)


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_who_has_most_connections_gives_up_those_that_waited_longest(bare: Bare) -> None:
    others = [bare.connect("127.0.0.2") for _ in range(3)]
    crowd = [bare.connect("127.0.0.1") for _ in range(100)]
    wait_for(lambda: bare.refused["crowded"] >= 87, 60, "those beyond are closed")
    assert all(is_open(other) for other in others)
    assert bare.ask("127.0.0.3") == b"127.0.0.3"
    assert bare.ask("127.0.0.1") == b"127.0.0.1"
    wait_for(lambda: not is_open(crowd[0]), 60, "the oldest was closed")
    assert is_open(crowd[-1])
    assert bare.refused.total() == bare.refused["crowded"] <= 90
    for client in (*others, *crowd):
        client.close()


def test_answers_that_nobody_takes_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWERS_BYTES", 3 * len(LARGE))
    site = make("collector", False, LONG)
    for _ in range(10):
        site.connect().sendall(HEAD.replace(b"/metrics", b"/large"))
    wait_for(lambda: site.refused["slow_reader"] >= 6, 60, "the oldest were given up")
    assert site.scrape() == 200
    assert 6 <= site.refused.total() <= 8


def test_what_was_asked_is_answered_at_the_end(bare: Bare) -> None:
    bare.go.clear()
    with bare.connect("127.0.0.1") as waiting, bare.connect("127.0.0.1") as silent:
        waiting.sendall(HEAD)
        assert bare.asked.acquire(timeout=60)
        stopping = threading.Thread(target=bare.server.stop, args=(60,))
        stopping.start()
        bare.go.set()
        assert waiting.recv(100) == b"127.0.0.1"
        stopping.join()
        assert silent.recv(1) == b""


def test_a_fault_of_the_application_is_an_answer(bare: Bare, monkeypatch: Any) -> None:
    monkeypatch.setattr(bare.server, "_answer", lambda _: 1 / 0)
    assert bare.ask("127.0.0.1").startswith(b"HTTP/1.1 500 ")
    assert bare.ask("127.0.0.1").startswith(b"HTTP/1.1 500 ")
