"""What `doctor` found, and how it is shown: rows of checks, libraries with their probe sites.

Pure: everything is computed from values. Paths, symbols and messages are made printable here, since
the job chooses them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lanterne.agent.discover import ProcessInfo
from lanterne.agent.library import AttachedLibrary
from lanterne.agent.process import printable

Status = Literal["ok", "info", "warn", "fail"]

TEXT_LIMIT = 400
MAX_DROPPED = 8  # rows of one library


@dataclass(frozen=True)
class Row:
    check: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class SiteView:
    symbol: str
    offset: int  # in the file
    cheap: bool | None  # None: the instruction was not recognised
    first_instruction: str  # at the probe
    skip: int = 0  # bytes past the function's entry


@dataclass(frozen=True)
class LibraryView:
    path: str  # as the job sees it
    kind: str
    version: str
    build_id: str
    state: str
    error: str
    pids: tuple[int, ...]
    sites: tuple[SiteView, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    version: str
    works: bool  # the basic level: probes load and attach here
    rows: tuple[Row, ...]
    libraries: tuple[LibraryView, ...] = ()


def library_views(
    libraries: Mapping[tuple[int, int], AttachedLibrary], processes: Mapping[int, ProcessInfo]
) -> tuple[LibraryView, ...]:
    """What was found, free of terminal escapes: paths and symbols are chosen by the job."""
    users: dict[tuple[int, int], list[int]] = {}
    for pid, process in processes.items():
        for key in process.libraries:
            users.setdefault(key, []).append(pid)
    return tuple(
        LibraryView(
            path=clean(library.path),
            kind=library.kind,
            version=nccl_version(library.nccl_version),
            build_id=clean(library.build_id),
            state=library.state,
            error=clean(library.error),
            pids=tuple(sorted(users.get(key, ()))),
            sites=tuple(
                SiteView(clean(s.symbol), s.offset, s.cheap, clean(s.first_instruction), s.skip)
                for s in library.sites
            ),
            dropped=tuple(map(clean, library.dropped)),
        )
        for key, library in sorted(libraries.items(), key=lambda item: item[1].path)
    )


def nccl_version(number: int | None) -> str:
    """22809 is "2.28.9", "" is unknown: NCCL counts major * 10000 + minor * 100 + patch."""
    if not number:
        return ""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def library_rows(libraries: Sequence[LibraryView]) -> list[Row]:
    if not libraries:
        detail = "no process maps a library that can be probed"
        return [Row("libraries", "info", detail, "start the job; the agent finds it by itself")]
    rows = []
    for library in libraries:
        name = f"{library.path} ({' '.join(filter(None, (library.kind, library.version)))})"
        if library.state == "failed":
            remedy = "the others are not affected; look at the file, if its process still runs"
            rows.append(Row("library", "warn", f"{name}: {library.error}", remedy))
            continue
        if library.state == "nothing_to_probe":
            rows.append(Row("library", "info", f"{name}: nothing to probe. {library.error}"))
            continue
        cheap = sum(site.cheap is True for site in library.sites)
        detail = (
            f"{name}: {len(library.sites)} probes ({cheap} cheap), {len(library.pids)} processes"
        )
        moved = [site.symbol for site in library.sites if site.skip and site.cheap]
        if moved:
            detail += (
                f"; {len(moved)} placed behind a first instruction that would be single-stepped "
                f"(some 15 times as much a call): {_some(moved)}"
            )
        costly = [site.symbol for site in library.sites if site.cheap is False]
        if costly:
            remedy = "each call there costs 13 to 20 µs; exclude the library if that is too much"
            rows.append(Row("library", "warn", f"{detail}; costly: {_some(costly)}", remedy))
        else:
            rows.append(Row("library", "ok", detail))
        for text in library.dropped[:MAX_DROPPED]:
            remedy = "calls of this function are not seen; the others are"
            rows.append(Row("library", "warn", f"{name}: {text}", remedy))
    return rows


def blind_rows(
    libraries: Mapping[tuple[int, int], AttachedLibrary], processes: Mapping[int, ProcessInfo]
) -> list[Row]:
    """What cannot be seen here, so that silence is not taken for health."""
    rows = []
    for library in libraries.values():
        if library.kind == "nccl" and library.state == "attached" and library.comm_offsets is None:
            detail = f"{library.path}: layout of its communicators unknown"
            remedy = "start the agent before the job: then their creation is seen"
            rows.append(Row("cannot see", "warn", detail, remedy))
    kinds = {
        pid: {libraries[key].kind for key in process.libraries if key in libraries}
        for pid, process in processes.items()
    }
    alone = [pid for pid, found in kinds.items() if found == {"cuda"}]
    if alone:
        detail = f"processes with CUDA and no NCCL that can be probed: {_some(map(str, alone))}"
        rows.append(
            Row("cannot see", "info", detail, "normal for single-GPU jobs; else NCCL is static")
        )
    no_sync = [pid for pid, found in kinds.items() if "nccl" in found and "cuda" not in found]
    if no_sync:
        detail = f"no libcuda in NCCL processes {_some(map(str, no_sync))}: waits will be absent"
        rows.append(
            Row("cannot see", "info", detail, "synchronise calls are the evidence of waits")
        )
    detail = "collectives replayed from CUDA graphs, and a slow GPU behind a host that runs ahead"
    rows.append(Row("cannot see", "info", detail, "the agent counts blind graph launches"))
    return rows


def steps_rows(told: Mapping[str, float]) -> list[Row]:
    """`told`: by the agent that runs here (agent.running); nothing where none does."""
    steps = told.get("lanterne_agent_steps_total")
    blind = told.get("lanterne_agent_blind_steps_total")
    if not steps or blind is None:
        return []
    detail = (
        f"of {steps:.0f} steps since the agent started, {blind:.0f} ran their collectives in CUDA "
        f"graphs where nobody sees them ({blind / steps:.0%})"
    )
    if not blind:
        return [Row("steps", "ok", detail)]
    return [Row("steps", "warn", detail, "load the profiler plugin into the job: it tells them")]


def render(report: Report, width: int) -> str:
    """The table, and the verdict."""
    verdict = "Lanterne works on this host." if report.works else "Lanterne does not work here yet."
    return "\n".join([*render_rows(report, width), "", verdict])


def render_rows(report: Report, width: int) -> list[str]:
    """Status, check, detail; the remedy on a line of its own; then the libraries."""
    width = max(60, width)
    column = max(len(row.check) for row in report.rows) + 2
    lines = []
    for row in report.rows:
        lines += _wrap(f"{row.status:<6}{row.check:<{column}}", row.detail, width)
        if row.remedy:
            lines += _wrap(" " * (6 + column), "-> " + row.remedy, width)
    for library in report.libraries:
        pids = _some(map(str, library.pids)) or "none"
        lines += ["", f"{library.path}  (processes: {pids}; build id {library.build_id or 'none'})"]
        for site in library.sites:
            cost = {True: "cheap", False: "costly", None: "?"}[site.cheap]
            symbol = f"{site.symbol}+{site.skip}" if site.skip else site.symbol
            lines.append(f"  {site.offset:#10x}  {cost:<7}{symbol}  [{site.first_instruction}]")
    return lines


def _wrap(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [
        head.rstrip()
    ]


def _count(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}es"


def _some(names: Iterable[str], most: int = 6) -> str:
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def clean(text: str) -> str:
    """One printable line."""
    return printable(" ".join(text.split()), TEXT_LIMIT)
