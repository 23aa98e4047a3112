"""Latency of an engine from its histograms, over the last minute. Pure.

An engine's own histograms are cumulative since it began; what they grew by in a minute is the
distribution of that minute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# What is told -> the engine's histograms, the first that it has. TPOT is the mean of a request
# without its first token; SGLang has no such histogram, only the time between tokens.
LATENCIES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "ttft": ("vllm:time_to_first_token_seconds",),
        "tpot": ("vllm:request_time_per_output_token_seconds",),
        "inter_token": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "latency": ("vllm:e2e_request_latency_seconds",),
    },
    "sglang": {
        "ttft": ("sglang:time_to_first_token_seconds",),
        "inter_token": ("sglang:inter_token_latency_seconds",),
        "latency": ("sglang:e2e_request_latency_seconds",),
    },
}
BALANCEDNESS = "sglang:eplb_balancedness"  # a summary
HEAT_MAP = "sglang:eplb_gpu_physical_count"  # a histogram whose "le" is the number of a GPU
KINDS = tuple(LATENCIES)
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SPAN_SECONDS = 60.0
MAX_EDGES = 256
MAX_LAYERS = 512

Sample = tuple[str, Mapping[str, str], float]  # name, labels, value
Buckets = dict[float, float]  # upper edge -> cumulative count


def wanted(kind: str) -> tuple[bytes, ...]:
    """What the lines begin with that are worth parsing."""
    names = [name for group in LATENCIES[kind].values() for name in group]
    if kind == "sglang":
        names += [BALANCEDNESS, HEAT_MAP]
    return tuple(name.encode() for name in names)


@dataclass
class Page:
    """One scrape; series of several models or data-parallel engines are added up."""

    buckets: dict[str, Buckets] = field(default_factory=dict)  # by histogram
    sums: dict[str, float] = field(default_factory=dict)  # NAME_sum, NAME_count
    heat: dict[int, Buckets] = field(default_factory=dict)  # by layer


def page(samples: Iterable[Sample]) -> Page:
    found = Page()
    for name, labels, value in samples:
        try:
            value = float(value)  # the parser gives whole numbers of any size
        except OverflowError:
            continue
        if not math.isfinite(value) or value < 0:
            continue
        if name.endswith("_bucket"):
            _add_bucket(found, name.removesuffix("_bucket"), labels, value)
        elif name.endswith(("_sum", "_count")):
            found.sums[name] = found.sums.get(name, 0.0) + value
    return found


def _add_bucket(found: Page, name: str, labels: Mapping[str, str], value: float) -> None:
    try:
        edge = float(labels.get("le", ""))
        layer = int(labels["layer"]) if name == HEAT_MAP else -1
    except (KeyError, ValueError):
        return
    if name == HEAT_MAP:
        if layer < 0 or (layer not in found.heat and len(found.heat) >= MAX_LAYERS):
            return
        buckets = found.heat.setdefault(layer, {})
    else:
        buckets = found.buckets.setdefault(name, {})
    if edge in buckets or len(buckets) < MAX_EDGES:
        buckets[edge] = buckets.get(edge, 0.0) + value


def quantile(q: float, buckets: Buckets) -> float:
    """The q-quantile, linear within a bucket; NaN where there is nothing.

    Beyond the last finite edge that edge, which is then a lower bound.
    """
    edges = sorted(buckets)
    total = buckets[edges[-1]] if edges else 0.0
    if total <= 0:
        return math.nan
    rank, below, low = q * total, 0.0, 0.0
    for edge in edges:
        count = buckets[edge]
        if count >= rank and count > below:
            if math.isinf(edge):
                return low
            return low + (edge - low) * max(0.0, rank - below) / (count - below)
        below, low = max(below, count), edge
    return low


class Latency:
    """Pages of one engine, one after the other -> values of an EngineReading."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._pages: deque[tuple[float, Page]] = deque(maxlen=64)

    def add(self, now: float, new: Page) -> dict[str, float]:
        """Percentiles and counts over the last minute, as far as it was seen; {} at first."""
        if self._pages and _began_anew(self._pages[-1][1], new):
            self._pages.clear()
        while len(self._pages) > 1 and now - self._pages[1][0] >= SPAN_SECONDS:
            self._pages.popleft()
        values: dict[str, float] = {}
        if self._pages:
            old = self._pages[0][1]
            for what, names in LATENCIES[self._kind].items():
                values |= _told(what, names, old, new)
            values |= _balancedness(old, new)
        self._pages.append((now, new))
        return values


def _told(what: str, names: tuple[str, ...], old: Page, new: Page) -> dict[str, float]:
    for name in names:
        if name not in new.buckets:
            continue
        before = old.buckets.get(name, {})
        grown = {edge: n - before.get(edge, 0.0) for edge, n in new.buckets[name].items()}
        values = {f"{what}_{p}": quantile(q, grown) for p, q in PERCENTILES.items()}
        known = {key: value for key, value in values.items() if not math.isnan(value)}
        return known | {f"{what}_count": max(grown.values(), default=0.0)}
    return {}


def _balancedness(old: Page, new: Page) -> dict[str, float]:
    def grown(suffix: str) -> float:
        name = BALANCEDNESS + suffix
        return new.sums.get(name, 0.0) - old.sums.get(name, 0.0)

    passes, total = grown("_count"), grown("_sum")
    if passes <= 0 or not 0 <= total <= passes * (1 + 1e-9):
        return {}
    return {"balancedness": min(total / passes, 1.0)}


def _began_anew(old: Page, new: Page) -> bool:
    for name, before in old.buckets.items():
        now = new.buckets.get(name, {})
        if any(now.get(edge, 0.0) < count for edge, count in before.items()):
            return True
    return any(new.sums.get(name, 0.0) < total for name, total in old.sums.items())


def heat_map(found: Page) -> tuple[list[int], list[list[float]]] | None:
    """-> (layers, [layer][GPU] assignments since the engine began); None where there are none.

    The bucket of edge g holds those of GPUs up to g; what is beyond the last GPU is none.
    """
    sizes = [sum(1 for e in buckets if math.isfinite(e)) for buckets in found.heat.values()]
    if not sizes or min(sizes) != max(sizes) or sizes[0] == 0:
        return None
    layers, rows = [], []
    for layer, buckets in sorted(found.heat.items()):
        counts = [buckets[edge] for edge in sorted(buckets) if math.isfinite(edge)]
        steps = [b - a for a, b in zip([0.0, *counts[:-1]], counts, strict=True)]
        if min(steps) < 0:
            return None
        layers.append(layer)
        rows.append(steps)
    return layers, rows
