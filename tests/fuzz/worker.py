"""The process that fuzzes: bounded in memory, watched by `run`, and expected to die.

The input at hand stands in memory shared with the parent, so that it is there after a crash or a
hang. What the readers raise beyond their declared errors is told on standard output, line by line.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import re
import resource
import struct
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.mutate import MAX_BYTES
from tests.fuzz.planted import PLANTED
from tests.fuzz.targets import TARGETS, Target

HEAD = struct.Struct("<QIQ")  # input of the target, number of the target, length
SHARED_BYTES = HEAD.size + 2 * MAX_BYTES
ROOM = 384 << 20  # bytes that a reader may ask for beyond what the process has
MOST_KEPT = 512  # inputs that led somewhere new, of one target
MOST_FINDINGS = 8  # different ones of one target
_WORDS = re.compile(r"0x[0-9a-fA-F]+|\d+|'[^']*'|\"[^\"]*\"|b'[^']*'")


@dataclass
class Tally:
    target: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    ways: int = 0  # different refusals
    seconds: float = 0.0  # CPU
    slowest_seconds: float = 0.0
    memory_bytes: int = 0  # by which the process's peak grew
    findings: int = 0


class Fuzzer:
    def __init__(self, name: str, number: int, shared: mmap.mmap, folder: Path, seed: int) -> None:
        self._target: Target = (TARGETS | PLANTED)[name]
        self._number = number
        self._shared = shared
        self._folder = folder
        self._rng = random.Random(f"{seed}:{name}")
        self._valid = list(self._target.corpus())
        self._learned: list[bytes] = []
        self._read = self._target.make()
        self._seen: set[str] = set()
        self._found: set[str] = set()
        self.tally = Tally(name)

    def run(self, inputs: int, seconds: float) -> None:
        before = _peak()
        began = time.process_time()
        for valid in self._valid:
            self._one(valid)
        while self.tally.inputs < inputs and len(self._found) < MOST_FINDINGS:
            if seconds and time.process_time() - began > seconds:
                break
            # What has been refused once is mostly refused again at the same place.
            from_learned = self._learned and self._rng.random() < 0.3
            base = self._rng.choice(self._learned if from_learned else self._valid)
            self._one(self._target.mutator(self._rng, base, self._valid))
        self.tally.seconds = round(time.process_time() - began, 2)
        self.tally.memory_bytes = max(0, _peak() - before)
        self.tally.ways = len(self._seen)

    def _one(self, data: bytes) -> None:
        data = data[: 2 * MAX_BYTES]
        self.tally.inputs += 1
        HEAD.pack_into(self._shared, 0, self.tally.inputs, self._number, len(data))
        self._shared[HEAD.size : HEAD.size + len(data)] = data
        began = time.process_time()
        try:
            self._read(data)
        except self._target.declared as error:
            self.tally.refused += 1
            self._learn(data, error)
        except BaseException as error:
            self._finding(data, error)
        else:
            self.tally.accepted += 1
        took = time.process_time() - began
        self.tally.slowest_seconds = max(self.tally.slowest_seconds, round(took, 4))

    def _learn(self, data: bytes, error: Exception) -> None:
        """A refusal in other words than ever before has come another way: worth damaging more."""
        way = f"{type(error).__name__}: {_WORDS.sub('#', str(error)[:400])[:120]}"
        if way not in self._seen and len(self._seen) < 4 * MOST_KEPT:
            self._seen.add(way)
            if len(self._learned) < MOST_KEPT:
                self._learned.append(data)

    def _finding(self, data: bytes, error: BaseException) -> None:
        self.tally.findings += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {last.filename}:{last.lineno}"
        if where in self._found:
            return
        self._found.add(where)
        path = self._folder / f"{self.tally.target}-{len(self._found)}.bin"
        path.write_bytes(data)
        told = {
            "finding": where,
            "target": self.tally.target,
            "error": str(error)[:300],
            "input": str(path),
            "trace": traceback.format_tb(error.__traceback__)[-6:],
        }
        print(json.dumps(told), flush=True)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--inputs", type=int, required=True, help="of each target")
    parser.add_argument("--seconds", type=float, default=0.0, help="of CPU, of each; 0: no bound")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # numpy and the TOML reader warn of what they then refuse
    with args.shared.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), SHARED_BYTES)
    for number, name in enumerate(args.targets):
        fuzzer = Fuzzer(name, number, shared, args.folder, args.seed)
        if number == 0:
            _bound_memory()
        fuzzer.run(args.inputs, args.seconds)
        print(json.dumps(asdict(fuzzer.tally)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
