"""What a profiler plugin has open: read from the memory of the processes that hold it.

The plugin tells of an operation when the GPU has left it. Of one in which a job hangs it never
does, so the agent looks at what the plugin keeps (probes/nccl_profiler/open.h), and only while a
communicator of the process is quiet. Nothing is stopped or locked for it: a process that goes on
meanwhile may show something half changed, so every pointer is followed a bounded number of times,
and an operation counts only where all that is known of it fits together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lanterne.agent.discover import Mapped, parse_maps, ways_to_open
from lanterne.agent.elf import ElfFile, open_regular
from lanterne.agent.errors import ElfError
from lanterne.agent.process import Processes
from lanterne.probes import layout
from lanterne.probes.nccl_profiler import open_memory as mirror

MAX_OPEN = 64  # operations of one communicator that are looked at until one is found
MAX_MAPS_BYTES = 8 << 20

# The oldest operation of a communicator that the GPU has not left: layout.DEVICE's fields that are
# known then, whether the GPU has entered it, and when that (or the launch) was.
OPEN = np.dtype(
    [(n, layout.DEVICE[n]) for n in ("tgid", "comm_hash", "rank", "n_ranks", "seq", "func", "flags",
                                     "enqueue_ns")]
    + [("started", "?"), ("since_ns", "<u8")]
)  # fmt: skip


class PluginMemory:
    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._processes = Processes(proc)
        self._sections: dict[tuple[int, int], int] = {}  # by file: address, 0 where it has none

    def read(self, pids: Iterable[int]) -> np.ndarray:
        """OPEN rows of the communicators of these processes that have an open operation."""
        rows = [row for pid in pids for row in self._process(pid)]
        return np.concatenate([np.zeros(0, OPEN), *rows])

    def _process(self, pid: int) -> Iterable[np.ndarray]:
        try:
            with (self._proc / str(pid) / "maps").open("rb") as file:
                maps = parse_maps(file.read(MAX_MAPS_BYTES))
        except OSError:
            return
        for mapped in maps:
            if mapped.kind != "profiler":
                continue
            section = self._section(pid, mapped)
            if not section:
                continue
            base = int(mapped.range.partition("-")[0], 16)
            yield from self._contexts(pid, base + section)

    def _section(self, pid: int, mapped: Mapped) -> int:
        """Where the table lies, from the file's first mapping; 0: not in this plugin."""
        if mapped.key not in self._sections:
            if len(self._sections) >= 256:
                self._sections.clear()
            self._sections[mapped.key] = self._find(pid, mapped)
        return self._sections[mapped.key]

    def _find(self, pid: int, mapped: Mapped) -> int:
        for path in ways_to_open(self._proc, pid, mapped):
            try:
                fd = open_regular(path)
            except ElfError:
                continue
            try:
                file = ElfFile(fd, mapped.path)
                section = file.sections_named([mirror.SECTION]).get(mirror.SECTION)
                loaded = [s.address for s in file.segments if s.type == "PT_LOAD"]
            except ElfError:
                return 0
            finally:
                os.close(fd)
            return section.address - min(loaded) if section is not None and loaded else 0
        return 0

    def _at(self, pid: int, address: int, dtype: np.dtype) -> np.void | None:
        data = self._processes.memory(pid, address, dtype.itemsize) if address else None
        return None if data is None else np.frombuffer(data, dtype)[0]

    def _contexts(self, pid: int, address: int) -> Iterable[np.ndarray]:
        here = self._at(pid, address, mirror.OPEN)
        if here is None or here["magic"] != mirror.MAGIC or here["version"] != mirror.VERSION:
            return
        at = int(here["newest"])
        for _ in range(mirror.MAX_CONTEXTS):
            context = self._at(pid, at, mirror.CONTEXT)
            if context is None:
                return
            if context["live"]:
                row = self._oldest(pid, at, context)
                if row is not None:
                    yield row
            at = int(context["made_before"])

    def _oldest(self, pid: int, at: int, context: np.void) -> np.ndarray | None:
        """Of a context the oldest operation that the GPU has to run, or runs."""
        slot = int(context["oldest"])
        for _ in range(MAX_OPEN):
            op = self._at(pid, slot, mirror.SLOT)
            if op is None or op["owner"] != at or not op["open"]:
                return None
            out = op["out"]
            if (out["comm_hash"], out["rank"]) != (context["hash"], context["rank"]):
                return None
            # What a rank sends to itself never runs; what all channels that came have left is over,
            # and so is what was launched before something that is: they run in order.
            over = op["self_only"] or 0 < op["started"] <= op["done"]
            if not over and out["enqueue_ns"] >= context["done_enqueue"]["latest"]:
                return _row(pid, op)
            slot = int(op["newer"])
        return None


def _row(pid: int, op: np.void) -> np.ndarray:
    row = np.zeros(1, OPEN)
    for name in ("comm_hash", "rank", "n_ranks", "seq", "func", "flags", "enqueue_ns"):
        row[name] = op["out"][name]
    row["tgid"] = pid
    row["started"] = op["started"] > 0
    row["since_ns"] = op["active_ns"] if op["started"] else op["out"]["enqueue_ns"]
    return row
