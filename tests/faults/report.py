"""The table of docs/faults.md, from what `make test-faults JSON=faults.json` has measured.

.venv/bin/python -m tests.faults.report faults.json docs/faults.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: make test-faults -->", "<!-- end of figures -->"
COLUMNS = (
    "fault",
    "extent",
    "made",
    "delivered",
    "lost, by cause",
    "named again after",
    "memory",
    "open files",
)
HEAD = f"| {' | '.join(COLUMNS)} |"
LOST = (
    ("not_attached", "while no agent ran"),
    ("lost_in_kernel", "ring full"),
    ("lost_with_agent", "with the killed agent"),
    ("lost_damaged", "damaged on disk"),
)
# Test -> (fault, what its extent is, by key)
NAMES = {
    "random_kills": ("kill -9 at random", "{kills} kills"),
    "two_kills": ("kill -9 of an agent and the collector", "{kills} kills"),
    "network_cut": ("network cut", "{cut_seconds:.0f} s, {batches_waiting:.0f} batches waited"),
    "stopped_process[agent]": ("SIGSTOP of an agent", "{stopped_seconds:.0f} s"),
    "stopped_process[collector]": ("SIGSTOP of the collector", "{stopped_seconds:.0f} s"),
    "disk_full": ("spool's disk full", "{in_memory_batches:.0f} batches in memory"),
    "torn_spool": ("torn spool", "{damaged_batches} batches damaged"),
    "slow_disk": ("slow disk", "7 s a sync"),
    "collectors_disk_stalls": (
        "collector's disk stalls",
        "{stalled_seconds:.0f} s, {batches_waiting:.0f} batches waited",
    ),
    "clock_steps": ("clock stepped", "±1 h, agents and collector"),
    "strangers": ("strangers", "{connections} connections"),
    "slow_readers": ("slow readers of /metrics", "{readers} readers"),
    "malformed_and_oversized": ("malformed frames", "{frames} frames, {refused:.0f} refused"),
    "certificates_renewed_in_flight": ("certificates renewed", "both sides, new authority"),
}


def row(name: str, figures: Mapping[str, Any]) -> str:
    fault, extent = NAMES[name]
    made = figures.get("made", figures.get("operations", ""))
    delivered = figures.get("delivered", figures.get("operations", ""))
    lost = [f"{figures[key]} {text}" for key, text in LOST if figures.get(key)]
    cells = (
        fault,
        extent.format(**figures),
        f"{made}",
        f"{delivered}",
        ", ".join(lost) or "none",
        f"{figures['verdict_seconds']} s" if figures["verdict_seconds"] else "named all the while",
        _change(figures, "mb", " MB"),
        _change(figures, "fds", ""),
    )
    return f"| {' | '.join(cells)} |"


def _change(figures: Mapping[str, Any], key: str, unit: str) -> str:
    if "before" not in figures:
        return ""
    before, after = figures["before"], figures["after"]
    return ", ".join(
        f"{name} {before[name][key]:.0f} → {after[name][key]:.0f}{unit}"
        for name in after
        if name != "agent b"
    )


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [row(name, figures[name]) for name in NAMES if name in figures]
    return "\n".join([HEAD, "|" + "---|" * len(COLUMNS), *rows])


def main(arguments: list[str]) -> int:
    source, target = Path(arguments[0]), Path(arguments[1])
    text = target.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        print(f"{target}: has no lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    made = table(json.loads(source.read_text()))
    target.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
