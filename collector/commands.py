"""The commands beside `run`. What they need is imported when one is asked for: a collector that
analyses holds neither grpc nor rich in its memory."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lanterne.collector import ports_file as ports
from lanterne.collector.cli import this_version
from lanterne.collector.config import CollectorConfig
from lanterne.collector.engine_options import boot_id, engine_config
from lanterne.service.errors import CertificateError, LanterneError


def record(config: CollectorConfig, ports_file: Path | None, reload: Callable[[], None]) -> int:
    """Raises LanterneError. `reload`: what SIGHUP asks for."""
    from lanterne.collector import record_command
    from lanterne.collector.recording import Header

    def header() -> Header:
        return Header(
            boot_id=boot_id(),
            created_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
            version=this_version(),
            engine=asdict(engine_config(config)),
        )

    def started(port: int) -> None:
        if ports_file is not None:
            ports.write(ports_file, {"ingest": port})

    try:
        return record_command.record(config, header, started, reload)
    finally:
        if ports_file is not None:
            ports_file.unlink(missing_ok=True)


def dry_run(config: CollectorConfig, path: str | None, *, recording: bool) -> int:
    from lanterne.collector import dry_run

    return dry_run.run(config, path, recording=recording)


def offline(arguments: argparse.Namespace) -> int:
    from lanterne.collector import offline

    try:
        return offline.run(arguments)
    except LanterneError as error:
        print(f"lanterne-collector {arguments.command}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130


def top(arguments: argparse.Namespace) -> int:
    from lanterne.collector.client import client_of
    from lanterne.collector.top import FetchError, top

    # Ended like Ctrl-C, so that the terminal is left as it was found.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(AttributeError):  # a terminal without UTF-8 shows "?" for "…"
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return top(
            arguments.address,
            once=arguments.once,
            interval=arguments.interval,
            client=client_of(arguments),
        )
    except (FetchError, CertificateError) as error:
        print(f"lanterne-collector top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
