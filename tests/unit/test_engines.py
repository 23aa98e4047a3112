"""What engines tell of themselves: Prometheus pages over real HTTP, and log lines in real files."""

from __future__ import annotations

import http.server
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, Summary, generate_latest

from lanterne.agent.engine_log import READ_BYTES, EngineLog, parse
from lanterne.agent.engine_metrics import quantile, wanted
from lanterne.agent.engines import Endpoint, Engine, fetched
from lanterne.agent.expert_counts import ExpertCounts


class Site:
    """An HTTP server on a free port that shows what `page` gives."""

    def __init__(self) -> None:
        self.page: Callable[[], bytes] = lambda: b""
        self.status = 200
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = site.page()
                self.send_response(site.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_vllm_latencies_of_the_last_minute(site: Site) -> None:
    registry = CollectorRegistry()
    edges = (0.1, 0.2, 0.4, 0.8)

    def made(name: str) -> Histogram:
        return Histogram(name, "x", ["model_name", "engine"], buckets=edges, registry=registry)

    ttft = made("vllm:time_to_first_token_seconds")
    made("vllm:e2e_request_latency_seconds").labels("m", "0")
    site.page = lambda: generate_latest(registry)
    clock = Clock()
    engine = Engine(Endpoint(site.address, "vllm", "chat"), ExpertCounts(), clock=clock)
    for _ in range(1000):
        ttft.labels("m", "0").observe(0.7)  # before anybody looked
    assert engine.poll() is None
    for _ in range(90):
        ttft.labels("m", "0").observe(0.05)
    for _ in range(10):
        ttft.labels("m", "1").observe(0.3)  # another data-parallel engine of the same address
    clock.now = 5.0
    reading = engine.poll()
    assert reading is not None
    assert (reading.workload, reading.engine, reading.address) == ("chat", "vllm", site.address)
    assert reading.values["ttft_count"] == 100
    assert reading.values["ttft_p50"] == pytest.approx(0.1 * 50 / 90)
    assert reading.values["ttft_p95"] == pytest.approx(0.3)
    assert reading.values["latency_count"] == 0
    assert "latency_p50" not in reading.values  # no request: not known, not zero
    clock.now = 70.0
    engine.poll()
    clock.now = 140.0
    reading = engine.poll()
    assert reading is not None
    assert reading.values["ttft_count"] == 0  # they were over a minute ago


def test_an_engine_that_began_anew_is_told_from_then_on(site: Site) -> None:
    line = 'vllm:time_to_first_token_seconds_bucket{{le="{}"}} {}\n'

    def told(low: int, high: int) -> None:
        site.page = lambda: (line.format("0.1", low) + line.format("+Inf", high)).encode()

    engine = Engine(Endpoint(site.address, "vllm"), ExpertCounts(), clock=Clock())
    told(50, 60)
    engine.poll()
    told(3, 4)
    assert engine.poll() is None
    told(5, 8)
    reading = engine.poll()
    assert reading is not None
    assert reading.values["ttft_count"] == 4
    assert reading.values["ttft_p99"] == 0.1  # beyond the last edge: at least that


def test_sglang_heat_map_and_balancedness(site: Site) -> None:
    registry = CollectorRegistry()
    heat = Histogram(
        "sglang:eplb_gpu_physical_count", "x", ["layer"], buckets=[0, 1, 2, 3], registry=registry
    )
    balanced = Summary("sglang:eplb_balancedness", "x", ["forward_mode"], registry=registry)
    site.page = lambda: generate_latest(registry)
    counts = ExpertCounts()
    engine = Engine(Endpoint(site.address, "sglang", "chat"), counts, clock=Clock())
    for layer in (3, 4):
        heat.labels(str(layer)).observe(0)
    engine.poll()
    for gpu, tokens in enumerate((5, 0, 2, 1)):
        for _ in range(tokens):
            heat.labels("3").observe(gpu)
    balanced.labels("decode").observe(0.5)
    balanced.labels("prefill").observe(0.7)
    reading = engine.poll()
    assert reading is not None
    assert reading.values["balancedness"] == pytest.approx(0.6)
    (told,) = counts.take()
    assert (told.unit, told.workload, told.layer) == ("rank", "chat", (3, 4))
    assert told.counts.tolist() == [[5, 0, 2, 1], [0, 0, 0, 0]]


def test_only_the_lines_that_matter_are_kept(site: Site) -> None:
    wide = b"".join(b'other_metric{n="%d"} 1\n' % n for n in range(200_000))
    site.page = lambda: wide + b"vllm:e2e_request_latency_seconds_sum 5\n" + wide
    assert fetched(site.address, wanted("vllm")).strip() == (
        b"vllm:e2e_request_latency_seconds_sum 5"
    )


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (lambda: b"x" * (17 << 20), "line longer"),
        (lambda: b"other 1\n" * (3 << 20), "larger than"),
        (lambda: b"vllm:time_to_first_token_seconds_x 1\n" * 100_000, "bytes of histograms"),
    ],
)
def test_pages_are_bounded(site: Site, page: Callable[[], bytes], words: str) -> None:
    body = page()
    site.page = lambda: body
    with pytest.raises(OSError, match=words):
        fetched(site.address, wanted("vllm"))


def test_what_does_not_answer_raises(site: Site) -> None:
    site.status = 503
    engine = Engine(Endpoint(site.address, "vllm"), ExpertCounts())
    with pytest.raises(OSError, match="answered 503"):
        engine.poll()
    site.status = 200
    site.page = lambda: b'vllm:time_to_first_token_seconds_bucket{le="0.1} broken\n'
    with pytest.raises(ValueError):
        engine.poll()


def test_nonsense_in_a_page_is_left_out(site: Site) -> None:
    site.page = lambda: (
        b'vllm:time_to_first_token_seconds_bucket{le="x"} 1\n'
        b"vllm:time_to_first_token_seconds_bucket 1\n"
        b'vllm:time_to_first_token_seconds_bucket{le="0.1"} NaN\n'
        b'vllm:time_to_first_token_seconds_bucket{le="0.1"} -5\n'
    )
    engine = Engine(Endpoint(site.address, "vllm"), ExpertCounts())
    assert engine.poll() is None
    assert engine.poll() is None


def test_quantiles() -> None:
    assert quantile(0.5, {1.0: 10, 2.0: 10, math.inf: 10}) == 0.5
    assert quantile(0.5, {1.0: 0, 2.0: 10, math.inf: 10}) == 1.5
    assert quantile(0.99, {1.0: 5, math.inf: 10}) == 1.0
    assert math.isnan(quantile(0.5, {}))
    assert math.isnan(quantile(0.5, {1.0: 0, math.inf: 0}))


# -- Logs ----------------------------------------------------------------------------------------

VLLM = (
    b"(EngineCore pid=7) INFO 11-29 [eplb.py:1] EPLB step: 40 for model moe: avg_tokens=12.50, "
    b"max_tokens=40, balancedness=0.3125, steps until the next rearrangement: 9\n"
)
SGLANG = (
    b"[2026] [Expert Balancedness] forward_pass_id=9 current_pass_balancedness=0.412 "
    b"last_10_average_balancedness=0.5 gpu_physical_count_sum=99\n"
)


def test_lines_of_both_engines() -> None:
    assert parse(VLLM) == {"balancedness": 0.3125, "tokens_avg": 12.5, "tokens_max": 40}
    assert parse(SGLANG + b"other\n") == {"balancedness": 0.412}
    assert parse(VLLM + SGLANG)["balancedness"] == 0.412  # the newest
    assert parse(b"nothing\n") == {}
    assert parse(VLLM.replace(b"0.3125", b"7.5")) == {}
    assert parse(VLLM.replace(b"0.3125", b"1.2.3")) == {}


def test_a_log_is_followed_over_rotation_and_truncation(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(VLLM)
    log = EngineLog(path, "chat", "vllm")
    assert log.poll() is None  # what was there before is old
    with path.open("ab") as file:
        file.write(VLLM[:60])
    assert log.poll() is None  # half a line
    with path.open("ab") as file:
        file.write(VLLM[60:])
    reading = log.poll()
    assert reading is not None
    assert (reading.workload, reading.engine, reading.values["tokens_max"]) == ("chat", "vllm", 40)
    path.rename(tmp_path / "vllm.log.1")
    with pytest.raises(FileNotFoundError):
        log.poll()
    path.write_bytes(SGLANG)
    reading = log.poll()
    assert reading is not None
    assert reading.values["balancedness"] == 0.412
    path.write_bytes(b"")
    assert log.poll() is None
    path.write_bytes(VLLM)
    assert log.poll() is not None


def test_a_log_that_grows_fast_is_read_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"")
    log = EngineLog(path, "", "vllm")
    path.write_bytes(SGLANG + b"x" * 100 + b"\n" + b"y\n" * READ_BYTES + VLLM)
    reading = log.poll()
    assert reading is not None
    assert reading.values["balancedness"] == 0.3125


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        EngineLog(tmp_path / "pipe", "", "vllm").poll()
