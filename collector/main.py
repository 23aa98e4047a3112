"""lanterne-collector: command line, wiring, and the order of starting and stopping.

agents ── gRPC ─► Ingest (child process) ─► bounded outbox ─► Loop (one thread: Engine) ─► Snapshot
Snapshot ─► /metrics, JSON, /readyz (HTTP threads) ─► Prometheus, `top`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.cli import flags, parser, this_version, with_command
from lanterne.collector.config import ENV_CONFIG, CollectorConfig, load, split_address
from lanterne.collector.errors import CollectorError, ConfigError, ListenError
from lanterne.collector.export import Exposition
from lanterne.collector.http import App, HttpServer
from lanterne.collector.intake import Intake
from lanterne.collector.loop import Loop
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot

log = logging.getLogger("lanterne.collector")


def run(argv: Sequence[str] | None = None) -> None:
    """The console script. Exit status: 0 done, 1 cannot work, 2 wrong usage or configuration."""
    sys.exit(main(sys.argv[1:] if argv is None else argv))


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_command(argv))
    if arguments.command == "top":
        return _top(arguments)
    try:
        path = arguments.config or os.environ.get(ENV_CONFIG) or None
        config = load(Path(path) if path else None, os.environ, flags(arguments))
    except CollectorError as error:
        print(f"lanterne-collector: {error}", file=sys.stderr)
        return 2
    if arguments.check_config:
        print(f"{path or 'the default configuration'} is valid")
        return 0
    logging.basicConfig(
        level=config.log.level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        return Collector(config).run_until_signal(arguments.ports_file)
    except CollectorError as error:
        print(f"lanterne-collector: {error}", file=sys.stderr)
        return 1


class Collector:
    """All parts of one running collector."""

    def __init__(self, config: CollectorConfig) -> None:
        self._config = config
        analysis = config.analysis
        self._engine = Engine(
            EngineConfig(
                window_seconds=analysis.window_seconds,
                deadline_seconds=analysis.deadline_seconds,
                idle_seconds=analysis.idle_seconds,
                ended_seconds=analysis.ended_seconds,
                nodes=config.ingest.max_nodes,
                min_gain_share=analysis.min_gain_share,
            ),
            boot_id=_boot_id(),
        )
        self._intake = Intake(
            limits={
                "batch_bytes": config.ingest.max_batch_bytes,
                "nodes": config.ingest.max_nodes,
                "items": config.ingest.queue_batches,
                "bytes": config.ingest.queue_bytes,
            },
            overloaded=self._engine.overloaded,
        )
        self._stop_asked = threading.Event()
        self._loop = Loop(
            receive=self._intake.receive,
            apply=self._engine.apply,
            snapshot=self._snapshot,
            seconds=analysis.snapshot_seconds,
            ended=self._stop_asked.set,
        )

    def _snapshot(self, now: float) -> Snapshot:
        snapshot = self._engine.snapshot(
            now,
            now_ns=time.monotonic_ns(),
            ingest=self._intake.counts(),
            refused=self._intake.refused(),
            connected=self._intake.connected(),
        )
        self._intake.ask(self._engine.stride)
        return snapshot

    def run_until_signal(self, ports_file: Path | None) -> int:
        """Raises ListenError. Stops on SIGTERM or SIGINT."""
        stop = self._stop_asked
        asked: list[int] = []

        def ask(number: int, _: object) -> None:
            asked.append(number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask)
        http = self._listen_http()
        try:
            ingest_port = self._listen_ingest()
        except ListenError:
            http.stop()
            raise
        # Both sockets are bound: now it can only be stopped.
        try:
            self._start(http, ingest_port, ports_file)
            stop.wait()
            if not asked:
                log.error("the ingest process has ended by itself: its own messages say why")
        finally:
            self._stop(http, ports_file)
        return 0 if asked else 1

    def _listen_http(self) -> HttpServer:
        page = Exposition(self._loop.latest, self._runtime)
        app = App(latest=self._loop.latest, metrics=page.page, ready=self._ready)
        host, port = split_address(self._config.http.address)
        http = self._config.http
        return HttpServer(app, host, port, threads=http.threads, timeout=http.timeout_seconds)

    def _listen_ingest(self) -> int:
        try:
            return self._intake.listen(self._config.ingest.address)
        except ListenError as error:
            raise ListenError(f"{error} Choose another address with --ingest-address") from error

    def _start(self, http: HttpServer, ingest_port: int, ports_file: Path | None) -> None:
        self._loop.start()
        self._intake.start()
        http.start()
        ingest_host = self._config.ingest.address.rpartition(":")[0]
        http_host = self._config.http.address.rpartition(":")[0]
        log.info("agents report to %s:%d (gRPC)", ingest_host, ingest_port)
        log.info("metrics at http://%s:%d/metrics", http_host, http.port)
        if ports_file is not None:
            _write_ports(ports_file, {"ingest": ingest_port, "http": http.port})

    def _stop(self, http: HttpServer, ports_file: Path | None) -> None:
        """First nothing comes in, then what came in is worked off, then nobody can look."""
        self._intake.stop()
        log.info("no longer listening for agents")
        self._loop.join()
        self._intake.close()
        log.info("analysis ended")
        http.stop()
        if ports_file is not None:
            ports_file.unlink(missing_ok=True)
        log.info("stopped")

    def _runtime(self) -> Runtime:
        return Runtime(
            version=this_version(), queue_depth=self._intake.depth, engine_errors=self._loop.errors
        )

    def _ready(self) -> Mapping[str, str]:
        latest = self._loop.latest()
        limit = self._config.http.stale_after_seconds
        age = float("inf") if latest is None else time.time() - latest.taken_at
        return {
            "grpc": "" if self._intake.serving else "not listening for agents",
            "engine": "" if self._loop.alive else "the analysis has ended: see the log",
            "snapshot": ""
            if age <= limit
            else "none yet"
            if latest is None
            else f"{age:.0f} s old, the limit is {limit:g} s",
        }


def _write_ports(path: Path, ports: Mapping[str, int]) -> None:
    """Renamed into place, so that a reader never sees half of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(ports) + "\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--ports-file {path}: cannot be written ({error.strerror}); name a file in a folder "
            "that exists and can be written"
        ) from error


def _boot_id() -> str:
    """This boot of this machine: an agent that reports the same shares our CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _top(arguments: argparse.Namespace) -> int:
    # Here, so that a collector does not carry rich in its memory.
    from lanterne.collector.top import FetchError, top

    # Ended like Ctrl-C, so that the terminal is left as it was found.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(AttributeError):  # a terminal without UTF-8 shows "?" for "…"
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return top(arguments.address, once=arguments.once, interval=arguments.interval)
    except FetchError as error:
        print(f"lanterne-collector top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
