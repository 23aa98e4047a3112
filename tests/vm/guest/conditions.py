"""`lanterne-agent doctor` where something is missing: it must be right about whether it works.

A condition is a row: how to bring it about, and what doctor must then say. What is true is found
by trying (attempt.py). Lockdown cannot be taken back, so it stands at the end; a guest that was
booted with lockdown=confidentiality meets all conditions under it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600
AGENT = frozenset((2, 19, 38, 39))  # CAP_DAC_READ_SEARCH, SYS_PTRACE, PERFMON, BPF
SYS_RESOURCE = 24
NOBODY = 65534
LOCKDOWN = "/sys/kernel/security/lockdown"


def nothing() -> None:
    pass


def without_capabilities(gone: frozenset[int]) -> None:
    """For this process and what it executes; root keeps what the bounding set has."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in sorted(gone):
        libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP


def no_sys_resource() -> None:
    """With the limit of locked memory that distributions set."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    without_capabilities(frozenset((SYS_RESOURCE,)))


def agent_capabilities() -> None:
    without_capabilities(frozenset(range(41)) - AGENT)


def ordinary_user() -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def shell(text: str) -> Callable[[], None]:
    return lambda: subprocess.run(["sh", "-ec", text], check=True) and None


@dataclass(frozen=True)
class Condition:
    """``before`` runs in the guest, ``within`` in doctor's process; ``after`` undoes ``before``.

    ``works``: whether the agent must work (None: kernels differ, but doctor has to know).
    ``says``: what doctor's rows must contain.
    """

    name: str
    works: bool | None
    says: tuple[str, ...] = ()
    before: Callable[[], object] = nothing
    within: Callable[[], None] = nothing
    after: Callable[[], object] = nothing


CGROUP_V1 = """
umount /sys/fs/cgroup
mount -t tmpfs cgroups /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/memory /sys/fs/cgroup/cpu
mount -t cgroup -o cpu,cpuacct cpu /sys/fs/cgroup/cpu
if grep -q '^memory' /proc/cgroups; then
  mount -t cgroup -o memory memory /sys/fs/cgroup/memory || true
fi
"""
CGROUP_V2 = """
umount /sys/fs/cgroup/memory || true
umount /sys/fs/cgroup/cpu
umount /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
"""

CONDITIONS = (
    Condition("root", True, ("self-test: ok: programs compile, verify and load",)),
    Condition("no CAP_SYS_RESOURCE, 64 KiB of locked memory", True, within=no_sys_resource),
    # Without multi-uprobes some kernels ask for CAP_SYS_ADMIN.
    Condition("only the agent's four capabilities", None, within=agent_capabilities),
    Condition(
        "no BTF to be read",
        True,
        ("BTF: info: not there",),
        before=shell("mount -t tmpfs -o ro none /sys/kernel/btf"),
        after=shell("umount /sys/kernel/btf"),
    ),
    Condition("cgroup v1 only", True, before=shell(CGROUP_V1), after=shell(CGROUP_V2)),
    Condition("an ordinary user", False, ("run as root",), within=ordinary_user),
    Condition(
        "lockdown=integrity",
        True,
        ("lockdown: ok: integrity",),
        before=shell(f"echo integrity >{LOCKDOWN}"),
    ),
    Condition(
        "lockdown=confidentiality",
        True,  # as long as no program reads the kernel's memory
        ("confidentiality",),
        before=shell(
            f"grep -q '\\[confidentiality\\]' {LOCKDOWN} || echo confidentiality >{LOCKDOWN}"
        ),
    ),
)


def check_all(
    doctor: Sequence[str], results: Path, say: Callable[[str], None], named: str
) -> list[dict[str, Any]]:
    """``named``: only conditions whose names have this in them."""
    from tests.kernel.stub import compile_stub

    folder = Path("/tmp/attempt")
    library = compile_stub(folder, "nccl", enqueue=False)
    attempt = [sys.executable, str(Path(__file__).with_name("attempt.py")), str(library)]
    found = []
    lockdown = Path(LOCKDOWN)
    strictest = lockdown.exists() and "[confidentiality]" in lockdown.read_text()
    chosen = [one for one in CONDITIONS if named in one.name]
    chosen = [one for one in chosen if not (strictest and "integrity" in one.name)]
    for number, condition in enumerate(chosen):
        row = check(condition, doctor, attempt, results / f"doctor-{number}.txt")
        verdict = "as it should be" if row["passed"] else f"WRONG: {row['why']}"
        say(f"{condition.name}: {verdict} ({row['seconds']} s)")
        found.append(row)
    return found


def check(
    condition: Condition, doctor: Sequence[str], attempt: Sequence[str], log: Path
) -> dict[str, Any]:
    """``truth``: "right", or why the agent could not do its work; ``works``: doctor's verdict."""
    row: dict[str, Any] = {"name": condition.name, "passed": False, "seconds": 0}
    began = time.monotonic()
    try:
        condition.before()
        try:
            report = _run(doctor, condition, log)
            truth = _run(attempt, condition, log.with_suffix(".attempt"))
        finally:
            condition.after()
        rows = json.loads(report)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return row | {"why": f"{type(error).__name__}: {error}"[-400:]}
    lines = [
        f"{one['check']}: {one['status']}: {one['detail']} [{one['remedy']}]"
        for one in rows["rows"]
    ]
    row |= {"seconds": round(time.monotonic() - began), "rows": lines, "works": rows["works"]}
    row["truth"] = truth.strip().splitlines()[-1] if truth.strip() else "no answer"
    row["why"] = _wrong(condition, row)
    row["passed"] = not row["why"]
    return row


def _wrong(condition: Condition, row: dict[str, Any]) -> str:
    really = row["truth"] == "right"
    if row["works"] != really:
        return f"doctor finds works = {row['works']}, but tried: {row['truth']}"
    if condition.works not in (None, really):
        return f"should work = {condition.works}, but tried: {row['truth']}"
    missing = [text for text in condition.says if not any(text in line for line in row["rows"])]
    return f"doctor does not say {missing}" if missing else ""


def _run(command: Sequence[str], condition: Condition, log: Path) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        preexec_fn=condition.within,
    )  # fmt: skip
    log.write_text(f"{done.stdout}\n{done.stderr}")
    return done.stdout
