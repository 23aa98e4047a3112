"""The HTTP side through a real server and real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from lanterne.collector.errors import ListenError
from lanterne.collector.export import Exposition
from lanterne.collector.http import App
from lanterne.collector.http_server import HttpServer
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot
from tests.fixtures.snapshots import NOW, blind, communicator, ranks, snapshot


@dataclass
class Site:
    latest: Snapshot | None = None
    problems: dict[str, str] = field(default_factory=lambda: {"grpc": "", "engine": ""})
    port: int = 0

    def get(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> dict[str, object]:
        status, headers, body = self.get(path)
        assert status == 200, body
        assert headers["content-type"] == "application/json"
        found: dict[str, object] = json.loads(body)
        return found


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    found = Site()
    page = Exposition(lambda: found.latest, lambda: Runtime("0.1.0", 0, 0))
    app = App(
        latest=lambda: found.latest,
        metrics=page.page,
        ready=lambda: found.problems,
        clock=lambda: NOW + 1,
    )
    server = HttpServer(app, "127.0.0.1", 0, timeout=2)
    found.port = server.port
    server.start()
    yield found
    server.stop()


@pytest.fixture
def site(served: Site) -> Site:
    served.latest = snapshot()
    served.problems = {"grpc": "", "engine": ""}
    return served


def test_metrics_in_both_formats(site: Site) -> None:
    status, headers, body = site.get("/metrics")
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b'lanterne_rank_straggler{class="slow_compute"' in body
    asked = {"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
    status, headers, body = site.get("/metrics", headers=asked)
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")


def test_health_is_the_process_and_readiness_its_parts(site: Site) -> None:
    assert site.json("/healthz") == {"status": "alive"}
    assert site.json("/readyz") == {"ready": True, "checks": {"grpc": "ok", "engine": "ok"}}
    site.problems["engine"] = "ended: see the log"
    status, _, body = site.get("/readyz")
    assert status == 503
    assert json.loads(body) == {
        "ready": False,
        "checks": {"grpc": "ok", "engine": "ended: see the log"},
    }
    assert site.get("/healthz")[0] == 200


def test_the_snapshot_as_json(site: Site) -> None:
    found = site.json("/api/v1/snapshot")
    text = json.dumps(found)
    assert "NaN" not in text
    comm = found["communicators"][0]  # type: ignore[index]
    assert comm["comm_hash"] == "0xf00d000000000001"
    assert comm["evidence"] == "blocking"
    assert comm["bytes_by_domain"]["same_node"] == [1_048_576] * 8
    (duration,) = comm["durations"]
    assert (duration["op"], duration["source"], duration["count"]) == (
        "all_to_all",
        "blocking",
        100,
    )
    assert comm["calls"][0]["calls"] == 960
    assert comm["load"]["skew"] == 1.25
    columns: dict[str, list[object]] = found["ranks"]  # type: ignore[assignment]
    assert {len(column) for column in columns.values()} == {8}
    assert columns["class"][5] == "slow_compute"
    assert columns["evidence"][0] == "blocking"
    assert columns["gpu"][5] == "5"
    assert found["nodes"][0]["events_lost"] == {"ring_full": 0}  # type: ignore[index]


def test_unknown_numbers_are_null(site: Site) -> None:
    site.latest = blind()
    found = site.json("/api/v1/snapshot")
    assert found["ranks"]["wait_seconds"] == [None] * 8  # type: ignore[index]
    assert found["communicators"][0]["wait_share"] is None  # type: ignore[index]
    assert found["communicators"][0]["waits_for"] is None  # type: ignore[index]
    assert site.json("/api/v1/stragglers")["rows"] == []


def test_a_new_snapshot_is_shown_at_once(site: Site) -> None:
    assert len(site.json("/api/v1/snapshot")["communicators"]) == 1  # type: ignore[arg-type]
    site.latest = snapshot(communicators=(), ranks=ranks(0))
    assert site.json("/api/v1/snapshot")["communicators"] == []


def test_nodes_and_how_fresh_they_are(site: Site) -> None:
    found = site.json("/api/v1/nodes")
    shown = snapshot()
    assert found["taken_at"] == shown.taken_at
    nodes = found["nodes"]
    assert [n["name"] for n in nodes] == [n.name for n in shown.nodes]  # type: ignore[attr-defined]
    assert [n["last_window_end"] for n in nodes] == [  # type: ignore[attr-defined]
        n.last_window_end for n in shown.nodes
    ]


def test_stragglers_worst_first_with_limits(site: Site) -> None:
    found = site.json("/api/v1/stragglers")
    rows: list[dict[str, object]] = found["rows"]  # type: ignore[assignment]
    assert len(rows) == 8
    assert (rows[0]["rank"], rows[0]["klass"], rows[0]["straggler"]) == (5, "slow_compute", True)
    assert found["served_at"] == NOW + 1
    assert len(site.json("/api/v1/stragglers?limit=2")["rows"]) == 2  # type: ignore[arg-type]
    assert len(site.json("/api/v1/stragglers?named=1")["rows"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "query", ["limit=x", "limit=-1", "limit=1001", "named=2", "limit=", "limit=%C2%B2"]
)
def test_bad_queries_are_told(site: Site, query: str) -> None:
    status, headers, body = site.get("/api/v1/stragglers?" + query)
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert "whole number" in json.loads(body)["error"]


def test_before_the_first_snapshot(site: Site) -> None:
    site.latest = None
    for path in ("/api/v1/snapshot", "/api/v1/stragglers", "/api/v1/nodes"):
        status, _, body = site.get(path)
        assert status == 503
        assert "no snapshot yet" in json.loads(body)["error"]
    assert b"lanterne_collector_info" in site.get("/metrics")[2]


def test_wrong_paths_and_methods(site: Site) -> None:
    status, _, body = site.get("/nowhere")
    assert status == 404
    assert "/metrics" in json.loads(body)["error"]
    status, headers, _ = site.get("/metrics", method="POST")
    assert status == 405
    assert headers["allow"] == "GET, HEAD"
    assert site.get("/nowhere", method="POST")[0] == 404
    status, headers, body = site.get("/healthz", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0


def test_the_index_links_to_every_page(site: Site) -> None:
    status, headers, body = site.get("/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    for path in (b"metrics", b"healthz", b"readyz", b"api/v1/snapshot", b"api/v1/stragglers"):
        assert b'href="' + path + b'"' in body


def test_a_defect_is_a_500_and_not_the_end(site: Site) -> None:
    broken = communicator()
    site.latest = replace(snapshot(), communicators=(replace(broken, evidence=99),))
    status, _, body = site.get("/api/v1/snapshot")
    assert status == 500
    assert "the log says why" in json.loads(body)["error"]
    assert site.get("/healthz")[0] == 200


def test_oversized_requests_are_refused(site: Site) -> None:
    assert site.get("/healthz", headers={"X-Long": "a" * 20_000})[0] in (413, 414, 431)
    assert site.get("/" + "a" * 20_000)[0] in (413, 414, 431)
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as client:
        client.sendall(b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
        assert b" 413 " in client.recv(200)
    assert site.get("/healthz")[0] == 200


def test_clients_that_say_nothing_do_not_block_the_others(site: Site) -> None:
    idle = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(8)]
    try:
        assert site.get("/healthz")[0] == 200
    finally:
        for client in idle:
            client.close()


def test_many_scrape_at_once(site: Site) -> None:
    found: list[int] = []

    def scrape() -> None:
        found.append(site.get("/metrics")[0])

    threads = [threading.Thread(target=scrape) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 12


def test_a_port_in_use_names_the_address_and_the_remedy(site: Site) -> None:
    app = App(latest=lambda: None, metrics=lambda _: ("", b""), ready=dict)
    with pytest.raises(ListenError, match=rf"127.0.0.1:{site.port}.*--http-address"):
        HttpServer(app, "127.0.0.1", site.port)
    with pytest.raises(ListenError, match=r"256.0.0.1"):
        HttpServer(app, "256.0.0.1", 0)
