"""Scrapes the Prometheus endpoints of inference engines: the only file that parses their pages."""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from lanterne.agent.engine_metrics import Latency, Page, Sample, heat_map, page, wanted
from lanterne.agent.expert_counts import ExpertCounts, load
from lanterne.agent.expert_wire import Reading

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 3.0
PAGE_SECONDS = 6.0  # of a whole page
MAX_PAGE_BYTES = 16 << 20
MAX_KEPT_BYTES = 2 << 20  # of the lines that matter


@dataclass(frozen=True)
class Endpoint:
    """address: HOST:PORT, or an http URL with a path other than /metrics. kind: vllm or sglang."""

    address: str
    kind: str
    workload: str = ""


class Engine:
    """One endpoint; `poll` every few seconds."""

    def __init__(
        self,
        endpoint: Endpoint,
        counts: ExpertCounts,
        *,
        fetch: Callable[[str, tuple[bytes, ...]], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """counts: takes the load by GPU that SGLang tells."""
        self._endpoint = endpoint
        self._counts = counts
        self._latency = Latency(endpoint.kind)
        self._fetch = fetch or fetched
        self._clock = clock

    def poll(self) -> Reading | None:
        """What is new; None where nothing is. Raises OSError or ValueError."""
        kind, address = self._endpoint.kind, self._endpoint.address
        found = parse(self._fetch(address, wanted(kind)))
        heat = heat_map(found)
        if heat is not None:
            layers, rows = heat
            told = load(
                rows, layers=layers, source="sglang_heat_map", engine=kind, unit="rank",
                workload=self._endpoint.workload,
            )  # fmt: skip
            self._counts.add(told, cumulative=True)
        values = self._latency.add(self._clock(), found)
        if not values:
            return None
        return Reading(self._endpoint.workload, kind, address[:256], values)


def parse(text: bytes) -> Page:
    """Lines of the text format -> what matters of them. Raises ValueError."""
    samples: list[Sample] = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text.decode(errors="replace"))
        for sample in family.samples
    ]
    return page(samples)


def fetched(address: str, wanted_lines: tuple[bytes, ...]) -> bytes:
    """The lines of a page that begin with one of `wanted_lines`. Raises OSError."""
    url = urlsplit(address if "://" in address else f"http://{address}")
    connection = http.client.HTTPConnection(
        url.hostname or "", url.port or 80, timeout=TIMEOUT_SECONDS
    )
    end = time.monotonic() + PAGE_SECONDS
    try:
        connection.request(
            "GET", url.path.rstrip("/") or "/metrics", headers={"Accept": "text/plain"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"{address} answered {answer.status}")
        return _lines(answer, wanted_lines, end)
    except http.client.HTTPException as error:
        raise OSError(f"{address} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()


def _lines(answer: http.client.HTTPResponse, wanted_lines: tuple[bytes, ...], end: float) -> bytes:
    kept: list[bytes] = []
    read = size = 0
    rest = b""
    while chunk := answer.read1(1 << 16):
        read += len(chunk)
        if read > MAX_PAGE_BYTES or time.monotonic() > end:
            raise OSError(f"the page is larger than {MAX_PAGE_BYTES} bytes, or takes too long")
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > 1 << 16:
            raise OSError("the page has a line longer than 64 KiB")
        new = [line for line in lines if line.startswith(wanted_lines)]
        size += sum(map(len, new))
        if size > MAX_KEPT_BYTES:
            raise OSError(f"more than {MAX_KEPT_BYTES} bytes of histograms")
        kept += new
    if rest.startswith(wanted_lines):
        kept.append(rest)
    return b"\n".join(kept) + b"\n"
