"""Metric families -> the data model of the OpenTelemetry SDK, in parts of bounded size. Pure.

Names are those of OpenMetrics: a counter's without `_total`, which a Prometheus that receives OTLP
puts back. Only opentelemetry's own classes are used; this module is imported where [otlp] is
configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from lanterne.collector import metrics

NS = 1e9
# By the last word of a name, in UCUM. No unit "1" elsewhere: a receiver that writes Prometheus'
# names would append "_ratio".
UNITS = {
    "seconds": "s",
    "bytes": "By",
    "joules": "J",
    "watts": "W",
    "hertz": "Hz",
    "celsius": "Cel",
    "ratio": "1",
}


def parts(
    found: Iterable[metrics.Family],
    *,
    resource: Resource,
    scope: InstrumentationScope,
    since_ns: int,
    at_ns: int,
    points: int,
) -> Iterator[MetricsData]:
    """MetricsData of at most `points` data points each; counters count since `since_ns`."""
    held: list[Metric] = []
    room = points
    for family in found:
        rest = _points(family, since_ns, at_ns)
        while rest:
            now, rest = rest[:room], rest[room:]
            held.append(_metric(family.metric, now))
            room -= len(now)
            if not room:
                yield _data(held, resource, scope)
                held, room = [], points
    if held:
        yield _data(held, resource, scope)


def _data(held: list[Metric], resource: Resource, scope: InstrumentationScope) -> MetricsData:
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, held, "")], "")])


def _metric(
    metric: metrics.Metric, points: Sequence[NumberDataPoint | HistogramDataPoint]
) -> Metric:
    name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    unit = UNITS.get(name.rsplit("_", 1)[1], "")
    cumulative = AggregationTemporality.CUMULATIVE
    data: Sum | Gauge | Histogram
    if metric.kind == "counter":
        data = Sum(points, cumulative, is_monotonic=True)  # type: ignore[arg-type]
    elif metric.kind == "histogram":
        data = Histogram(points, cumulative)  # type: ignore[arg-type]
    else:
        data = Gauge(points)  # type: ignore[arg-type]
    return Metric(name, metric.help, unit, data)


def _points(
    family: metrics.Family, since_ns: int, at_ns: int
) -> Sequence[NumberDataPoint | HistogramDataPoint]:
    if family.metric.kind == "histogram":
        return list(_histograms(family, since_ns, at_ns))
    start = since_ns if family.metric.kind == "counter" else 0
    return [NumberDataPoint(p.labels, start, at_ns, p.value) for p in family.points]


def _histograms(family: metrics.Family, since_ns: int, at_ns: int) -> Iterator[HistogramDataPoint]:
    """Each label set's buckets come one after the other, then its count and sum."""
    name = family.metric.name
    edges: list[float] = []
    upto: list[float] = []
    exemplars: list[Exemplar] = []
    count = 0.0
    for point in family.points:
        if point.name == f"{name}_bucket":
            edges.append(float(point.labels["le"]))
            upto.append(point.value)
            if point.exemplar is not None:
                exemplars.append(_exemplar(point.exemplar))
        elif point.name == f"{name}_count":
            count = point.value
        else:
            counts = [int(b - a) for a, b in zip([0.0, *upto], upto, strict=False)]
            yield HistogramDataPoint(
                attributes=point.labels,
                start_time_unix_nano=since_ns,
                time_unix_nano=at_ns,
                count=int(count),
                sum=point.value,
                bucket_counts=counts,
                explicit_bounds=edges[:-1],  # the last is +Inf
                min=None,  # type: ignore[arg-type]  # not known; the exporter leaves it out
                max=None,  # type: ignore[arg-type]
                exemplars=exemplars,
            )
            edges, upto, exemplars = [], [], []


def _exemplar(exemplar: metrics.Exemplar) -> Exemplar:
    return Exemplar(exemplar.labels, exemplar.value, int(exemplar.at * NS), None, None)
