"""The command line of lanterne-collector: texts and flags, nothing is done here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lanterne.collector.cli_offline import (
    add_client_flags,
    add_commands,
    add_recording_flags,
)
from lanterne.collector.config import ENV_CONFIG

SAMPLE = Path(__file__).with_name("lanterne-collector.toml")

DESCRIPTION = """\
Receives what lanterne-agent sees on every GPU node, works out which rank the
others wait for, and exports it to Prometheus."""

EPILOG = """\
commands:
  lanterne-collector [run]         receive and analyse (the default)
  lanterne-collector top           the worst ranks, live in this terminal
  lanterne-collector record FILE   only keep what agents send
  lanterne-collector replay FILE   analyse a recording offline
  lanterne-collector compare A B   two recordings: what really changed
  lanterne-collector diagnose      what costs time, and what to try
  lanterne-collector plan          the advised expert placement, for an engine
  lanterne-collector COMMAND -h    the options of one command

first steps:
  lanterne-collector               listens for agents on 0.0.0.0:4319,
                                   serves http://0.0.0.0:9478/metrics
  lanterne-agent                   on each node, as root; unless told otherwise
                                   it reports to 127.0.0.1:4319
  lanterne-collector top           who is everybody waiting for?

Every setting can be given in a TOML file (--config) or in the environment
(LANTERNE_COLLECTOR_<SECTION>_<KEY>). All of them, with their defaults:
{sample}"""


def with_command(argv: Sequence[str]) -> list[str]:
    """`run` is what is meant where no command is named."""
    if argv and (not argv[0].startswith("-") or argv[0] in ("-h", "--help", "--version")):
        return list(argv)  # a word that is no command is refused, with the list of those there are
    return ["run", *argv]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lanterne-collector",
        usage="lanterne-collector [COMMAND] [options]",
        description=DESCRIPTION,
        epilog=EPILOG.replace("{sample}", str(SAMPLE)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {this_version()}")
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="lanterne-collector"
    )
    start = commands.add_parser("run", description="Receive, analyse and serve until stopped.")
    _add_common(start)
    start.add_argument("--http-address", metavar="HOST:PORT", help="metrics, JSON and health pages")
    start.add_argument("--record", metavar="FILE", help="keep what agents send in FILE, for replay")
    keep = commands.add_parser("record", description="Only keep what agents send, until stopped.")
    keep.add_argument("record", metavar="FILE", help="where to; an older FILE becomes FILE.1")
    _add_common(keep)
    keep.set_defaults(http_address=None)
    add_commands(commands)
    watch = commands.add_parser("top", description="The worst ranks, live. Ctrl-C ends.")
    watch.add_argument(
        "--address",
        metavar="URL",
        default="127.0.0.1:9478",
        help="HTTP address of the collector (default: %(default)s)",
    )
    add_client_flags(watch)
    watch.add_argument("--once", action="store_true", help="print once and end")
    watch.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=1.0,
        help="time between updates (default: %(default)s)",
    )
    return top


def _add_common(start: argparse.ArgumentParser) -> None:
    """What `run` and `record` have in common."""
    start.add_argument(
        "--version", action="version", version=f"lanterne-collector {this_version()}"
    )
    start.add_argument("--config", metavar="FILE", help=f"TOML file (or the variable {ENV_CONFIG})")
    start.add_argument("--check-config", action="store_true", help="check the settings and end")
    start.add_argument(
        "--dry-run", action="store_true", help="check all that can be, say what would happen, end"
    )
    start.add_argument(
        "--ingest-address", metavar="HOST:PORT", help="where agents report to; port 0: a free one"
    )
    start.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    start.add_argument(
        "--ports-file", metavar="FILE", type=Path, help="write the ports in use there, as JSON"
    )
    add_recording_flags(start)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0.1 to 3600")
    return seconds


def flags(arguments: argparse.Namespace) -> Mapping[str, object]:
    given = {
        "ingest.address": arguments.ingest_address,
        "http.address": arguments.http_address,
        "log.level": arguments.log_level,
        "record.path": arguments.record,
        "record.max_bytes": arguments.record_max_bytes,
        "record.files": arguments.record_files,
    }
    return {key: value for key, value in given.items() if value is not None}


def this_version() -> str:
    try:
        return version("lanterne")
    except PackageNotFoundError:
        return "unknown"
