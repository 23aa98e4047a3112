"""/proc/PID/cgroup -> pod, container, Slurm job or systemd unit. Pure.

Who may create cgroups below its own decides how deep its word counts: of several pods in a path the
outermost is taken, and below user.slice (whose owner may make any name) only the unit is. A path
seen from another cgroup namespace begins with "..", and may lack everything above the pod.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_BYTES = 1 << 16
MAX_LINES = 64
MAX_PATH = 4096
MAX_PARTS = 64

_ID = r"[0-9a-f]{64}"
_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# "pod<uid>" (cgroupfs), "kubepods-burstable-pod<uid with _>.slice" (systemd), and both in one with
# the container, "kubepods-pod<uid>.slice:cri-containerd:<id>" (containerd told of another driver).
_POD = re.compile(rf"(?:[A-Za-z0-9_.-]*-)?pod({_UID})(?:\.slice)?(?::[a-z-]+:({_ID}))?")
# "<id>", "docker-<id>.scope", "cri-containerd-<id>.scope", "crio-<id>"; not conmon, which only
# watches a container.
_CONTAINER = re.compile(rf"(?:(?!crio-conmon)[a-z][a-z-]*-)?({_ID})(?:\.scope)?")
_SLURM_V1 = re.compile(r"slurm(?:_[A-Za-z0-9._-]{1,64})?")
_SLURM_V2 = re.compile(r"(?:[A-Za-z0-9._-]{1,64}_)?slurmstepd\.scope")
_UID_PART = re.compile(r"uid_[0-9]{1,10}")
_JOB = re.compile(r"job_([0-9]{1,10})")
_STEP = re.compile(r"step_([A-Za-z0-9.+_]{1,32})")
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,240}\.(?:service|scope)")
_USER_MANAGER = re.compile(r"user@[0-9]+\.service")
_FIRST = ("", "name=systemd", "memory", "cpu", "cpuset", "pids", "devices", "freezer")


@dataclass(frozen=True)
class Ids:
    """What a process belongs to; "" where the path does not say. `pod` is the uid with dashes, of
    a static pod its hash; `container` 64 hexadecimal digits."""

    pod: str = ""
    container: str = ""
    slurm_job: str = ""
    slurm_step: str = ""
    unit: str = ""


def parse(text: bytes) -> Ids:
    """Whatever the bytes are; what is beyond the bounds is not looked at.

    Of the hierarchies of version 1 the first counts that names a pod, else that names a Slurm job,
    else a container, else a unit; version 2 before all of them.
    """
    found = [ids_of(path) for path in _paths(text[:MAX_BYTES])]
    for wanted in ("pod", "slurm_job", "container", "unit"):
        for ids in found:
            if getattr(ids, wanted):
                return ids
    return Ids()


def _paths(text: bytes) -> list[str]:
    """Different paths, those first whose controller says most."""
    rows: list[tuple[int, str]] = []
    for line in text.split(b"\n", MAX_LINES)[:MAX_LINES]:
        fields = line.split(b":", 2)
        if len(fields) != 3 or len(fields[2]) > MAX_PATH or not fields[2].startswith(b"/"):
            continue
        names = fields[1].decode("ascii", "replace").split(",")
        order = min((_FIRST.index(name) for name in names if name in _FIRST), default=len(_FIRST))
        rows.append((order, fields[2].decode("utf-8", "replace").removesuffix(" (deleted)")))
    rows.sort(key=lambda row: row[0])
    return list(dict.fromkeys(path for _, path in rows))


def ids_of(path: str) -> Ids:
    """Of one cgroup path, such as "/kubepods/burstable/pod<uid>/<id>"."""
    parts = [part for part in path.split("/")[: MAX_PARTS + 1] if part]
    above = bool(parts) and parts[0] == ".."
    parts = [part for part in parts if part != ".."]
    if not parts:
        return Ids()
    unit = _unit(parts)
    if parts[0] == "user.slice":
        return Ids(unit=unit)
    pod, container = _pod(parts, above)
    if pod:
        return Ids(pod=pod, container=container)
    job, step = _slurm(parts)
    if job:
        return Ids(slurm_job=job, slurm_step=step, container=_container(parts), unit=unit)
    return Ids(container=_container(parts), unit=unit)


def _pod(parts: list[str], above: bool) -> tuple[str, str]:
    for i, part in enumerate(parts):
        match = _POD.fullmatch(part)
        if match is None:
            continue
        if not above and not any("kubepods" in one for one in parts[: i + 1]):
            continue
        uid = match[1].replace("_", "-")
        return uid, match[2] or _container(parts[i + 1 :])
    return "", ""


def _container(parts: list[str]) -> str:
    """The outermost."""
    for part in parts:
        match = _CONTAINER.fullmatch(part)
        if match is not None:
            return match[1]
    return ""


def _slurm(parts: list[str]) -> tuple[str, str]:
    """Version 1: slurm/uid_U/job_J/step_S/...; version 2: .../slurmstepd.scope/job_J/step_S/..."""
    for i, part in enumerate(parts):
        rest = parts[i + 1 :]
        if _SLURM_V1.fullmatch(part) and rest and _UID_PART.fullmatch(rest[0]):
            rest = rest[1:]
        elif not _SLURM_V2.fullmatch(part):
            continue
        job = _JOB.fullmatch(rest[0]) if rest else None
        if job is None:
            continue
        step = _STEP.fullmatch(rest[1]) if len(rest) > 1 else None
        return job[1], step[1] if step else ""
    return "", ""


def _unit(parts: list[str]) -> str:
    """The system's unit; of what a user's manager started, the user's."""
    for i, part in enumerate(parts):
        if _UNIT.fullmatch(part):
            inner = _unit(parts[i + 1 :]) if _USER_MANAGER.fullmatch(part) else ""
            return inner or part
        if not part.endswith(".slice"):
            return ""
    return ""
