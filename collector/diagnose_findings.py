"""What the steps of `diagnose` return, and how they write numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]

SEVERITIES = ("critical", "warning", "notice")
STEPS = ("memory", "clocks", "stages", "skew", "bytes", "advice", "visibility")


@dataclass(frozen=True)
class Finding:
    step: str  # one of STEPS
    severity: str  # one of SEVERITIES
    title: str
    evidence: tuple[str, ...]
    try_: tuple[str, ...]
    cost: float = 0.0  # share of time that it costs, as far as known


@dataclass
class Looked:
    """What became of one step."""

    step: str
    findings: list[Finding] = field(default_factory=list)
    seen: str = ""  # what was looked at
    unknown: str = ""  # why it could not be looked at


def ranked(steps: Sequence[Looked]) -> list[Finding]:
    """All findings, the gravest and costliest first."""
    found = [f for step in steps for f in step.findings]
    return sorted(
        found, key=lambda f: (SEVERITIES.index(f.severity), -f.cost, STEPS.index(f.step), f.title)
    )


def gpu_name(snapshot: Json, gpu: Json) -> str:
    return f"GPU {gpu['index']} of {snapshot['nodes'][gpu['node']]['name']}"


def where(snapshot: Json, row: Json) -> str:
    node = f" on {snapshot['nodes'][row['node']]['name']}" if row["node"] >= 0 else ""
    return node + (f", GPU {row['gpu']}" if row["gpu"] else "")


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def gib(value: float) -> str:
    return f"{value / (1 << 30):.1f} GiB"
