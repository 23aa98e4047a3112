"""Prometheus export of the latest snapshot.

`SnapshotCollector` is a custom collector: fresh families at every collection, so what a finished
job left behind vanishes with it. `Exposition` writes the same families as text once a snapshot,
however many scrape. It has its own writer, byte for byte what prometheus_client writes (a test
compares them), because at 16,384 ranks theirs holds the interpreter lock for over a second a
scrape, and the analysis would have to wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as ClientMetric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_1_0_0
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ClientExemplar
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from lanterne.collector import (
    series_advice,
    series_experts,
    series_jobs,
    series_nodes,
    series_stages,
)
from lanterne.collector.metrics import Exemplar, Family
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot

Latest = Callable[[], Snapshot | None]

_go_number: Callable[[float], str] = floatToGoString


def families(snapshot: Snapshot | None, runtime: Runtime | None) -> Iterator[Family]:
    """All families that have samples, in the order of the page."""
    found: list[Iterator[Family]] = []
    if snapshot is not None:
        found += [
            series_jobs.families(snapshot),
            series_experts.families(snapshot),
            series_advice.families(snapshot),
            series_stages.families(snapshot),
            series_nodes.families(snapshot),
        ]
    if runtime is not None:
        found.append(series_nodes.runtime_families(runtime))
    return (family for part in found for family in part if family.points)


class SnapshotCollector(Collector):
    """For a prometheus_client registry; `latest` gives the snapshot, or None before the first."""

    def __init__(self, latest: Latest, runtime: Callable[[], Runtime] | None = None) -> None:
        self._latest = latest
        self._runtime = runtime

    def collect(self) -> Iterable[ClientMetric]:
        runtime = self._runtime() if self._runtime else None
        for metric, points in families(self._latest(), runtime):
            # prometheus_client adds the suffix of counters itself.
            name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
            family = ClientMetric(name, metric.help, metric.kind)
            family.samples = [
                Sample(p.name, p.labels, p.value, None, p.exemplar and ClientExemplar(*p.exemplar))
                for p in points
            ]
            yield family

    def describe(self) -> Iterable[ClientMetric]:
        return []  # so that registering does not collect


class Exposition:
    """The page /metrics. What the snapshot gives is written once a snapshot, `runtime` each time:
    where the analysis fails the snapshot stays the same, and that must be seen."""

    def __init__(self, latest: Latest, runtime: Callable[[], Runtime]) -> None:
        self._latest = latest
        self._runtime = runtime
        self._lock = threading.Lock()
        self._of: Snapshot | None = None
        self._pages: dict[bool, bytes] = {}

    def page(self, accept: str) -> tuple[str, bytes]:
        """(content type, body) for an Accept header."""
        openmetrics = wants_openmetrics(accept)
        own = write(families(None, self._runtime()), openmetrics=openmetrics)
        body = self._snapshot_part(openmetrics) + own
        return OPENMETRICS_1_0_0 if openmetrics else CONTENT_TYPE_PLAIN_0_0_4, body

    def _snapshot_part(self, openmetrics: bool) -> bytes:
        snapshot = self._latest()
        with self._lock:  # one thread writes, the others wait for its page
            if snapshot is not self._of:
                self._of, self._pages = snapshot, {}
            part = self._pages.get(openmetrics)
            if part is None:
                part = write(families(snapshot, None), openmetrics=openmetrics, end=False)
                self._pages[openmetrics] = part
        return part


def write(found: Iterable[Family], *, openmetrics: bool = False, end: bool = True) -> bytes:
    """The text exposition format 0.0.4, or OpenMetrics 1.0.0 (`end`: with its end mark)."""
    out: list[str] = []
    # Ranks' points share their labels across families: each label set is formatted once. Keyed by
    # identity, hence the families are held until the end.
    texts: dict[int, str] = {}
    held = list(found)
    for metric, points in held:
        name = metric.name
        if openmetrics and metric.kind == "counter":
            name = name.removesuffix("_total")
        out.append(f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n")
        for sample, labels, value, exemplar in points:
            text = texts.get(id(labels))
            if text is None:
                text = texts[id(labels)] = _labels(labels)
            # repr is what _go_number gives up to a million.
            number = repr(value) if -1e6 < value < 1e6 else _go_number(value)
            if exemplar is not None and openmetrics:
                number += _exemplar(exemplar)
            out.append(f"{sample}{text} {number}\n")
    if openmetrics and end:
        out.append("# EOF\n")
    return "".join(out).encode()


def _exemplar(exemplar: Exemplar) -> str:
    return f" # {_labels(exemplar.labels)} {_go_number(exemplar.value)} {exemplar.at}"


def wants_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics 1.0.0, and likes it no less than the text format.

    Of its versions only 1.0.0 is written here, and a range without a version takes any.
    """
    openmetrics = text = 0.0
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        values = dict(p.split("=", 1) for p in parameters if "=" in p)
        try:
            quality = float(values.get("q", "1"))
        except ValueError:
            quality = 0.0
        if kind == "application/openmetrics-text":
            if values.get("version", "1.0.0").strip('"') == "1.0.0":
                openmetrics = max(openmetrics, quality)
        elif kind == "text/plain":
            text = max(text, quality)
    return openmetrics > 0 and openmetrics >= text


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    text = ",".join([f'{k}="{_escape(labels[k])}"' for k in sorted(labels)])
    return f"{{{text}}}"


def _escape(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
