"""`lanterne-agent doctor`: what would work on this host, what would not, and the remedy.

Every check is a function that gives rows and never raises. `examine` runs them; `run` shows them as
a table or as JSON. Nothing stays behind: programs and links live as long as their descriptors,
which are closed before the table is printed.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from lanterne.agent import doctor_deployment as deployment
from lanterne.agent import kernel, running
from lanterne.agent.attach import Attacher
from lanterne.agent.config import AgentConfig
from lanterne.agent.discover import MAX_MAPS_READ
from lanterne.agent.doctor_view import (
    LibraryView,
    Report,
    Row,
    Status,
    blind_rows,
    clean,
    library_rows,
    library_views,
    render,
    steps_rows,
)
from lanterne.agent.errors import AgentError
from lanterne.agent.nvml import Nvml

CONNECT_SECONDS = 2.0
REACH_SECONDS = 4.0  # for a first answer and a few more
ENOUGH_ROUND_TRIPS = 5
INTERPRETER_SECONDS = 20.0
MAX_PROBLEM_ROWS = 20
MAX_SCANS = 40


def run(config: AgentConfig, *, as_json: bool, file: Path | None = None) -> int:
    """Print the report; 0 where the basic level works, else 1. `file`: of the configuration."""
    report = examine(config, file=file)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(render(report, shutil.get_terminal_size((100, 24)).columns))
    return 0 if report.works else 1


def examine(
    config: AgentConfig,
    *,
    file: Path | None = None,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> Report:
    support = kernel.probe_support()
    rows = [
        *kernel_rows(support),
        lockdown_row(_text(sys / "kernel/security/lockdown")),
        btf_row((sys / "kernel/btf/vmlinux").exists()),
        stats_row(_text(proc / "sys/kernel/bpf_stats_enabled")),
        interpreter_row(config.probes.interpreter),
    ]
    can_load = not any(row.status == "fail" for row in rows)
    rows.append(self_test_row(config, can_load))
    rows += nvml_rows(config.sources.nvml)
    rows += deployment_rows(config, file)
    found_rows, libraries = survey(config, proc)
    rows += found_rows
    metrics = config.metrics
    told = running.read(metrics.listen, secured=bool(metrics.web_config)) if metrics.listen else {}
    rows += steps_rows(told)
    return report(rows, libraries)


def report(rows: Sequence[Row], libraries: tuple[LibraryView, ...] = ()) -> Report:
    works = not any(row.status == "fail" for row in rows)
    shown = tuple(Row(r.check, r.status, clean(r.detail), clean(r.remedy)) for r in rows)
    return Report(metadata.version("lanterne"), works, shown, libraries)


def deployment_rows(config: AgentConfig, file: Path | None = None) -> Iterator[Row]:
    """TLS, each collector as the agent would reach it, spool, permissions, kubelet."""
    yield from deployment.writable_by_others("configuration", file)
    tls = config.tls
    yield from deployment.tls_rows(tls.ca, tls.cert, tls.key)
    yield from deployment.secret_rows(("collector.token_file", config.collector.token_file))
    for address in config.collector.addresses:
        row, numbers = deployment.resolved(address)
        yield row
        if not numbers:
            continue
        reached = collector_row(address)
        yield reached
        if reached.status != "ok":
            continue
        if tls.ca:
            yield deployment.tls_server_row(address, tls.ca, tls.cert, tls.key, tls.server_name)
        yield deployment.clock_row(address, *reach(config, address))
    metrics = config.metrics
    yield from deployment.web_config_rows(metrics.listen, metrics.web_config)
    spool, kubernetes = config.spool, config.kubernetes
    yield from deployment.spool_rows(spool.path, spool.max_bytes)
    yield from deployment.kubelet_rows(
        kubernetes.enabled, kubernetes.pod_resources_socket, kubernetes.token_file
    )


def reach(config: AgentConfig, address: str) -> tuple[float | None, str]:
    """Frames without a batch on a stream as the agent's -> (error of the clocks in seconds, what
    is wrong)."""
    from lanterne.agent.credentials import Credentials, Files
    from lanterne.agent.stream import Stream  # loads grpc

    tls = config.tls
    files = Files(tls.ca, tls.cert, tls.key, config.collector.token_file, tls.server_name)
    credentials = Credentials(files)
    stream = Stream((address,), config.node.name, heartbeat=0.1, credentials=credentials)
    stream.start()
    deadline = time.monotonic() + REACH_SECONDS
    while time.monotonic() < deadline and stream.round_trips < ENOUGH_ROUND_TRIPS:
        if stream.last_error:
            break
        time.sleep(0.05)
    stream.close(0.0)
    best = stream.round_trip_seconds
    return (None if best is None else best / 2), stream.last_error


def kernel_rows(support: kernel.KernelSupport) -> Iterator[Row]:
    features = {
        "BPF": support.bpf,
        "ring buffer": support.ringbuf,
        "cookies": support.cookies,
        "multi-uprobe": support.uprobe_multi,
        "perf uprobe": support.perf_uprobe,
    }
    have = ", ".join(name for name, there in features.items() if there)
    missing = ", ".join(name for name, there in features.items() if not there)
    detail = f"Linux {support.release}: {have or 'nothing that the probes need'}"
    status: Status = "info" if support.problems else "ok"
    yield Row("kernel", status, detail + (f"; missing: {missing}" if missing else ""))
    yield Row("capabilities", status, ", ".join(support.capabilities) or "none of those needed")
    for problem in support.problems[:MAX_PROBLEM_ROWS]:
        what, _, remedy = problem.partition(": ")
        yield Row("kernel", "fail", what, remedy)


def lockdown_row(text: str | None) -> Row:
    """`text`: /sys/kernel/security/lockdown, where the mode in force stands in brackets."""
    mode = (text or "").partition("[")[2].partition("]")[0]
    if mode == "confidentiality":
        detail = "confidentiality: no BPF program may read the kernel's memory; the agent's do not"
        remedy = "should the self-test fail all the same: boot with lockdown=integrity"
        return Row("lockdown", "info", detail, remedy)
    return Row("lockdown", "ok", mode or "not built in")


def btf_row(there: bool) -> Row:
    detail = "there" if there else "not there"
    return Row("BTF", "info", f"{detail}; neither BTF nor kernel headers are needed")


def stats_row(text: str | None) -> Row:
    if (text or "").strip() == "1":
        return Row("probe run times", "ok", "the kernel counts them")
    remedy = "to have them in the agent's metrics: sysctl kernel.bpf_stats_enabled=1"
    return Row("probe run times", "info", "not counted (costs some 20 ns a run)", remedy)


def interpreter_row(interpreter: str) -> Row:
    """Only bcc's interpreter can compile the programs: another Python than the agent's."""
    remedy = "apt-get install python3-bpfcc, or set probes.interpreter to a Python that has bcc"
    try:
        done = subprocess.run(
            [interpreter, "-c", "import bcc; print(bcc.__version__)"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=INTERPRETER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row("bcc", "fail", f"{interpreter} does not run: {error}", remedy)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row("bcc", "fail", f"{interpreter} cannot import bcc: {last}", remedy)
    return Row("bcc", "ok", f"{done.stdout.strip()} under {interpreter}")


def nvml_rows(wanted: bool) -> Iterator[Row]:
    if not wanted:
        yield Row("NVML", "info", "switched off (sources.nvml)")
        return
    nvml = Nvml()
    try:
        if not nvml.available:
            yield Row("NVML", "info", nvml.reason)
            return
        gpus = nvml.read()
        names = Counter(gpu.name for gpu in gpus)
        yield Row("NVML", "ok", ", ".join(f"{n} × {name}" for name, n in names.items()) or "no GPU")
        silent = Counter(
            name for gpu in gpus for name, value in asdict(gpu).items() if value is None
        )
        if silent:
            what = ", ".join(f"{name} on {n}" for name, n in sorted(silent.items()))
            yield Row("NVML", "info", f"not given by this driver or GPU: {what}")
    finally:
        nvml.close()


def collector_row(address: str) -> Row:
    host, _, port = address.rpartition(":")
    check = f"collector {address}"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return Row(check, "ok", "accepts connections")
    except OSError as error:
        why = error.strerror or str(error)
        remedy = "start lanterne-collector there, or set collector.addresses"
        return Row(check, "warn", f"not reachable: {why}", remedy)


def self_test_row(config: AgentConfig, can_load: bool) -> Row:
    """Compile, verify and load the programs as the agent would, and let them go again."""
    settings = config.probes
    if not settings.enabled:
        return Row("self-test", "info", "probes are switched off (probes.enabled)")
    if not can_load:
        return Row("self-test", "info", "not tried, because of the above")
    started = time.monotonic()
    try:
        with kernel.load(
            ring_bytes=settings.ring_bytes,
            comm_ring_bytes=settings.comm_ring_bytes,
            device_ring_bytes=settings.device_ring_bytes,
            kernel_ring_bytes=settings.kernel_ring_bytes,
            interpreter=settings.interpreter,
            method=settings.method,
        ) as programs:
            method = {"multi": "multi-uprobe links", "perf": "perf events"}[programs.method]
    except AgentError as error:
        return Row("self-test", "fail", str(error))
    took = time.monotonic() - started
    return Row("self-test", "ok", f"programs compile, verify and load in {took:.1f} s; {method}")


def survey(config: AgentConfig, proc: Path) -> tuple[list[Row], tuple[LibraryView, ...]]:
    """Which processes map which library, and where probes would go. Attaches nothing."""
    settings = config.probes
    # One scan reads a bounded number of processes.
    scans = 1 + sum(path.name.isdigit() for path in proc.iterdir()) // MAX_MAPS_READ
    with Attacher(
        None,
        proc=proc,
        include=settings.include,
        exclude=settings.exclude,
        look_into=settings.look_into,
    ) as attacher:
        for _ in range(min(scans, MAX_SCANS)):
            attacher.scan()
        libraries, processes = dict(attacher.libraries), dict(attacher.processes)
    views = library_views(libraries, processes)
    return library_rows(views) + blind_rows(libraries, processes), views


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return None
