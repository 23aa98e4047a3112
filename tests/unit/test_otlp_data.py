"""Families as the SDK's data: bounded parts, nothing lost or told twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otlp")

from opentelemetry.sdk.metrics.export import Gauge, Histogram, MetricsData, Sum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from lanterne.collector.config import CollectorConfig, OtlpConfig, load
from lanterne.collector.dry_run import _otlp
from lanterne.collector.errors import ConfigError
from lanterne.collector.export import families
from lanterne.collector.otlp import _read_headers
from lanterne.collector.otlp_data import parts
from lanterne.collector.series_nodes import Runtime
from tests.fixtures.snapshots import large, ranks, snapshot

RUNTIME = Runtime(version="0.1.0", queue_depth=0, engine_errors=0)


def made(points: int, count: int = 64) -> list[MetricsData]:
    return list(
        parts(
            families(large(count), RUNTIME),
            resource=Resource({}),
            scope=InstrumentationScope("test"),
            since_ns=1,
            at_ns=2,
            points=points,
        )
    )


def told(part: MetricsData) -> Counter[tuple[str, frozenset[tuple[str, object]]]]:
    (resource,) = part.resource_metrics
    (scope,) = resource.scope_metrics
    return Counter(
        (metric.name, frozenset((point.attributes or {}).items()))
        for metric in scope.metrics
        for point in metric.data.data_points
    )


@pytest.mark.parametrize("points", [1, 7, 100, 10**6])
def test_parts_are_bounded_and_whole(points: int) -> None:
    found = [told(part) for part in made(points)]
    assert all(0 < part.total() <= points for part in found)
    assert all(part.total() == points for part in found[:-1])
    together: Counter[tuple[str, frozenset[tuple[str, object]]]] = sum(found, Counter())
    assert set(together.values()) == {1}
    (whole,) = (told(part) for part in made(10**6))
    assert together == whole


def test_kinds_and_starts() -> None:
    (part,) = made(10**6)
    for metric in part.resource_metrics[0].scope_metrics[0].metrics:
        assert not metric.name.endswith("_total")
        starts = {point.start_time_unix_nano for point in metric.data.data_points}
        assert isinstance(metric.data, Sum | Gauge | Histogram)
        assert starts == ({0} if isinstance(metric.data, Gauge) else {1}), metric.name


def test_what_is_unknown_is_absent_here_too() -> None:
    shot = replace(snapshot(), ranks=ranks(evidence="none"))
    (part,) = parts(
        families(shot, RUNTIME),
        resource=Resource({}),
        scope=InstrumentationScope("test"),
        since_ns=1,
        at_ns=2,
        points=10**6,
    )
    names = {name for name, _ in told(part)}
    assert "lanterne_rank_wait_seconds" not in names
    assert "lanterne_communicator_waits_absent" in names


def test_headers(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("otlp") / "headers"
    assert _read_headers("") == {}
    path.write_text("Authorization: Basic a:b=\n\n x-scope :1\n")
    assert _read_headers(str(path)) == {"Authorization": "Basic a:b=", "x-scope": "1"}
    path.write_text("one: 1\nsecret\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        _read_headers(str(path))
    assert "secret" not in str(caught.value)
    with pytest.raises(OSError):
        _read_headers(str(path) + ".gone")


def test_a_dry_run_says_whether_it_could_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(_otlp(CollectorConfig())) == []
    headers = tmp_path / "headers"
    endpoint = "http://127.0.0.1:4318/v1/metrics"
    wanted = OtlpConfig(endpoint=endpoint, headers_file=str(headers))
    first, second = _otlp(CollectorConfig(otlp=wanted))
    assert (first.status, first.detail) == ("ok", endpoint)
    assert (second.status, second.key) == ("fail", "otlp.headers_file")
    headers.write_text("a: b\n")
    assert [found.status for found in _otlp(CollectorConfig(otlp=wanted))] == ["ok", "ok"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    first, _ = _otlp(CollectorConfig(otlp=wanted))
    assert first.status == "fail"
    assert "pip install 'lanterne[otlp]'" in first.detail


@pytest.mark.parametrize("endpoint", ["otel:4318", "ftp://a/b", "http://", "http://a b/c"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="v1/metrics"):
        load(None, {"LANTERNE_COLLECTOR_OTLP_ENDPOINT": endpoint}, {})
