"""Runs in the guest: the tests, then `lanterne-agent doctor` under conditions that hosts have.

Writes junit.xml, conditions.json and guest.json into the folder it is given.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCTOR = [
    sys.executable, "-c",
    f"import sys; sys.path.insert(0, {str(HERE)!r}); import patience; patience.loader();"
    "from lanterne.agent.main import run; run()",
    "doctor", "--json",
]  # fmt: skip


def say(text: str) -> None:
    print(f"lanterne-vm: {text}", flush=True)


def pytest(results: Path) -> int:
    """The paths and options of tests/vm/selection, one an argument, as the host has written it."""
    selection = (HERE.parent / "selection").read_text().splitlines()
    command = [
        sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider",
        "-p", "patience", "-o", "junit_logging=system-out", f"--junitxml={results}/junit.xml",
        *selection,
    ]  # fmt: skip
    path = f"{HERE}:{os.environ['PYTHONPATH']}"
    asked = json.loads((HERE.parent / "environment").read_text())
    environment = os.environ | asked | {
        "LANTERNE_REQUIRE_KERNEL": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path,
    }  # fmt: skip
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    results = Path(sys.argv[1])
    facts: dict[str, object] = {
        "release": platform.release(),
        "machine": platform.machine(),
        "page_bytes": os.sysconf("SC_PAGESIZE"),
        "cpus": os.cpu_count(),
        "btf": Path("/sys/kernel/btf/vmlinux").exists(),
    }
    say(" ".join(f"{key}={value}" for key, value in facts.items()))
    began = time.monotonic()
    facts["pytest"] = pytest(results)
    facts["pytest_seconds"] = round(time.monotonic() - began)
    (results / "guest.json").write_text(json.dumps(facts, indent=2))
    named = HERE.parent / "with-doctor"
    if named.exists():
        sys.path.insert(0, str(HERE))
        import conditions

        found = conditions.check_all(DOCTOR, results, say, named.read_text())
        (results / "conditions.json").write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
