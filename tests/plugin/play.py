"""Writes a script for the driver, runs it, and reads what the probes told."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

import numpy as np

from lanterne.probes.nccl_profiler import usdt
from tests.plugin import notes
from tests.plugin.build import build

# Positions in ucontext_t.gregs of x86-64.
_GREGS = ("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx",
          "rdx", "rax", "rcx", "rsp")  # fmt: skip
GROUP_API, COLL_API, P2P_API = 256, 512, 1024


@dataclass
class Told:
    """What came out: op_done as rows of usdt.OP, other probes as tuples, answers by first word."""

    ops: np.ndarray
    probes: dict[str, list[tuple[int, ...]]]
    answers: dict[str, list[tuple[int, ...]]]


@dataclass
class Play:
    """Commands for one process; handles are numbered, 0 is NULL."""

    version: int = 5
    kind: str = "plain"
    env: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    _handles: int = 0

    def __post_init__(self) -> None:
        self.say("version", self.version)

    def say(self, *words: object) -> None:
        self.lines.append(" ".join(map(str, words)))

    def _new(self, word: str, *words: object) -> int:
        self._handles += 1
        context, *rest = words
        self.say(word, context, self._handles, *rest)
        return self._handles

    def arm(self, probe: str = "op_done", by: int = 1) -> None:
        self.say("arm", probe, by)

    def init(self, context: int = 1, hash_: int = 0xABC, rank: int = 3, ranks: int = 8) -> None:
        self.say("init", context, f"{hash_:x}", rank, ranks, 2)

    def call(self, kind: int, parent: int = 0, captured: bool = False, context: int = 1) -> int:
        return self._new("call", context, kind, parent, int(captured))

    def plan(self, context: int = 1) -> int:
        return self.other(1, context)

    def other(self, kind: int, context: int = 1) -> int:
        """An event of any kind; its parent must not be followed."""
        return self._new("raw", context, kind)

    def coll(self, seq: int = 0, func: str = "AllReduce", count: int = 1024, *, context: int = 1,
             dtype: str = "ncclFloat32", root: int = 0, channels: int = 1, plan: int = 0,
             parent: int = 0) -> int:  # fmt: skip
        return self._new("coll", context, parent, plan, func, seq, count, dtype, root, channels)

    def p2p(self, func: str, count: int, peer: int, *, context: int = 1, dtype: str = "ncclInt8",
            channels: int = 1, plan: int = 0, parent: int = 0) -> int:  # fmt: skip
        return self._new("p2p", context, parent, plan, func, count, dtype, peer, channels)

    def begin(self, task: int, start: object, number: int = 0, context: int = 1) -> int:
        return self._new("kernel", context, task, number, start)

    def channel(self, task: int, start: object, stop: object, number: int = 0,
                context: int = 1) -> None:  # fmt: skip
        """One channel that comes and goes."""
        self.end(self.begin(task, start, number, context), stop)

    def end(self, handle: int, stop: object) -> None:
        self.say("state", handle, 22, stop)
        self.stop(handle)

    def stop(self, *handles: int) -> None:
        for handle in handles:
            self.say("stop", handle)

    def group(self, *tasks: tuple[str, int, int], parts: int = 1, captured: bool = False,
              api: bool = True, times: int = 1) -> None:  # fmt: skip
        """One p2p group of (func, bytes, peer), launched as `parts` plans, `times` times."""
        group = self.call(GROUP_API, captured=captured) if api else 0
        calls = [self.call(P2P_API, group, captured) if api else 0 for _ in tasks]
        size = len(tasks) // parts
        for _ in range(times):
            for first in range(0, len(tasks), size):
                plan = self.plan()
                some = list(zip(tasks, calls, strict=True))[first : first + size]
                handles = [self.p2p(*task, plan=plan, parent=call) for task, call in some]
                for handle, ((_, _, peer), _) in zip(handles, some, strict=True):
                    if peer != 3:
                        self.channel(handle, 1000 + peer, 2000 + 10 * peer)
                self.stop(*handles, plan)
        if group:
            self.stop(group)

    def run(self) -> Told:
        built = build(self.kind)
        specs = [spec(note) for note in notes.read(built.library).values()]
        # A sanitizer's report goes to standard error, which must stay empty.
        done = subprocess.run(
            [str(built.driver), str(built.library), *specs], input="\n".join(self.lines) + "\n",
            capture_output=True, text=True, check=False, timeout=60,
            env={"PATH": "/usr/bin:/bin", "UBSAN_OPTIONS": "print_stacktrace=1"} | self.env,
        )  # fmt: skip
        if done.returncode or done.stderr:
            raise AssertionError(f"exit {done.returncode}: {done.stderr}")
        return _parse(done.stdout)


def spec(note: notes.Note) -> str:
    places = [f"${value}" if isinstance(value, int) else str(_GREGS.index(value))
              for _, value in note.arguments]  # fmt: skip
    return f"{note.name}={note.address:x},{note.semaphore:x},{':'.join(places)}"


def _parse(text: str) -> Told:
    raw = bytearray()
    told = Told(np.zeros(0, usdt.OP), {}, {})
    for line in text.splitlines():
        word, *rest = line.split()
        if word != "probe":
            told.answers.setdefault(word, []).append(tuple(map(int, rest)))
        elif rest[0] == "op_done":
            assert int(rest[2]) == usdt.OP.itemsize
            raw += bytes.fromhex(rest[1])
        else:
            told.probes.setdefault(rest[0], []).append(tuple(map(int, rest[1:])))
    told.ops = np.frombuffer(bytes(raw), usdt.OP)
    return told


class Player:
    """A running driver (driver.c) that plays NCCL, fed line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, *lines: str) -> None:
        """Returns when the lines have been carried out."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n".join([*lines, "sync"]) + "\n")
        self.process.stdin.flush()
        while self.process.stdout.readline() != "sync\n":
            assert self.process.poll() is None
