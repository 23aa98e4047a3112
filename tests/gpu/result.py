"""What one check found, and the report made of all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
STATUSES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Result:
    """`numbers`: plain JSON values; their meaning stands in docs/gpu-check.md."""

    status: str
    detail: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def passed(detail: str, **numbers: Any) -> Result:
    return Result("passed", detail, numbers)


def failed(detail: str, **numbers: Any) -> Result:
    return Result("failed", detail, numbers)


def skipped(detail: str, **numbers: Any) -> Result:
    return Result("skipped", detail, numbers)


def judged(problems: list[str], detail: str, **numbers: Any) -> Result:
    """Passed with `detail` where there are no problems."""
    return failed("; ".join(problems), **numbers) if problems else passed(detail, **numbers)


class Report:
    """Runs checks one after the other; one that breaks is a failed check, not the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = time.monotonic()
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.host: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []

    def run(self, name: str, check: Callable[[], Result]) -> Result:
        began = time.monotonic()
        try:
            result = check()
        except Exception as error:  # whatever breaks in one check, the others still tell something
            result = failed(f"{type(error).__name__}: {error}")
        seconds = round(time.monotonic() - began, 2)
        self.checks.append({"name": name, **asdict(result), "seconds": seconds})
        self._say(f"{result.status:<8}{name:<16}{result.detail.splitlines()[0][:200]}")
        return result

    @property
    def passed(self) -> bool:
        """Every check that could run has passed, and at least one could."""
        states = [check["status"] for check in self.checks]
        return "failed" not in states and "passed" in states

    def write(self, path: Path) -> None:
        document = {
            "schema": SCHEMA,
            "started": self._started,
            "seconds": round(time.monotonic() - self._began, 1),
            "passed": self.passed,
            "host": self.host,
            "checks": self.checks,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
