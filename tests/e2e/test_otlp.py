"""The collector pushes its metrics to a real OTLP receiver, and goes on where that fails."""

from __future__ import annotations

import gzip
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.fed_moe import enrich
from tests.fixtures.feeder import SLOW, Feeder
from tests.stack import Stack, fetch, free_port, wait_for

proto = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="the extra otlp"
)
pb = pytest.importorskip("opentelemetry.proto.metrics.v1.metrics_pb2", reason="the extra otlp")


class Receiver:
    """OTLP over HTTP; `status` is what it answers. Keeps what came, decoded."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[object] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
                if self.path == "/v1/metrics" and receiver.status == 200:
                    receiver.requests.append(proto.ExportMetricsServiceRequest.FromString(body))
                answer = proto.ExportMetricsServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.port = int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def metrics(self) -> dict[str, list[object]]:
        """Metrics of all requests so far, by name."""
        found: dict[str, list[object]] = {}
        for request in list(self.requests):
            for resource in request.resource_metrics:  # type: ignore[attr-defined]
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        found.setdefault(metric.name, []).append(metric)
        return found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def config(port: int, headers: str = "") -> dict[str, dict[str, object]]:
    return {
        "analysis": {"window_seconds": 2.0},
        "otlp": {
            "endpoint": f"http://127.0.0.1:{port}/v1/metrics",
            "interval_seconds": 1.0,
            "headers_file": headers,
        },
    }


def exports(stack: Stack, status: str) -> float:
    return stack.collector_metrics().total("lanterne_collector_otlp_exports_total", status=status)


def attributes(point: object) -> dict[str, str]:
    return {a.key: a.value.string_value for a in point.attributes}  # type: ignore[attr-defined]


def test_the_same_metrics_arrive(tmp_path: Path, receiver: Receiver) -> None:
    secret = tmp_path / "headers"
    secret.write_text("Authorization: Bearer one\n\nX-Scope: gpu\n")
    with Stack(tmp_path, [], collector=config(receiver.port, str(secret))) as stack:
        stack.start_collector()
        with Feeder(f"127.0.0.1:{stack.grpc_port}", history=20, more=enrich):
            name = "lanterne_rank_straggler"
            wait_for(lambda: name in receiver.metrics(), 30, "a verdict by OTLP")
            wait_for(lambda: exports(stack, "sent") > 0, 30, "exports counted")
            page = fetch(f"{stack.collector_url}/metrics")
            known = {f.name: f.type for f in text_string_to_metric_families(page)}
            wait_for(lambda: set(known) <= set(receiver.metrics()), 30, "every metric of the page")
            secret.write_text("Authorization: Bearer two\n")
            wait_for(
                lambda: receiver.headers[-1].get("authorization") == "Bearer two",
                30,
                "the renewed header",
            )
    assert receiver.headers[0]["authorization"] == "Bearer one"
    assert receiver.headers[0]["x-scope"] == "gpu"
    check_kinds(receiver, known)
    check_values(receiver)


def check_kinds(receiver: Receiver, known: dict[str, str]) -> None:
    shapes = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    cumulative = pb.AGGREGATION_TEMPORALITY_CUMULATIVE
    for name, found in receiver.metrics().items():
        shape = found[-1].WhichOneof("data")  # type: ignore[attr-defined]
        assert shape == shapes[known[name]], name
        if shape == "sum":
            assert found[-1].sum.is_monotonic  # type: ignore[attr-defined]
            assert found[-1].sum.aggregation_temporality == cumulative  # type: ignore[attr-defined]
    units = {name: found[-1].unit for name, found in receiver.metrics().items()}  # type: ignore[attr-defined]
    assert units["lanterne_rank_wait_seconds"] == "s"
    assert units["lanterne_gpu_memory_used_bytes"] == "By"
    assert units["lanterne_rank_straggler_ratio"] == "1"
    assert units["lanterne_rank_straggler"] == ""
    resource = receiver.requests[-1].resource_metrics[0].resource  # type: ignore[attr-defined]
    assert attributes(resource)["service.name"] == "lanterne-collector"


def check_values(receiver: Receiver) -> None:
    found = receiver.metrics()
    points = found["lanterne_rank_straggler_ratio"][-1].gauge.data_points  # type: ignore[attr-defined]
    ratio = {attributes(p)["rank"]: p.as_double for p in points}
    assert ratio[str(SLOW)] > 1.5
    waits = found["lanterne_collective_wait_seconds"][-1].histogram.data_points  # type: ignore[attr-defined]
    (point,) = [p for p in waits if attributes(p)["comm"] == "ep"]
    assert set(attributes(point)) == {"workload", "comm", "op", "source"}
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert sum(point.bucket_counts) == point.count > 0
    assert not point.HasField("min")
    inside = [
        (low, high)
        for low, high, count in zip(
            [0.0, *point.explicit_bounds], point.explicit_bounds, point.bucket_counts, strict=False
        )
        if count and low > 0
    ]
    assert any(low <= 0.008 <= high for low, high in inside)
    (exemplar,) = point.exemplars
    assert {a.key for a in exemplar.filtered_attributes} >= {"comm_hash", "seq"}
    assert exemplar.as_double == pytest.approx(0.008)


def test_an_endpoint_that_fails_is_a_count_and_a_line_in_the_log(tmp_path: Path) -> None:
    port = free_port()
    with Stack(tmp_path, [], collector=config(port)) as stack:
        stack.start_collector()
        with Feeder(f"127.0.0.1:{stack.grpc_port}", history=20):
            wait_for(lambda: exports(stack, "failed") >= 2, 30, "failed exports")
            assert exports(stack, "sent") == 0
            wait_for(lambda: list(stack.named()), 30, "the verdict all the same")
            receiver = Receiver(port)
            try:
                wait_for(lambda: exports(stack, "sent") > 0, 30, "exports once it is there")
                receiver.status = 400
                before = exports(stack, "failed")
                wait_for(lambda: exports(stack, "failed") > before, 30, "refused exports")
            finally:
                receiver.close()
        assert stack.stop_one("collector") == 0
    text = stack.logs(100_000)
    assert text.count("works again") == 1
    assert text.count("fails: ") == 2
    assert "Traceback" not in text


def test_headers_that_cannot_be_read_say_so_without_showing_them(tmp_path: Path) -> None:
    secret = tmp_path / "headers"
    secret.write_text("Bearer hidden-token\n")
    with Stack(tmp_path, [], collector=config(free_port(), str(secret))) as stack:
        stack.start_collector()
        wait_for(lambda: exports(stack, "failed") >= 1, 30, "a failed export")
    text = stack.logs(100_000)
    assert "line 1 is not" in text
    assert "hidden-token" not in text


def test_nothing_of_it_is_loaded_where_it_is_not_configured(tmp_path: Path) -> None:
    with Stack(tmp_path, []) as stack:
        stack.start_collector()
        assert stack.collector_metrics().get("lanterne_collector_otlp_exports_total") == []
    code = (
        "import sys, lanterne.collector.main; "
        "sys.exit(any('opentelemetry' in name for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 0
