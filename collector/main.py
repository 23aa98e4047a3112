"""lanterne-collector: command line, wiring, and the order of starting and stopping.

agents ── gRPC ─► Ingest (child process) ─► bounded outbox ─► Loop (one thread: Engine) ─► Snapshot
Snapshot ─► /metrics, JSON, /readyz (HTTP threads) ─► Prometheus, `top`
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# OpenBLAS would start a thread per core; such threads would keep the privileges that are given up.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from lanterne.collector import commands, ports_file
from lanterne.collector.admission_options import admission_options
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.cli import parser, this_version, with_command
from lanterne.collector.config import ENV_CONFIG, CollectorConfig, split_address
from lanterne.collector.engine_options import (
    boot_id,
    engine_config,
    record_options,
    shared_expert_ranks,
)
from lanterne.collector.errors import ConfigError, ListenError
from lanterne.collector.export import Exposition, families
from lanterne.collector.hang_log import HangLog
from lanterne.collector.http import App
from lanterne.collector.http_server import HttpServer
from lanterne.collector.intake import Intake
from lanterne.collector.loop import Loop
from lanterne.collector.readiness import ready, status
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.startup import LIVE, configure_log, drop_privileges, load_settings
from lanterne.collector.state import EXPERTS, StateFile, usable
from lanterne.service.errors import LanterneError
from lanterne.service.guard import Guard
from lanterne.service.reload import Reloader
from lanterne.service.systemd import Notifier

if TYPE_CHECKING:
    from lanterne.collector.otlp import Pusher

log = logging.getLogger("lanterne.collector")

SIGNAL_SECONDS = 0.5  # until a signal is noticed, at the latest


def run(argv: Sequence[str] | None = None) -> None:
    """The console script. Exit status: 0 done, 1 cannot work, 2 wrong usage or configuration."""
    sys.exit(main(sys.argv[1:] if argv is None else argv))


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(with_command(argv))
    if arguments.command == "top":
        return commands.top(arguments)
    if arguments.command in ("replay", "compare", "diagnose", "plan"):
        return commands.offline(arguments)
    path = arguments.config or os.environ.get(ENV_CONFIG) or None
    try:
        config = load_settings(arguments)
    except LanterneError as error:
        print(f"lanterne-collector: {error}", file=sys.stderr)
        return 2
    if arguments.check_config:
        print(f"{path or 'the default configuration'} is valid")
        return 0
    configure_log(config)
    drop_privileges(config)
    if arguments.dry_run:
        return commands.dry_run(config, path, recording=arguments.command == "record")
    reloader = Reloader(
        config,
        load=lambda: load_settings(arguments),
        apply=configure_log,
        live=LIVE,
        refused=ConfigError,
    )
    try:
        if arguments.command == "record":
            return commands.record(config, arguments.ports_file, reloader.reload)
        return Collector(config, reloader).run_until_signal(arguments.ports_file)
    except LanterneError as error:
        print(f"lanterne-collector: {error}", file=sys.stderr)
        return 1


class Collector:
    """All parts of one running collector."""

    def __init__(
        self, config: CollectorConfig, reloader: Reloader[CollectorConfig] | None = None
    ) -> None:
        self._config = config
        self._reloader = reloader
        self._notifier = Notifier()
        self._hangs = HangLog()
        analysis = config.analysis
        self._engine = Engine(
            engine_config(config),
            boot_id=boot_id(),
            shared_expert_ranks=shared_expert_ranks(config),
        )
        folder = usable(config.state.path)
        self._intake = Intake(
            limits={
                "batch_bytes": config.ingest.max_batch_bytes,
                "nodes": config.ingest.max_nodes,
                "items": config.ingest.queue_batches,
                "bytes": config.ingest.queue_bytes,
            },
            overloaded=self._engine.overloaded,
            record=record_options(config),
            admission=admission_options(config),
            state=folder,
        )
        self._guard = Guard(config.http.web_config)
        self._otlp = self._pusher()
        # Numbers of signals; 0 when the analysis has ended.
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._state = StateFile(folder and folder / EXPERTS)
        self._state.errors["unusable"] = int(bool(config.state.path) and folder is None)
        self._state.load(lambda items: self._engine.experts.restore(items, time.monotonic_ns()))
        self._loop = Loop(
            receive=self._intake.receive,
            apply=self._engine.apply,
            snapshot=self._snapshot,
            seconds=analysis.snapshot_seconds,
            ended=self._ended,
        )

    def _pusher(self) -> Pusher | None:
        """Raises ConfigError."""
        otlp = self._config.otlp
        if not otlp.endpoint:
            return None
        try:  # here: a collector that pushes nothing has no SDK in its memory, nor needs one
            from lanterne.collector.otlp import Pusher
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"otlp.endpoint needs the extra otlp ({error}): pip install 'lanterne[otlp]'"
            ) from error
        return Pusher(
            lambda: families(self._loop.latest(), self._runtime()),
            endpoint=otlp.endpoint,
            interval=otlp.interval_seconds,
            headers_file=otlp.headers_file,
            version=this_version(),
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
        self._intake.tell(self._engine.origins_news())
        if self._state.due(now, self._config.state.seconds):
            self._state.save(self._engine.experts.export(), now)
        self._hangs.tell(snapshot)
        self._notifier.alive()  # here: the thread that must get on is this one
        self._notifier.status(status(snapshot))
        return snapshot

    def _ended(self) -> None:
        """In the engine's thread, after the last snapshot."""
        try:
            now = time.time()
            self._engine.experts.close(now, time.monotonic_ns())
            self._state.save(self._engine.experts.export(), now)
        finally:
            self._asked.put(0)

    def run_until_signal(self, ports: Path | None) -> int:
        """Raises ListenError. Stops on SIGTERM or SIGINT; SIGHUP reloads the configuration."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._asked.put(number))
        http = self._listen_http()
        try:
            ingest_port = self._listen_ingest()
        except ListenError:
            http.stop()
            raise
        # Both sockets are bound: now it can only be stopped.
        try:
            self._start(http, ingest_port, ports)
            while (asked := self._next_asked()) == signal.SIGHUP:
                self._reload()
            if not asked:
                log.error("the ingest process has ended by itself: its own messages say why")
        finally:
            self._stop(http, ports)
        return 0 if asked else 1

    def _next_asked(self) -> int:
        while True:
            # A signal that comes just before the wait begins does not end it: handlers run between
            # two waits.
            with contextlib.suppress(queue.Empty):
                return self._asked.get(timeout=SIGNAL_SECONDS)

    def _reload(self) -> None:
        if self._reloader is None:
            return
        with self._notifier.reloading():
            self._reloader.reload()
        self._config = self._reloader.config
        self._loop.seconds = self._config.analysis.snapshot_seconds
        self._intake.log(self._config.log.level, self._config.log.format)

    def _listen_http(self) -> HttpServer:
        page = Exposition(self._loop.latest, self._runtime)
        app = App(
            latest=self._loop.latest,
            metrics=page.page,
            ready=self._ready,
            stalled=self._notifier.stalled,
        )
        host, port = split_address(self._config.http.address)
        http = self._config.http
        return HttpServer(
            app,
            host,
            port,
            threads=http.threads,
            timeout=http.timeout_seconds,
            guard=self._guard,
        )

    def _listen_ingest(self) -> int:
        try:
            return self._intake.listen(self._config.ingest.address)
        except ListenError as error:
            if not str(error).startswith("cannot listen"):
                raise
            raise ListenError(f"{error} Choose another address with --ingest-address") from error

    def _start(self, http: HttpServer, ingest_port: int, ports: Path | None) -> None:
        self._loop.start()
        self._intake.start()
        http.start()
        if self._otlp is not None:
            self._otlp.start()
        ingest_host = self._config.ingest.address.rpartition(":")[0]
        http_host = self._config.http.address.rpartition(":")[0]
        log.info("agents report to %s:%d (gRPC)", ingest_host, ingest_port)
        scheme = "https" if self._guard.encrypted else "http"
        log.info("metrics at %s://%s:%d/metrics", scheme, http_host, http.port)
        if ports is not None:
            ports_file.write(ports, {"ingest": ingest_port, "http": http.port})
        self._notifier.ready()

    def _stop(self, http: HttpServer, ports: Path | None) -> None:
        """First nothing comes in, then what came in is worked off, then nobody can look."""
        self._notifier.stopping()
        self._intake.stop()
        log.info("no longer listening for agents")
        self._loop.join()
        self._intake.close()
        self._state.close()
        log.info("analysis ended")
        if self._otlp is not None:
            self._otlp.stop()
        http.stop()
        if ports is not None:
            ports.unlink(missing_ok=True)
        log.info("stopped")

    def _runtime(self) -> Runtime:
        return Runtime(
            version=this_version(),
            queue_depth=self._intake.depth,
            engine_errors=self._loop.errors,
            state_errors={**self._state.counts(), **self._intake.journal_errors()},
            state_saved_at=self._state.saved_at,
            reload=None if self._reloader is None else self._reloader.state,
            http_refused=dict(self._guard.refused),
            otlp=None if self._otlp is None else dict(self._otlp.counts),
        )

    def _ready(self) -> Mapping[str, str]:
        return ready(
            serving=self._intake.serving,
            analysing=self._loop.alive,
            any_figures=self._loop.latest() is not None,
            age=self._loop.age,
            limit=self._config.http.stale_after_seconds,
        )
