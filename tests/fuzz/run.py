"""`make fuzz`: damaged inputs for everything that reads what others have written.

    .venv/bin/python -m tests.fuzz.run --inputs 1000000
    .venv/bin/python -m tests.fuzz.run --only elf,usdt --inputs 200000 --seed 7

A finding is an exception that the reader does not declare, a crash, an input that takes more than
ten seconds of CPU, or memory beyond the bound. Its input is kept in the folder; the exit status is
1 then.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import HEAD, SHARED_BYTES

HANG_CPU_SECONDS = 10.0  # for one input
HANG_WALL_SECONDS = 300.0  # blocked, or on a machine that has no time for us
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    tallies: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(int(one["inputs"]) for one in self.tallies)


def fuzz(
    names: Sequence[str],
    *,
    inputs: int,
    seconds: float = 0.0,
    seed: int = 1,
    folder: Path,
    hang_seconds: float = HANG_CPU_SECONDS,
) -> Outcome:
    """`inputs` damaged inputs for each target, or as many as fit in so many CPU seconds each."""
    outcome = Outcome()
    left = list(names)
    while left:
        worker = _Worker(left, inputs, seconds, seed, folder, hang_seconds)
        done = worker.run(outcome)
        left = left[done:]
        if left:  # it died or hung in the first that is left: the rest still gets its turn
            outcome.findings.append(worker.death(left[0]))
            left = left[1:]
    return outcome


class _Worker:
    def __init__(
        self,
        names: Sequence[str],
        inputs: int,
        seconds: float,
        seed: int,
        folder: Path,
        hang_seconds: float,
    ) -> None:
        self._folder = folder
        self._hang_seconds = hang_seconds
        self._shared_path = folder / f"shared-{os.getpid()}"
        self._shared_path.write_bytes(b"\0" * SHARED_BYTES)
        with self._shared_path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), SHARED_BYTES)
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.worker",
            *names,
            f"--inputs={inputs}",
            f"--seconds={seconds}",
            f"--seed={seed}",
            f"--shared={self._shared_path}",
            f"--folder={folder}",
        ]
        self._errors = (folder / "worker.log").open("ab")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            text=True,
            env=dict(os.environ) | {"OPENBLAS_NUM_THREADS": "1"},
        )
        self._hung = ""

    def run(self, outcome: Outcome) -> int:
        """Until it ends, one way or the other; -> how many targets it has finished."""
        watchdog = threading.Thread(target=self._watch, daemon=True)
        watchdog.start()
        done = 0
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "finding" in told:
                outcome.findings.append(told)
            else:
                outcome.tallies.append(told)
                done += 1
        self._process.wait()
        self._process.stdout.close()
        watchdog.join()
        self._errors.close()
        self._shared_path.unlink()
        return done

    def _watch(self) -> None:
        at, cpu, wall = (-1, -1), 0.0, 0.0
        while self._process.poll() is None:
            count, number, _ = HEAD.unpack_from(self._shared)
            now_cpu, now_wall = _cpu_seconds(self._process.pid), time.monotonic()
            if (count, number) != at or count == 0:
                at, cpu, wall = (count, number), now_cpu, now_wall
            elif now_cpu - cpu > self._hang_seconds or now_wall - wall > HANG_WALL_SECONDS:
                self._hung = f"one input took {now_cpu - cpu:.0f} s of CPU"
                self._process.kill()
                return
            time.sleep(0.2)

    def death(self, name: str) -> dict[str, Any]:
        count, _, length = HEAD.unpack_from(self._shared)
        path = self._folder / f"{name}-death.bin"
        path.write_bytes(self._shared[HEAD.size : HEAD.size + length])
        why = self._hung or f"the process ended with {self._process.returncode}"
        return {"finding": why, "target": name, "at": count, "input": str(path)}


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _show(outcome: Outcome) -> None:
    row = "{:<16} {:>9} {:>9} {:>9} {:>6} {:>8} {:>9} {:>7} {:>4}"
    print(
        row.format(
            "target",
            "inputs",
            "accepted",
            "refused",
            "ways",
            "CPU s",
            "slowest ms",
            "MB more",
            "bad",
        )
    )
    for t in outcome.tallies:
        print(
            row.format(
                t["target"],
                t["inputs"],
                t["accepted"],
                t["refused"],
                t["ways"],
                t["seconds"],
                round(t["slowest_seconds"] * 1e3, 1),
                t["memory_bytes"] >> 20,
                t["findings"],
            )
        )
    for one in outcome.findings:
        print(
            f"FINDING {one['target']}: {one['finding']}: {one.get('error', '')}\n"
            f"  input: {one['input']}"
        )
        print("".join(one.get("trace", ())), end="")
    print(f"{outcome.inputs} inputs, {len(outcome.findings)} findings")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--only", default="", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for inputs that led to findings")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="lanterne-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcome = fuzz(names, inputs=-(-args.inputs // len(names)), seed=args.seed, folder=folder)
    _show(outcome)
    if args.json:
        figures = {
            "inputs": outcome.inputs,
            "findings": outcome.findings,
            "targets": outcome.tallies,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
