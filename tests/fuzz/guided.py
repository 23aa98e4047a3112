"""`make fuzz-guided`: the same readers under libFuzzer, which keeps what reaches new branches.

    .venv/bin/python -m tests.fuzz.guided elf --runs 1000000

Atheris instruments the bytecode of our modules. It is for whoever changes a reader: it wants many
inputs for one target, where `run` gives some to all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[2] / "build" / "atheris"


def left_alone(arguments: list[str]) -> list[str]:
    """Our modules that the target does not name as worth following; none if it names none. Asked in
    another process: here none of them may be imported yet. To instrument all of them takes minutes,
    and Atheris chooses by package, but for those that are excluded."""
    code = (
        "import sys; from tests.fuzz.targets import TARGETS;"
        "kept = {m for name in sys.argv[1:] if name in TARGETS for m in TARGETS[name].covered};"
        "ours = [m for m in sys.modules if m.startswith('lanterne.')];"
        "print(*(m for m in ours if kept and m not in kept))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return told.stdout.split()


def main() -> int:
    sys.path.insert(0, str(SITE))
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        print(f"atheris is not in {SITE}: run make fuzz-guided", file=sys.stderr)
        return 2
    ours = atheris.instrument_imports(include=["lanterne"], exclude=left_alone(sys.argv[1:]))
    with ours:
        from tests.fuzz.targets import TARGETS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--seconds", type=int, default=0, help="then it stops; 0: no bound")
    parser.add_argument("--keep", type=Path, help="folder of inputs that reach new branches")
    args = parser.parse_args()
    target = TARGETS[args.target]
    folder = args.keep or Path(tempfile.mkdtemp(prefix="lanterne-guided-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.corpus()):
        (folder / f"valid-{number}").write_bytes(data)
    read = target.make()

    def one(data: bytes) -> None:
        with contextlib.suppress(*target.declared):
            read(data)

    options = [f"-runs={args.runs}", f"-max_total_time={args.seconds}", "-timeout=30",
               "-rss_limit_mb=1024", "-max_len=65536"]  # fmt: skip
    where = f"-artifact_prefix={folder}/found-"
    atheris.Setup([sys.argv[0], *options, where, str(folder)], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
