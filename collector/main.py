"""lanterne-collector: command line, wiring, and the order of starting and stopping.

agents ── gRPC ─► Ingest (threads) ─► bounded queue ─► Loop (one thread: Engine) ─► Snapshot
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lanterne.collector.analyse.engine import Engine, EngineConfig
from lanterne.collector.config import ENV_CONFIG, CollectorConfig, load, split_address
from lanterne.collector.errors import CollectorError
from lanterne.collector.export import Exposition
from lanterne.collector.http import App, HttpServer
from lanterne.collector.ingest import Ingest
from lanterne.collector.loop import Loop
from lanterne.collector.series_nodes import Runtime
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.top import FetchError, top

log = logging.getLogger("lanterne.collector")

DESCRIPTION = """\
Receives what lanterne-agent sees on every GPU node, works out which rank the others
wait for, and exports it to Prometheus."""

EPILOG = """\
commands:
  lanterne-collector [run]         receive and analyse (the default)
  lanterne-collector top           the worst ranks, live in this terminal
  lanterne-collector COMMAND -h    the options of one command

first steps:
  lanterne-collector               listens for agents on 0.0.0.0:4319,
                                   serves http://0.0.0.0:9478/metrics
  lanterne-agent                   on each node, as root; it reports to 127.0.0.1:4319
                                   unless told otherwise
  lanterne-collector top           who is everybody waiting for?

Every setting can also be given in a TOML file (--config) or in the environment
(LANTERNE_COLLECTOR_<SECTION>_<KEY>); lanterne-collector.toml in the package shows them all."""


def run(argv: Sequence[str] | None = None) -> None:
    """The console script. Exit status: 0 done, 1 cannot work, 2 wrong usage or configuration."""
    sys.exit(main(sys.argv[1:] if argv is None else argv))


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(_with_command(argv))
    if arguments.command == "top":
        return _top(arguments)
    try:
        path = arguments.config or os.environ.get(ENV_CONFIG) or None
        config = load(Path(path) if path else None, os.environ, _flags(arguments))
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


def _with_command(argv: Sequence[str]) -> list[str]:
    """`run` is what is meant where no command is named."""
    if argv and argv[0] in ("run", "top", "-h", "--help", "--version"):
        return list(argv)
    return ["run", *argv]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lanterne-collector",
        usage="lanterne-collector [run | top] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS)
    start = commands.add_parser("run", description="Receive, analyse and serve until stopped.")
    start.add_argument("--version", action="version", version=f"lanterne-collector {_version()}")
    start.add_argument("--config", metavar="FILE", help=f"TOML file (or the variable {ENV_CONFIG})")
    start.add_argument("--check-config", action="store_true", help="check the settings and end")
    start.add_argument(
        "--ingest-address", metavar="HOST:PORT", help="where agents report to; port 0: a free one"
    )
    start.add_argument("--http-address", metavar="HOST:PORT", help="metrics, JSON and health pages")
    start.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    start.add_argument(
        "--ports-file", metavar="FILE", type=Path, help="write the ports in use there, as JSON"
    )
    watch = commands.add_parser("top", description="The worst ranks, live. Ctrl-C ends.")
    watch.add_argument(
        "--address",
        metavar="URL",
        default="127.0.0.1:9478",
        help="HTTP address of the collector (default: %(default)s)",
    )
    watch.add_argument("--once", action="store_true", help="print once and end")
    watch.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=1.0,
        help="time between updates (default: %(default)s)",
    )
    return parser


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0.1 to 3600")
    return seconds


def _flags(arguments: argparse.Namespace) -> Mapping[str, object]:
    given = {
        "ingest.address": arguments.ingest_address,
        "http.address": arguments.http_address,
        "log.level": arguments.log_level,
    }
    return {key: value for key, value in given.items() if value is not None}


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
            ),
            boot_id=_boot_id(),
        )
        self._loop = Loop(
            apply=self._engine.apply,
            snapshot=self._snapshot,
            depth=config.ingest.queue_batches,
            seconds=analysis.snapshot_seconds,
        )
        self._ingest = Ingest(on_batch=self._loop.offer)

    def _snapshot(self, now: float) -> Snapshot:
        return self._engine.snapshot(now, now_ns=time.monotonic_ns())

    def run_until_signal(self, ports_file: Path | None) -> int:
        """Raises ListenError. Stops on SIGTERM or SIGINT."""
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        http = self._listen_http()
        try:
            self._start(http, ports_file)
            stop.wait()
        finally:
            self._stop(http, ports_file)
        return 0

    def _listen_http(self) -> HttpServer:
        page = Exposition(self._loop.latest, self._runtime)
        app = App(latest=self._loop.latest, metrics=page.page, ready=self._ready)
        host, port = split_address(self._config.http.address)
        http = self._config.http
        return HttpServer(app, host, port, threads=http.threads, timeout=http.timeout_seconds)

    def _start(self, http: HttpServer, ports_file: Path | None) -> None:
        # Both sockets are bound before anything runs: a port in use ends it at once.
        ingest_port = self._ingest.listen(self._config.ingest.address)
        self._loop.start()
        self._ingest.start()
        http.start()
        ingest_host, _ = split_address(self._config.ingest.address)
        http_host, _ = split_address(self._config.http.address)
        log.info("agents report to %s:%d (gRPC)", ingest_host, ingest_port)
        log.info("metrics at http://%s:%d/metrics", http_host, http.port)
        if ports_file is not None:
            # Renamed into place, so that a reader never sees half of it.
            part = ports_file.with_name(ports_file.name + ".part")
            part.write_text(json.dumps({"ingest": ingest_port, "http": http.port}) + "\n")
            part.replace(ports_file)

    def _stop(self, http: HttpServer, ports_file: Path | None) -> None:
        """First nothing comes in, then what came in is worked off, then nobody can look."""
        log.info("stopping")
        self._ingest.stop()
        log.info("no longer listening for agents")
        self._loop.stop()
        log.info("analysis ended")
        http.stop()
        if ports_file is not None:
            ports_file.unlink(missing_ok=True)
        log.info("stopped")

    def _runtime(self) -> Runtime:
        return Runtime(
            version=_version(), queue_depth=self._loop.depth, engine_errors=self._loop.errors
        )

    def _ready(self) -> Mapping[str, str]:
        latest = self._loop.latest()
        limit = self._config.http.stale_after_seconds
        age = float("inf") if latest is None else time.time() - latest.taken_at
        return {
            "grpc": "" if self._ingest.serving else "not listening for agents",
            "engine": "" if self._loop.alive else "the analysis has ended: see the log",
            "snapshot": ""
            if age <= limit
            else "none yet"
            if latest is None
            else f"{age:.0f} s old, the limit is {limit:g} s",
        }


def _boot_id() -> str:
    """This boot of this machine: an agent that reports the same shares our CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _top(arguments: argparse.Namespace) -> int:
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


def _version() -> str:
    try:
        return version("lanterne")
    except PackageNotFoundError:
        return "unknown"
