"""What this kernel and these privileges allow, and the loaded programs with their maps."""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lanterne.probes import catalog, layout, rows

from . import bpf
from .errors import KernelError, LoaderError
from .slots import SlotTable

_CAPABILITIES = {
    1: "CAP_DAC_OVERRIDE",
    2: "CAP_DAC_READ_SEARCH",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    38: "CAP_PERFMON",
    39: "CAP_BPF",
}
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO
_COUNTER_SLOTS = 16
_LOAD_TIMEOUT_S = 120
_SOURCES = ("state", "collective", "comm", "group", "cuda")
_MAPS = ("ring", "comm_ring", "threads", "comms", "counters", "cuda")


@dataclass(frozen=True)
class KernelSupport:
    """``problems``: what keeps the probes from working here, each text with its remedy."""

    release: str
    bpf: bool
    uprobe_multi: bool
    perf_uprobe: bool
    ringbuf: bool
    cookies: bool
    capabilities: tuple[str, ...]
    problems: tuple[str, ...]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _release_number(release: str) -> tuple[int, int]:
    numbers = release.replace("-", ".").split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        return 0, 0


def held_capabilities(status: str) -> tuple[str, ...]:
    """Of those that matter here, from the text of /proc/self/status."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return tuple(name for bit, name in _CAPABILITIES.items() if mask >> bit & 1)
    return ()


def _loads(attach_type: int) -> tuple[bool, str]:
    """Whether a program of this attach type loads, else why not."""
    try:
        os.close(bpf.load_empty(attach_type))
    except OSError as error:
        return False, error.strerror or str(error)
    return True, ""


def _multi_works(proc: Path) -> bool:
    """The link type exists since 6.6; loading alone tells nothing, so one link is tried on a
    descriptor that is not a program: EBADF means that the command itself is known."""
    try:
        fd = bpf.load_empty(bpf.ATTACH_UPROBE_MULTI)
    except OSError:
        return False
    try:
        # Offset 0 of our own executable: the ELF header is no code, and -ENOENT or -EINVAL for a
        # bad path comes after the attach type was accepted.
        os.close(bpf.link_uprobes(fd, str(proc / "self/exe"), [1 << 62], [0], at_return=False))
    except OSError as error:
        return error.errno not in (22, 95) or _release_number(platform.release()) >= (6, 6)
    finally:
        os.close(fd)
    return True


def probe_support(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> KernelSupport:
    """Asks the kernel, not its version, wherever asking is possible."""
    release = platform.release()
    number = _release_number(release)
    capabilities = held_capabilities(_read(proc / "self/status") or "")
    loads, why = _loads(0)
    multi = loads and _multi_works(proc)
    perf = _read(sys / "bus/event_source/devices/uprobe/type") is not None
    problems = list(_problems(proc, sys, number, capabilities))
    if not loads:
        problems.append(
            f"the kernel refuses BPF programs ({why}): run as root, or with CAP_BPF, CAP_PERFMON, "
            "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH; in a container use --privileged"
        )
    elif not multi and not perf:
        problems.append(
            "neither multi-uprobes nor the uprobe perf event exist: use a kernel of 5.15 or later "
            "built with CONFIG_UPROBE_EVENTS"
        )
    return KernelSupport(
        release=release,
        bpf=loads,
        uprobe_multi=multi,
        perf_uprobe=perf,
        ringbuf=loads and number >= (5, 8),
        cookies=loads and number >= (5, 15),
        capabilities=capabilities,
        problems=tuple(problems),
    )


def _problems(
    proc: Path, sys: Path, number: tuple[int, int], capabilities: tuple[str, ...]
) -> Iterable[str]:
    if platform.machine() not in ("x86_64", "aarch64"):
        yield f"architecture {platform.machine()}: only x86_64 and aarch64 are supported"
    if number < (5, 15):
        yield f"kernel {platform.release()}: attach cookies need 5.15; use a later kernel"
    lockdown = _read(sys / "kernel/security/lockdown") or ""
    if "[confidentiality]" in lockdown:
        yield (
            "kernel lockdown is in confidentiality mode, which forbids BPF programs to read "
            "memory: boot with lockdown=integrity"
        )
    if "CAP_SYS_ADMIN" not in capabilities:
        missing = {"CAP_BPF", "CAP_PERFMON"} - set(capabilities)
        if missing:
            yield f"missing {' and '.join(sorted(missing))}: run as root or grant them"
        if "CAP_PERFMON" not in capabilities and (
            int(_read(proc / "sys/kernel/perf_event_paranoid") or 0) > 1
        ):
            yield (
                "kernel.perf_event_paranoid forbids perf events: grant CAP_PERFMON or set it to 1"
            )
    if "CAP_SYS_PTRACE" not in capabilities:
        yield "missing CAP_SYS_PTRACE: other users' processes cannot be looked into; grant it"
    try:
        if (proc / "self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE:
            yield (
                "the agent is not in the host's pid namespace, so process numbers do not match "
                "those of the probes: use hostPID: true or --pid=host"
            )
    except OSError:
        pass


class Programs:
    """The loaded programs and their maps; owns every descriptor. A context manager."""

    def __init__(
        self, fds: dict[str, int], method: str, ring_bytes: int, comm_ring_bytes: int
    ) -> None:
        self._fds = fds
        self.method = method
        self.ring_fd = fds["ring"]
        self.ring_bytes = ring_bytes
        self.comm_ring_fd = fds["comm_ring"]
        self.comm_ring_bytes = comm_ring_bytes
        self._cpus = _possible_cpus()
        self._threads = SlotTable(fds["threads"], rows.THREAD, rows.MAX_THREADS, "id")
        self._comms = SlotTable(fds["comms"], rows.COMM, rows.MAX_COMMS, "key")

    def program(self, name: str) -> int:
        """Descriptor of a BPF function."""
        return self._fds[name]

    def counters(self) -> dict[str, int]:
        """layout.COUNTERS, summed over CPUs."""
        counts = {}
        for index, name in enumerate(layout.COUNTERS):
            value = bpf.lookup(self._fds["counters"], struct.pack("<I", index), 8 * self._cpus)
            counts[name] = int(np.frombuffer(value or b"", np.uint64).sum())
        return counts

    def run_stats(self) -> tuple[int, int] | None:
        """(runs, nanoseconds) of all our programs; None where the kernel does not count them."""
        try:
            if (_read(Path("/proc/sys/kernel/bpf_stats_enabled")) or "0") == "0":
                return None
            stats = [bpf.run_stats(self._fds[name]) for name in program_names()]
        except OSError:
            return None
        return sum(runs for runs, _ in stats), sum(ns for _, ns in stats)

    def cuda(self) -> dict[int, np.void]:
        """tgid -> its layout.CUDA row."""
        found: dict[int, np.void] = {}
        fd = self._fds["cuda"]
        for key in bpf.keys(fd, 4, 8192):
            value = bpf.lookup(fd, key, layout.CUDA.itemsize)
            if value is None:
                continue
            row = np.frombuffer(value, layout.CUDA, 1)[0]
            tgid = struct.unpack("<I", key)[0]
            if not Path(f"/proc/{tgid}").exists():
                bpf.delete(fd, key)
                continue
            found[tgid] = row
        return found

    def forget(self, tgids: Iterable[int]) -> None:
        """Drops the state of processes that have ended, so that their numbers can be used again."""
        gone = np.fromiter(tgids, np.uint64)
        if not gone.size:
            return
        for tgid in gone:
            bpf.delete(self._fds["cuda"], struct.pack("<I", int(tgid)))
        self._threads.free(np.isin(self._threads.slots["id"] >> np.uint64(32), gone))
        self._comms.free(np.isin(self._comms.slots["tgid"], gone.astype(np.uint32)))
        for name, key_bytes in (("open_calls", 8), ("open_creations", 8), ("pending_comms", 16)):
            fd = self._fds[name]
            for key in list(bpf.keys(fd, key_bytes, 16384)):
                if struct.unpack_from("<Q", key)[0] >> 32 in gone:
                    bpf.delete(fd, key)

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
    text = _read(sys / "devices/system/cpu/possible") or "0"
    return int(text.replace(",", "-").split("-")[-1]) + 1


def _pages(size: int, name: str) -> int:
    if size < 4096 or size & (size - 1):
        raise KernelError(f"{name} = {size}: must be a power of two of at least 4096 bytes")
    return size // 4096


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
    maps = [*_MAPS, "open_calls", "open_creations", "pending_comms"]
    spec = {
        "sources": [str(folder / "bpf" / f"{name}.bpf.c") for name in _SOURCES],
        "include": str(folder / "bpf"),
        "defines": {
            "LANTERNE_RING_PAGES": _pages(ring_bytes, "ring_bytes"),
            "LANTERNE_COMM_RING_PAGES": _pages(comm_ring_bytes, "comm_ring_bytes"),
            "LANTERNE_ROW_ENQUEUE_CHECK": catalog.ENQUEUE_CHECK_ID,
        },
        "attach_type": bpf.ATTACH_UPROBE_MULTI if method == "multi" else 0,
        "programs": program_names(),
        "maps": maps,
        "rows": [row.tobytes().hex() for row in catalog.pack(arch)],
    }
    fds = _run_loader(folder / "loader.py", interpreter, spec)
    return Programs(fds, method, ring_bytes, comm_ring_bytes)


def _run_loader(script: Path, interpreter: str, spec: dict[str, Any]) -> dict[str, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, tempfile.TemporaryFile() as noise:
        with theirs:
            try:
                child = subprocess.Popen(
                    [interpreter, "-I", str(script), str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=noise,
                    stderr=noise,
                    pass_fds=[theirs.fileno()],
                    env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")},
                )
            except OSError as error:
                raise LoaderError(
                    f"cannot run the interpreter {interpreter}: {error.strerror}; set it to one "
                    "that has bcc (Debian: apt install python3-bpfcc, then /usr/bin/python3)"
                ) from error
        with child:
            try:
                answer, received = _talk(child, ours, spec)
            except (TimeoutError, OSError) as error:
                child.kill()
                raise LoaderError(f"the loader did not answer: {error}") from error
            child.wait(_LOAD_TIMEOUT_S)
        noise.seek(0, os.SEEK_END)
        noise.seek(max(0, noise.tell() - 4000))
        output = noise.read().decode(errors="replace").strip()
    if "error" not in answer and len(received) == len(answer["programs"]) + len(answer["maps"]):
        return dict(zip([*answer["programs"], *answer["maps"]], received, strict=True))
    for fd in received:
        os.close(fd)
    raise LoaderError(_explain(answer, interpreter, output))


def _talk(
    child: subprocess.Popen[bytes], ours: socket.socket, spec: dict[str, Any]
) -> tuple[dict[str, Any], list[int]]:
    ours.settimeout(_LOAD_TIMEOUT_S)
    assert child.stdin is not None  # noqa: S101
    try:
        child.stdin.write(json.dumps(spec).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already: its answer or its output says why
    body = b""
    received: list[int] = []
    while not body.endswith(b"\n"):
        part, fds, _, _ = socket.recv_fds(ours, 65536, 128)
        received += fds
        if not part:
            break
        body += part
    return (json.loads(body) if body else {"error": "no answer", "kind": "died"}), received


def _explain(answer: dict[str, Any], interpreter: str, output: str) -> str:
    error = answer.get("error", "descriptors are missing")
    if answer.get("kind") == "no_bcc":
        return (
            f"{interpreter} has no bcc ({error}): install it (Debian and Ubuntu: python3-bpfcc; "
            "Fedora: python3-bcc) or set the interpreter to one that has it"
        )
    what = {
        "compile": "bcc could not compile the programs",
        "load": "the kernel refused the programs",
    }.get(str(answer.get("kind")), "the loader child ended early")
    return f"{what}: {error}\n{output}".strip()
