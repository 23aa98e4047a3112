"""The same metrics pushed as OTLP over HTTP, at an interval, beside /metrics.

Nothing waits in a queue: an export takes what is known at that moment, and while one is under way
none begins. What an endpoint that is slow or gone costs is this thread, and nothing else.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from lanterne.collector.metrics import Family
from lanterne.collector.otlp_data import parts

log = logging.getLogger(__name__)

POINTS = 5_000  # of one request: below 2 MB, where a receiver's limit may be 4
TIMEOUT_SECONDS = 10.0  # of one request, its retries included
STOP_SECONDS = 2.0
HEADERS_BYTES = 65_536
MESSAGE_CHARACTERS = 400


class _FirstMessage(logging.Handler):
    """What the SDK says of a failure, which it only logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """The first of an export has the cause; those after it say that it did not go away."""
        if not self.text:
            self.text = record.getMessage()[:MESSAGE_CHARACTERS]


class Pusher:
    """Exports `collect()` to `endpoint` every `interval` seconds, from start to stop.

    headers_file: a file of lines "Name: value", such as an authorisation, read again before each
    export; "": none. `counts`: exports by status, sent or failed. An export of several requests
    has failed when one of them has; those before it have arrived.
    """

    def __init__(
        self,
        collect: Callable[[], Iterable[Family]],
        *,
        endpoint: str,
        interval: float,
        headers_file: str,
        version: str,
    ) -> None:
        self._collect = collect
        self._endpoint, self._interval = endpoint, interval
        self._headers_file = headers_file
        self._resource = Resource.create(
            {
                "service.name": "lanterne-collector",
                "service.version": version,
                "service.instance.id": socket.gethostname(),
            }
        )
        self._scope = InstrumentationScope("lanterne.collector", version)
        self._since_ns = time.time_ns()
        self._exporter: OTLPMetricExporter | None = None
        self._headers: dict[str, str] | None = None
        self._said = _FirstMessage()
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self.counts = {"failed": 0, "sent": 0}
        sdk = logging.getLogger("opentelemetry")
        sdk.addHandler(self._said)
        sdk.propagate = False  # one line of ours, not one of theirs for every attempt
        logging.getLogger("urllib3").setLevel(logging.ERROR)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends an export that is under way, too."""
        self._closing.set()
        exporter = self._exporter
        if exporter is not None:
            exporter.shutdown()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        logging.getLogger("opentelemetry").removeHandler(self._said)

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            self._said.text = ""
            try:
                problem = self._push()
            except Exception as error:  # whatever the SDK does, the collector goes on
                problem = f"{type(error).__name__}: {error}"
            if not self._closing.is_set():
                self._tell(problem)

    def _tell(self, problem: str) -> None:
        self.counts["failed" if problem else "sent"] += 1
        if problem and not self._failing:
            log.warning("OTLP export to %s fails: %s", self._endpoint, problem)
        elif self._failing and not problem:
            log.info("OTLP export to %s works again", self._endpoint)
        self._failing = bool(problem)

    def _push(self) -> str:
        """ "" when all has been sent, else what is wrong."""
        exporter = self._ready()
        for part in parts(
            self._collect(),
            resource=self._resource,
            scope=self._scope,
            since_ns=self._since_ns,
            at_ns=time.time_ns(),
            points=POINTS,
        ):
            if exporter.export(part) is not MetricExportResult.SUCCESS:
                return self._said.text or "the endpoint did not take it"
        return ""

    def _ready(self) -> OTLPMetricExporter:
        """The exporter, made anew where the headers have changed."""
        headers = _read_headers(self._headers_file)
        if self._exporter is None or headers != self._headers:
            if self._exporter is not None:
                self._exporter.shutdown()
            self._headers = headers
            self._exporter = OTLPMetricExporter(
                endpoint=self._endpoint,
                headers=headers,
                timeout=min(TIMEOUT_SECONDS, self._interval),
                compression=Compression.Gzip,
            )
        return self._exporter


def _read_headers(path: str) -> dict[str, str]:
    """Raises OSError, or ValueError that names the line and not what it holds: it is a secret."""
    if not path:
        return {}
    with Path(path).open("rb") as file:
        text = file.read(HEADERS_BYTES).decode()
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ValueError(f'{path}: line {number} is not "Name: value"')
        found[name.strip()] = value.strip()
    return found
