"""What this kernel and these privileges allow."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import bpf

_CAPABILITIES = {
    1: "CAP_DAC_OVERRIDE",
    2: "CAP_DAC_READ_SEARCH",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    38: "CAP_PERFMON",
    39: "CAP_BPF",
    40: "CAP_CHECKPOINT_RESTORE",
}
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO


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


def read_text(path: Path) -> str | None:
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


def without_asking(proc: Path = Path("/proc")) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(capabilities, problems) that are known before any program is loaded."""
    capabilities = held_capabilities(read_text(proc / "self/status") or "")
    problems = _problems(proc, _release_number(platform.release()), capabilities)
    return capabilities, tuple(problems)


def probe_support(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> KernelSupport:
    """Asks the kernel, not its version, wherever asking is possible."""
    release = platform.release()
    number = _release_number(release)
    capabilities = held_capabilities(read_text(proc / "self/status") or "")
    loads, why = _loads(0)
    multi = loads and _multi_works(proc)
    perf = read_text(sys / "bus/event_source/devices/uprobe/type") is not None
    problems = list(_problems(proc, number, capabilities))
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
    elif not multi and "CAP_SYS_ADMIN" not in capabilities:
        problems.append(
            "without multi-uprobes (6.6) the kernel asks for CAP_SYS_ADMIN at every probe: run as "
            "root or grant it"
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


def _problems(proc: Path, number: tuple[int, int], capabilities: tuple[str, ...]) -> Iterable[str]:
    if platform.machine() not in ("x86_64", "aarch64"):
        yield f"architecture {platform.machine()}: only x86_64 and aarch64 are supported"
    if number < (5, 15):
        yield f"kernel {platform.release()}: attach cookies need 5.15; use a later kernel"
    if "CAP_SYS_ADMIN" not in capabilities:
        missing = {"CAP_BPF", "CAP_PERFMON"} - set(capabilities)
        if missing:
            yield f"missing {' and '.join(sorted(missing))}: run as root or grant them"
        if "CAP_PERFMON" not in capabilities and (
            int(read_text(proc / "sys/kernel/perf_event_paranoid") or 0) > 1
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
