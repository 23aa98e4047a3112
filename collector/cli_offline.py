"""The commands that work on recordings: texts and flags, nothing is done here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lanterne.collector import plans

FORMATS = ("recording", "straggler-analysis")

REPLAY_EPILOG = """\
formats:
  recording             made by `lanterne-collector record` or `run --record`;
                        FILE.1, FILE.2, ... are read before FILE
  straggler-analysis    operation traces in Parquet as published with ByteDance's
                        StragglerAnalysis (needs pyarrow: pip install 'lanterne[replay]')

The same recording gives the same output, byte for byte."""

DIAGNOSE_EPILOG = """\
exit status:
  0   nothing found that costs time
  1   could not look: no such file, nobody answers
  2   wrong usage
  3   at least one finding that costs time or threatens to"""


def add_recording_flags(start: argparse.ArgumentParser) -> None:
    """How large a recording may grow; of `run` and `record`."""
    start.add_argument(
        "--record-max-bytes", metavar="BYTES", help="then the file becomes FILE.1 (default: 1 GiB)"
    )
    start.add_argument(
        "--record-files", metavar="N", help="files kept, the newest included (default: 4)"
    )


def add_client_flags(asking: argparse.ArgumentParser) -> None:
    """Of the commands that ask a running collector: `top`, `diagnose` and `plan`."""
    asking.add_argument("--ca", metavar="FILE", default="", help="authority of its certificate")
    asking.add_argument(
        "--cert", metavar="FILE", default="", help="a certificate to show, if asked"
    )
    asking.add_argument("--key", metavar="FILE", default="", help="and its key")
    asking.add_argument("--user", metavar="NAME", default="", help="for a collector with passwords")
    asking.add_argument(
        "--password-file",
        metavar="FILE",
        default="",
        help="of that user (or the variable LANTERNE_PASSWORD)",
    )


def add_commands(commands: Any) -> None:
    """`commands`: what argparse's add_subparsers returned."""
    _add_replay(commands)
    _add_compare(commands)
    _add_diagnose(commands)
    _add_plan(commands)


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        description="Analyse a recording offline: the same analysis, faster than it happened.",
        epilog=REPLAY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.add_argument("file", metavar="FILE", type=Path)
    replay.add_argument(
        "--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s"
    )
    _add_outputs(replay)


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        description="Two recordings of the same requests, stage by stage: what really changed. "
        "Intervals are 95 %%, by bootstrap over windows.",
    )
    compare.add_argument("a", metavar="A", type=Path, help="the recording before")
    compare.add_argument("b", metavar="B", type=Path, help="and after the change")
    compare.add_argument("--workload", metavar="NAME", help="only this job (of both)")
    _add_outputs(compare)


def _add_diagnose(commands: Any) -> None:
    diagnose = commands.add_parser(
        "diagnose",
        description="What costs time, and what to try, in the order in which an expert would look: "
        "GPU memory, the time of each stage, assignment skew, bytes by domain.",
        epilog=DIAGNOSE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    diagnose.add_argument(
        "source",
        metavar="ADDRESS|FILE",
        nargs="?",
        default="127.0.0.1:9478",
        help="a running collector's HTTP address (default: %(default)s), or a recording",
    )
    add_client_flags(diagnose)
    diagnose.add_argument("--json", metavar="OUT", type=Path, help='findings as JSON ("-": stdout)')


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        description="The placement of experts that the collector advises, in the form an engine "
        "reads. Status 1 where the advice is to leave the experts where they are.",
    )
    plan.add_argument(
        "source",
        metavar="ADDRESS|FILE",
        nargs="?",
        default="127.0.0.1:9478",
        help="a running collector's HTTP address (default: %(default)s), or a recording",
    )
    add_client_flags(plan)
    plan.add_argument("--workload", metavar="NAME", help="needed where there are plans for several")
    plan.add_argument(
        "--format",
        choices=plans.FORMATS,
        default=plans.FORMATS[0],
        help="sglang: for --init-expert-location; vllm-ascend: for expert_map_path; npy: the "
        "physical-to-logical map as an array, which is how vLLM holds it (default: %(default)s)",
    )
    plan.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("-"), help="default: standard output"
    )


def _add_outputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="OUT", type=Path, help='figures as JSON ("-": stdout)')
    command.add_argument(
        "--html", metavar="OUT", type=Path, help="a page with plots that needs nothing else"
    )
    command.add_argument(
        "--text", action="store_true", help="print the text too, where another output is asked for"
    )
