"""`lanterne-agent --dry-run`: what it would do here, found out without doing it.

No BPF program is loaded and nothing is written: what `doctor` tries out beyond that, its self-test,
is left to it.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lanterne.agent import doctor, support
from lanterne.agent import doctor_deployment as deployment
from lanterne.agent.config import AgentConfig
from lanterne.agent.doctor_view import LibraryView, Report, Row, render_rows


def run(
    config: AgentConfig,
    *,
    as_json: bool,
    file: Path | None = None,
    proc: Path = Path("/proc"),
) -> int:
    """Print what would happen; 0 where the agent would run as configured, else 1."""
    rows = [*_host_rows(config, proc), *doctor.deployment_rows(config, file)]
    listen = deployment.listen_row("metrics.listen", config.metrics.listen)
    rows += [listen] if listen else []
    libraries: tuple[LibraryView, ...] = ()
    if config.probes.enabled:
        found, libraries = doctor.survey(config, proc)
        rows += found
    report = doctor.report(rows, libraries)
    would = list(_would(config, report))
    if as_json:
        print(json.dumps(asdict(report) | {"would": would}, indent=2))
    else:
        lines = render_rows(report, shutil.get_terminal_size((100, 24)).columns)
        print("\n".join([*lines, "", *would]))
    return 0 if report.works else 1


def _host_rows(config: AgentConfig, proc: Path) -> Iterator[Row]:
    if not config.probes.enabled:
        yield Row("probes", "info", "switched off (probes.enabled)")
    else:
        held, problems = support.without_asking(proc)
        capabilities = ", ".join(held) or "none of those needed"
        yield Row("kernel", "info", f"Linux {platform.release()}; capabilities: {capabilities}")
        for problem in problems:
            what, _, remedy = problem.partition(": ")
            yield Row("kernel", "fail", what, remedy)
        yield doctor.interpreter_row(config.probes.interpreter)
    yield from doctor.nvml_rows(config.sources.nvml)


def _would(config: AgentConfig, report: Report) -> Iterator[str]:
    failed = [row for row in report.rows if row.status == "fail"]
    if failed:
        checks = ", ".join(dict.fromkeys(row.check for row in failed))
        yield f"It would not work as configured: {checks} (above)."
        return
    attached = [library for library in report.libraries if library.state == "attached"]
    if config.probes.enabled:
        yield f"It would attach to {_sites(attached)}."
    yield (
        f"It would report as node {config.node.name} to {', '.join(config.collector.addresses)}, "
        f"every {config.window.seconds:g} s."
    )
    kept = config.spool.path or f"memory, {config.collector.queue_batches} batches at most"
    yield f"It would keep what is not acknowledged in {kept}."
    if config.metrics.listen:
        secured = f", secured by {config.metrics.web_config}" if config.metrics.web_config else ""
        yield f"It would serve its metrics at {config.metrics.listen}{secured}."


def _sites(libraries: Sequence[LibraryView]) -> str:
    if not libraries:
        return "nothing yet: no process maps a library that can be probed"
    sites = sum(len(library.sites) for library in libraries)
    pids = {pid for library in libraries for pid in library.pids}
    return f"{sites} places in {len(libraries)} libraries of {len(pids)} processes"
