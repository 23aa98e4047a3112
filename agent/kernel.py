"""The loaded programs and their maps."""

from __future__ import annotations

import mmap
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from lanterne.probes import catalog, layout, parcagpu, rows
from lanterne.probes.nccl_profiler import usdt

from . import bpf
from .compiler import run_loader
from .cuda import CudaUses, Use
from .errors import AttachError, KernelError
from .slots import SlotTable
from .support import KernelSupport, probe_support, read_text
from .unique import unique

__all__ = ["KernelSupport", "Programs", "load", "probe_support", "program_names"]

_COUNTER_SLOTS = 16
_SOURCES = (
    "state",
    "collective",
    "comm",
    "group",
    "cuda",
    "context",
    "splits",
    "moe",
    "device",
    "kernel",
)
_MAPS = (
    "ring", "comm_ring", "device_ring", "threads", "comms", "processes", "counters", "cuda", "rows",
    "kernel_ring", "told", "kernel_names",
)  # fmt: skip
MAX_OPEN_CALLS = 8192  # as many as the map holds
MAX_KERNEL_NAMES = 8192  # in the kernel at a time; see Programs.kernel_name
# Maps with one entry a call or object of a process: name -> bytes of the key, which begins with
# tgid << 32.
_BY_PROCESS = {
    "open_calls": 8, "open_creations": 8, "pending_comms": 16, "context_calls": 8, "contexts": 16,
}  # fmt: skip


class Programs:
    """The loaded programs and their maps; owns every descriptor. A context manager."""

    def __init__(
        self,
        fds: dict[str, int],
        method: str,
        ring_bytes: int,
        comm_ring_bytes: int,
        device_ring_bytes: int,
        kernel_ring_bytes: int,
    ) -> None:
        self._fds = fds
        self.method = method
        self.ring_fd = fds["ring"]
        self.ring_bytes = ring_bytes
        self.comm_ring_fd = fds["comm_ring"]
        self.comm_ring_bytes = comm_ring_bytes
        self.device_ring_fd = fds["device_ring"]
        self.device_ring_bytes = device_ring_bytes
        self.kernel_ring_fd = fds["kernel_ring"]
        self.kernel_ring_bytes = kernel_ring_bytes
        self._cpus = _possible_cpus()
        self._threads = SlotTable(fds["threads"], rows.THREAD, rows.MAX_THREADS, "id")
        self._comms = SlotTable(fds["comms"], rows.COMM, rows.MAX_COMMS, "key")
        processes = SlotTable(fds["processes"], rows.PROCESS, rows.MAX_PROCESSES, "tgid")
        self._cuda = CudaUses(fds["cuda"], processes)
        self._derived: dict[bytes, int] = {}
        self._names_read = 0

    def program(self, name: str) -> int:
        """Descriptor of a BPF function."""
        return self._fds[name]

    def cookie(self, row: catalog.Row) -> int:
        """The number under which the programs find a row. A derived one is written into their map
        at first; libraries of one layout share it. Raises AttachError when the map is full."""
        if row.id:
            return row.id
        packed = catalog.pack_row(row, catalog.Arch(platform.machine())).tobytes()
        number = self._derived.get(packed)
        if number is None:
            number = rows.DERIVED_ROWS + len(self._derived)
            if number >= rows.MAX_ROWS:
                raise AttachError(
                    f"more than {rows.MAX_ROWS - rows.DERIVED_ROWS} layouts of expert-parallel "
                    "libraries on one host: leave some out with probes.exclude"
                )
            bpf.update(self._fds["rows"], struct.pack("<I", number), packed)
            self._derived[packed] = number
        return number

    def counters(self) -> dict[str, int]:
        """layout.COUNTERS, summed over CPUs."""
        data = bpf.lookup_all(self._fds["counters"], len(layout.COUNTERS), 8 * self._cpus)
        totals = np.frombuffer(data, np.uint64).reshape(-1, self._cpus).sum(axis=1)
        return dict(zip(layout.COUNTERS, totals.tolist(), strict=True))

    def run_stats(self, proc: Path = Path("/proc")) -> tuple[int, int] | None:
        """(runs, nanoseconds) of all our programs; None where the kernel does not count them."""
        try:
            if (read_text(proc / "sys/kernel/bpf_stats_enabled") or "0") == "0":
                return None
            stats = [bpf.run_stats(self._fds[name]) for name in program_names()]
        except OSError:
            return None
        return sum(runs for runs, _ in stats), sum(ns for _, ns in stats)

    def cuda(self, proc: Path = Path("/proc")) -> dict[int, Use]:
        """What each living process has done at libcuda, by tgid."""
        found = self._cuda.read()
        gone = [tgid for tgid in found if not (proc / str(tgid)).exists()]
        self._cuda.forget(gone)
        return {tgid: use for tgid, use in found.items() if tgid not in gone}

    def cuda_ended(self) -> dict[int, Use]:
        """The last word on processes that have ended since this was last asked."""
        return self._cuda.ended()

    def open_calls(self) -> np.ndarray:
        """layout.RECORD rows of calls that were entered and have not returned, one a thread."""
        fd, size = self._fds["open_calls"], layout.RECORD.itemsize
        found = []
        for key in bpf.keys(fd, 8, MAX_OPEN_CALLS):
            value = bpf.lookup(fd, key, size + 16)  # record, stack pointer, open
            if value is not None and value[size + 8]:
                found.append(value[:size])
        return np.frombuffer(b"".join(found), layout.RECORD)

    def synchronising(self) -> dict[int, int]:
        """By tgid: when its oldest synchronise call began that has not returned."""
        slots = self._threads.slots
        inside = slots[(slots["id"] != 0) & (slots["sync_enter_ns"] != 0)]
        found: dict[int, int] = {}
        for thread in inside:
            tgid, entered = int(thread["id"]) >> 32, int(thread["sync_enter_ns"])
            found[tgid] = min(entered, found.get(tgid, entered))
        return found

    def told(self, tgids: Iterable[int]) -> dict[int, np.void]:
        """parcagpu.TOLD rows of processes of which parcagpu tells."""
        found: dict[int, np.void] = {}
        for tgid in tgids:
            value = bpf.lookup(self._fds["told"], struct.pack("<I", tgid), parcagpu.TOLD.itemsize)
            if value is not None:
                found[tgid] = np.frombuffer(value, parcagpu.TOLD, 1)[0]
        return found

    def kernel_name(self, key: int) -> str | None:
        """The name behind lanterne_kernel.name; None where it is not there. Ask once: when many
        names have been asked for, the map begins anew."""
        fd = self._fds["kernel_names"]
        value = bpf.lookup(fd, struct.pack("<Q", key), parcagpu.NAME_BYTES)
        if value is None:
            return None
        self._names_read += 1
        if self._names_read > MAX_KERNEL_NAMES * 3 // 4:
            # Names that are still in use come back with their next kernel.
            for old in list(bpf.keys(fd, 8, MAX_KERNEL_NAMES)):
                bpf.delete(fd, old)
            self._names_read = 0
        return value.split(b"\0", 1)[0].decode("ascii", "replace")

    def forget(self, tgids: Iterable[int]) -> None:
        """Drops the state of processes that have ended, so that their numbers can be used again."""
        gone = frozenset(tgids)
        if not gone:
            return
        self._cuda.forget(gone)
        for tgid in gone:
            bpf.delete(self._fds["told"], struct.pack("<I", tgid))
        numbers = np.fromiter(gone, np.uint64)
        self._threads.free(np.isin(self._threads.slots["id"] >> np.uint64(32), numbers))
        self._comms.free(np.isin(self._comms.slots["tgid"], numbers.astype(np.uint32)))
        for fd, key, tgid in self._entries():
            if tgid in gone:
                bpf.delete(fd, key)

    def _entries(self) -> Iterator[tuple[int, bytes, int]]:
        """(descriptor of the map, key, tgid) of what the maps of _BY_PROCESS hold."""
        for name, key_bytes in _BY_PROCESS.items():
            fd = self._fds[name]
            for key in list(bpf.keys(fd, key_bytes, 16384)):
                yield fd, key, struct.unpack_from("<Q", key)[0] >> 32

    def sweep_processes(self, proc: Path = Path("/proc")) -> int:
        """Forgets the processes that have ended unseen, between two scans, and are still held: the
        maps would fill up with them; returns how many."""
        held = {tgid for _, _, tgid in self._entries()}
        held.update(int.from_bytes(key, "little") for key in bpf.keys(self._fds["told"], 4, 4096))
        held.update(unique(self._threads.slots["id"] >> np.uint64(32)).tolist())
        held.update(unique(self._comms.slots["tgid"]).tolist())
        gone = [tgid for tgid in held if tgid and not (proc / str(tgid)).exists()]
        self.forget(gone)
        return len(gone)

    def sweep_threads(self, proc: Path = Path("/proc")) -> int:
        """Frees the slots of threads that have ended in living processes; returns how many."""
        slots = self._threads.slots
        used = np.flatnonzero(slots["id"])
        dead = np.zeros(len(slots), bool)
        for index in used:
            number = int(slots["id"][index])
            if not (proc / str(number >> 32) / "task" / str(number & 0xFFFFFFFF)).exists():
                dead[index] = True
                bpf.delete(self._fds["open_calls"], struct.pack("<Q", number))
        self._threads.free(dead)
        return int(dead.sum())

    def threads_used(self) -> float:
        """Share of the thread slots in use, 0 to 1."""
        return self._threads.used()

    def close(self) -> None:
        self._threads.close()
        self._comms.close()
        self._cuda.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def __enter__(self) -> Programs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def program_names() -> list[str]:
    """Every BPF function, in a fixed order."""
    names = [name for pair in catalog.PROGRAMS.values() for name in pair if name]
    return list(dict.fromkeys(names))


def _possible_cpus(sys: Path = Path("/sys")) -> int:
    """Number of values of a per-CPU map: highest possible CPU + 1."""
    text = read_text(sys / "devices/system/cpu/possible") or "0"
    return int(text.replace(",", "-").split("-")[-1]) + 1


def _pages(size: int, name: str) -> int:
    least = mmap.PAGESIZE  # 4, 16 or 64 KiB
    if size < least or size & (size - 1):
        raise KernelError(f"{name} = {size}: must be a power of two of at least {least} bytes")
    return size // 4096  # PAGE_SIZE of bpf/include/asm/page.h, whatever the kernel's is


def _choose(method: str) -> str:
    if method not in ("auto", "multi", "perf"):
        raise KernelError(f"attach method {method!r}: must be auto, multi or perf")
    support = probe_support()
    if not support.bpf:
        raise KernelError("; ".join(support.problems) or "the kernel refuses BPF programs")
    if method == "auto":
        method = "multi" if support.uprobe_multi else "perf"
    if method == "multi" and not support.uprobe_multi:
        raise KernelError(f"kernel {support.release} has no multi-uprobes (6.6): use method perf")
    if method == "perf" and not support.perf_uprobe:
        raise KernelError(f"kernel {support.release} has no uprobe perf event: use method multi")
    return method


def load(
    *,
    ring_bytes: int = 8 << 20,
    comm_ring_bytes: int = 1 << 20,
    device_ring_bytes: int = 2 << 20,
    kernel_ring_bytes: int = 2 << 20,
    interpreter: str = "/usr/bin/python3",
    method: str = "auto",
) -> Programs:
    """Compiles and loads the programs in a child under ``interpreter``, which must have bcc.

    Programs for multi-uprobes and for perf events differ in their expected attach type, so only
    the set that ``method`` needs is loaded. Raises KernelError and LoaderError.
    """
    method = _choose(method)
    arch = catalog.Arch(platform.machine())
    folder = Path(catalog.__file__).parent
    maps = [*_MAPS, *_BY_PROCESS]
    spec = {
        "sources": [str(folder / "bpf" / f"{name}.bpf.c") for name in _SOURCES],
        "include": str(folder / "bpf"),
        "defines": {
            "LANTERNE_RING_PAGES": _pages(ring_bytes, "ring_bytes"),
            "LANTERNE_COMM_RING_PAGES": _pages(comm_ring_bytes, "comm_ring_bytes"),
            "LANTERNE_DEVICE_RING_PAGES": _pages(device_ring_bytes, "device_ring_bytes"),
            "LANTERNE_KERNEL_RING_PAGES": _pages(kernel_ring_bytes, "kernel_ring_bytes"),
            "LANTERNE_KERNEL_NAMES": MAX_KERNEL_NAMES,
            "LANTERNE_OP_VERSION": usdt.OP_VERSION,
            "LANTERNE_ROW_ENQUEUE_CHECK": catalog.ENQUEUE_CHECK_ID,
        },
        "attach_type": bpf.ATTACH_UPROBE_MULTI if method == "multi" else 0,
        "programs": program_names(),
        "maps": maps,
        "rows": [row.tobytes().hex() for row in catalog.pack(arch)],
    }
    fds = run_loader(folder / "loader.py", interpreter, spec)
    return Programs(fds, method, ring_bytes, comm_ring_bytes, device_ring_bytes, kernel_ring_bytes)
