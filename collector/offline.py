"""The commands on recordings and collectors: what to read, to make of it, where to write it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from lanterne.collector import (
    compare,
    diagnose,
    diagnose_report,
    plans,
    replay,
    replay_figures,
    replay_report,
    straggler_report,
    straggler_trace,
)
from lanterne.collector.client import client_of
from lanterne.collector.errors import PlanError, RecordingError
from lanterne.collector.replay_series import Series
from lanterne.collector.report import Document
from lanterne.collector.report_html import html
from lanterne.collector.report_text import text

STDOUT = Path("-")


def run(arguments: argparse.Namespace) -> int:
    """Exit status. Raises CollectorError."""
    if arguments.command == "replay":
        return _replay(arguments)
    if arguments.command == "compare":
        return _compare(arguments)
    if arguments.command == "plan":
        return _plan(arguments)
    return _diagnose(arguments)


def series_of(path: Path) -> tuple[replay.Source, Series]:
    """A whole recording, replayed. Raises RecordingError."""
    source, files = replay.open_recording(path)
    series = Series()
    for snapshot, at in replay.snapshots(source, files):
        series.observe(snapshot, at)
    return source, series


def _replay(arguments: argparse.Namespace) -> int:
    path: Path = arguments.file
    if arguments.format == "straggler-analysis":
        analysis = straggler_trace.analyse(path)
        figures = straggler_trace.as_json(analysis, path)
        document = straggler_report.document(analysis, path)
    else:
        source, series = series_of(path)
        figures = replay_figures.as_json(source, series)
        document = replay_report.document(source, series)
    write(arguments, figures, document)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    (source_a, a), (source_b, b) = series_of(arguments.a), series_of(arguments.b)
    sources = (source_a, source_b)
    found = compare.compare(a, b, arguments.workload)
    write(arguments, compare.as_json(sources, found), compare.document(sources, found))
    return 0


def _diagnose(arguments: argparse.Namespace) -> int:
    source: str = arguments.source
    series = _recorded(source)
    if series is not None:
        steps = diagnose.diagnose(*diagnose_report.of_recording(series))
        diagnose_report.earlier(series, steps)
        source = Path(source).name
    else:
        told = diagnose_report.of_collector(source, client_of(arguments))
        steps = diagnose.diagnose(*told)
    if arguments.json is not None:
        put(arguments.json, as_bytes(diagnose_report.as_json(steps, source)))
    if arguments.json != STDOUT:
        put(STDOUT, text(diagnose_report.document(steps, source)).encode())
    return diagnose_report.status(steps)


def _recorded(source: str) -> Series | None:
    """None where it is the address of a collector. Raises RecordingError."""
    path = Path(source)
    if path.is_file():
        return series_of(path)[1]
    if ":" not in source:
        raise RecordingError(f"{source}: neither a file nor an address such as 127.0.0.1:9478")
    return None


def _plan(arguments: argparse.Namespace) -> int:
    series = _recorded(arguments.source)
    if series is not None:
        _, _, told = diagnose_report.of_recording(series)
    else:
        (told,) = diagnose_report.ask(arguments.source, client_of(arguments), "advice")
    found = [
        a
        for a in told.get("advice", ())
        if a["plan"] and arguments.workload in (None, a["workload"])
    ]
    if not found:
        raise PlanError("; ".join(_why_none(told, arguments.workload)))
    if len(found) > 1:
        names = ", ".join(sorted(a["workload"] for a in found))
        raise PlanError(f"there are several plans: name one with --workload ({names})")
    put(arguments.out, plans.export(found[0]["plan"], arguments.format))
    return 0


def _why_none(told: dict[str, Any], workload: str | None) -> list[str]:
    why = [
        f"{a['workload']}: {a['text']} {a['reason']}"
        for a in told.get("advice", ())
        if a["kind"] == "nothing" and workload in (None, a["workload"])
    ]
    return why or ["no plan: no engine has told its expert load for long enough (docs/experts.md)"]


def write(arguments: argparse.Namespace, figures: object, document: Document) -> None:
    """What was asked for; text to the terminal where nothing was. Raises RecordingError."""
    if arguments.json is not None:
        put(arguments.json, as_bytes(figures))
    if arguments.html is not None:
        put(arguments.html, html(document).encode())
    if arguments.text or (arguments.json is None and arguments.html is None):
        put(STDOUT, text(document).encode())


def as_bytes(figures: object) -> bytes:
    """The same bytes for the same figures."""
    return msgspec.json.format(msgspec.json.encode(figures, order="sorted"), indent=1) + b"\n"


def put(path: Path, data: bytes) -> None:
    """Renamed into place: a reader never sees half of it. "-": standard output."""
    if path == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise RecordingError(
            f"{path}: cannot be written ({error.strerror}); name a file in a folder that exists "
            "and can be written"
        ) from error
