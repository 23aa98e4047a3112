"""The agent's own pages: whoever connects cannot take its threads or its time."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from lanterne.agent import page_server
from lanterne.agent.page_server import CONNECTIONS, PageServer
from tests.stack import wait_for


def page(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


@pytest.fixture
def server() -> Iterator[PageServer]:
    found = PageServer("127.0.0.1", 0, page)
    yield found
    found.close()


def scrape(server: PageServer) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=30)


def test_connections_are_bounded_and_a_scrape_still_passes(server: PageServer) -> None:
    """The silent ones hold their places until their time is over, then there is room again."""
    before = threading.active_count()
    strangers = [connect(server) for _ in range(10 * CONNECTIONS)]
    try:
        wait_for(lambda: server.refused >= 9 * CONNECTIONS, 30, "those beyond are closed")
        assert threading.active_count() <= before + 2 * CONNECTIONS  # and a timer each
        wait_for(lambda: scrape(server) == 200, 60, "a scrape passes")
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_request_that_trickles_in_is_ended(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "SECONDS", 1.0)
    with connect(server) as trickle:
        ended = threading.Event()

        def send() -> None:
            try:
                while not ended.wait(0.2):
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
    assert scrape(server) == 200
