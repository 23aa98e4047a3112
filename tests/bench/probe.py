"""What a probe adds to one NCCL call, all variants in turn in one run on one machine.

bare    the call, nothing attached
empty   an empty BPF program at the same site: what the kernel's uprobe itself costs
entry   ours as the agent attaches it
pair    ours with a return probe (a site where the duration is wanted)
first   ours at the first instruction of a library whose functions begin with landing pads, which
        the kernel single-steps
later   ours where the agent puts it there: behind the landing pad (x86-64 only)
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lanterne.agent import bpf
from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import Programs, load
from lanterne.agent.ring import Ring
from lanterne.probes import catalog
from lanterne.probes.layout import RECORD
from tests.rig.rig import RigPaths, build

HERE = Path(__file__).resolve().parent
ROUNDS = 7
CALLS = 40_000
ENTRY_SYMBOL = "_Z16ncclEnqueueCheckP8ncclInfo"
PAIR_SYMBOL = "pncclAllReduce"


class Caller:
    """A process that calls ncclAllReduce on request."""

    def __init__(self, library: Path, folder: Path) -> None:
        program = folder / "caller"
        subprocess.run(
            ["gcc", "-O1", "-o", str(program), str(HERE / "caller.c"), "-ldl"], check=True
        )
        self._process = subprocess.Popen(
            [str(program), str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._expect("ready")

    def _expect(self, text: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != text:
            raise RuntimeError("the calling process did not come up")

    def run(self, calls: int) -> float:
        """Nanoseconds per call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class BccSide:
    """The other side, in the interpreter that has bcc."""

    def __init__(self) -> None:
        env = dict(os.environ, BCC_KERNEL_SOURCE=str(Path(catalog.__file__).parent / "bpf"))
        self._process = subprocess.Popen(
            ["/usr/bin/python3", str(HERE / "bcc_side.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=env,
        )  # fmt: skip
        self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bcc side ended: {self._process.communicate()[1][-2000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        self._process.communicate()


def symbol_offset(library: Path, symbol: str) -> int:
    """File offset by the symbol table; the rig's text segment is mapped at its file offset."""
    listing = subprocess.run(
        ["nm", str(library)], capture_output=True, text=True, check=True
    ).stdout
    for line in listing.splitlines():
        parts = line.split()
        if len(parts) == 3 and parts[2] == symbol:
            return int(parts[0], 16)
    raise RuntimeError(f"{library} has no symbol {symbol}")


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def empty_program(side: BccSide, library: Path) -> Iterator[None]:
    side.ask("attach", "empty", library, symbol_offset(library, ENTRY_SYMBOL))
    yield
    side.ask("detach")


@contextmanager
def as_attached(programs: Programs, library: Path) -> Iterator[None]:
    with Attacher(programs, include=[str(library)]) as attacher:
        attacher.scan()
        if not any(x.state == "attached" for x in attacher.libraries.values()):
            raise RuntimeError(f"{library} was not attached")
        yield


@contextmanager
def with_return(programs: Programs, library: Path) -> Iterator[None]:
    """The pair programs on pncclAllReduce: the same call, entry and return."""
    row = next(r for r in catalog.ROWS if r.symbol == PAIR_SYMBOL)
    at = [symbol_offset(library, PAIR_SYMBOL)]
    with ExitStack() as held:
        # The return probe first: an entry without its return would be kept for nothing.
        for name, at_return in (("pair_return", True), ("pair_entry", False)):
            link = bpf.link_uprobes(
                programs.program(name), str(library), at, [row.id], at_return=at_return
            )
            held.callback(os.close, link)
        yield


@contextmanager
def at_first_instruction(programs: Programs, library: Path) -> Iterator[None]:
    """Where nobody looks at the instruction."""
    row = catalog.BY_ID[catalog.ENQUEUE_CHECK_ID]
    entry, _ = catalog.PROGRAMS[row.program]
    assert entry is not None
    offset = symbol_offset(library, ENTRY_SYMBOL)
    link = bpf.link_uprobes(
        programs.program(entry), str(library), [offset], [row.id], at_return=False
    )
    yield
    os.close(link)


def measure(rounds: int = ROUNDS, calls: int = CALLS) -> dict[str, float]:
    """Medians of `rounds`, the variants interleaved so that a drifting machine hits all alike."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, load(ring_bytes=1 << 20) as programs:
        folder = Path(name)
        library = build(dest=folder).nccl
        padded = build("landing-pads", folder / "padded").nccl
        caller, side = Caller(library, folder), BccSide()
        other = Caller(padded, folder / "padded")
        ring = Ring(programs.ring_fd, programs.ring_bytes, RECORD)
        variants: dict[str, tuple[Caller, Callable[[], Any]]] = {
            "bare": (caller, nothing),
            "empty": (caller, lambda: empty_program(side, library)),
            "entry": (caller, lambda: as_attached(programs, library)),
            "pair": (caller, lambda: with_return(programs, library)),
            "first": (other, lambda: at_first_instruction(programs, padded)),
            "later": (other, lambda: as_attached(programs, padded)),
        }
        try:
            for _ in range(rounds):
                for variant, (process, context) in variants.items():
                    with context():
                        times.setdefault(variant, []).append(_drained(process, ring, calls))
        finally:
            ring.close()
            side.close()
            caller.close()
            other.close()
    result = {f"{name}_ns": round(statistics.median(values), 1) for name, values in times.items()}
    bare = result["bare_ns"]
    result["entry_over_empty"] = round(
        (result["entry_ns"] - bare) / max(1e-9, result["empty_ns"] - bare), 3
    )
    result["first_over_later"] = round(
        (result["first_ns"] - bare) / max(1e-9, result["later_ns"] - bare), 1
    )
    result["kernel"] = platform.release()  # type: ignore[assignment]
    return result


def _drained(caller: Caller, ring: Ring, calls: int) -> float:
    """The ring is emptied between slices, as the agent does: a full ring would flatter us."""
    slices, per = 0.0, 4000
    caller.run(per)
    ring.drain()
    for _ in range(calls // per):
        slices += caller.run(per)
        ring.drain()
    return slices / (calls // per)


def measure_ring(events: int = 200_000) -> dict[str, float]:
    """The same calls fill our ring and bcc's; CPU time to read each empty, per event."""
    import time

    with tempfile.TemporaryDirectory() as name, load(ring_bytes=64 << 20) as programs:
        folder = Path(name)
        paths: RigPaths = build(dest=folder)
        caller, side = Caller(paths.nccl, folder), BccSide()
        try:
            with as_attached(programs, paths.nccl):
                side.ask("attach", "ring", paths.nccl, symbol_offset(paths.nccl, ENTRY_SYMBOL))
                caller.run(events)
                side_read = side.ask("consume")
                with Ring(programs.ring_fd, programs.ring_bytes, RECORD) as ring:
                    count, start = 0, time.process_time_ns()
                    while len(rows := ring.drain()):
                        count += len(rows)
                    spent = time.process_time_ns() - start
                side.ask("detach")
        finally:
            side.close()
            caller.close()
    if count != events or side_read["events"] != events:
        raise RuntimeError(f"{events} calls, {count} read by us, {side_read['events']} by bcc")
    return {
        "ours_ns_per_event": round(spent / count, 1),
        "bcc_ns_per_event": round(side_read["ns"] / side_read["events"], 1),
        "events": count,
    }
