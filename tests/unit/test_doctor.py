"""agent/doctor.py: checks on real sockets and interpreters, the view on hostile input."""

from __future__ import annotations

import json
import re
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lanterne.agent import doctor
from lanterne.agent.attach import AttachedLibrary, ProcessInfo, Site
from lanterne.agent.doctor_view import (
    Report,
    Row,
    blind_rows,
    clean,
    library_rows,
    library_views,
    nccl_version,
    render,
)
from lanterne.agent.kernel import KernelSupport

HOSTILE = "/tmp/\x1b[2J\x1b]0;owned\x07/libnccl.so.2\n fake row \u202e"


def library(path: str = "/usr/lib/libnccl.so.2", **changes: object) -> AttachedLibrary:
    fields: dict[str, object] = {
        "path": path,
        "host_path": path,
        "kind": "nccl",
        "build_id": "ab12",
        "nccl_version": 22809,
        "comm_offsets": None,
        "sites": (
            Site(1, "pncclAllReduce", 0x4A2B0, True, "push rbp"),
            Site(2, "pncclSend", 0x4A3B0, False, "sub rsp, 8"),
        ),
        "state": "attached",
        "error": "",
    }
    return AttachedLibrary(**(fields | changes))  # type: ignore[arg-type]


def process(pid: int, *keys: tuple[int, int]) -> ProcessInfo:
    return ProcessInfo(pid, 1, keys)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[none] integrity confidentiality\n", "ok"),
        ("none [integrity] confidentiality\n", "ok"),
        ("none integrity [confidentiality]\n", "warn"),
        (None, "ok"),
    ],
)
def test_lockdown(text: str | None, status: str) -> None:
    assert doctor.lockdown_row(text).status == status


def test_run_times_of_probes() -> None:
    assert doctor.stats_row("1\n").status == "ok"
    assert "bpf_stats_enabled=1" in doctor.stats_row("0\n").remedy
    assert doctor.stats_row(None).status == "info"


@pytest.mark.parametrize("interpreter", [sys.executable, "/nonexistent/python", "/bin/false"])
def test_an_interpreter_without_bcc_fails_with_the_remedy(interpreter: str) -> None:
    row = doctor.interpreter_row(interpreter)
    assert row.status == "fail"
    assert interpreter in row.detail
    assert "python3-bpfcc" in row.remedy


def test_collector_reachability_on_real_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert doctor.collector_row(address).status == "ok"
    row = doctor.collector_row(address)
    assert row.status == "warn"
    assert "lanterne-collector" in row.remedy


def test_every_problem_of_the_kernel_is_a_failed_row_with_its_remedy() -> None:
    support = KernelSupport(
        release="5.10.0",
        bpf=True,
        uprobe_multi=False,
        perf_uprobe=False,
        ringbuf=False,
        cookies=False,
        capabilities=(),
        problems=("the kernel has no attach cookies: use Linux 5.15 or newer",),
    )
    rows = list(doctor.kernel_rows(support))
    failed = [row for row in rows if row.status == "fail"]
    assert [row.remedy for row in failed] == ["use Linux 5.15 or newer"]
    assert "5.10.0" in rows[0].detail
    assert "missing: ring buffer" in rows[0].detail


def test_nvml_switched_off_is_no_failure() -> None:
    (row,) = doctor.nvml_rows(False)
    assert row.status == "info"


@pytest.mark.parametrize(
    ("number", "text"),
    [(22809, "2.28.9"), (22105, "2.21.5"), (23203, "2.32.3"), (None, ""), (0, "")],
)
def test_nccl_version(number: int | None, text: str) -> None:
    assert nccl_version(number) == text


def test_hostile_names_reach_neither_terminal_nor_json_raw() -> None:
    libraries = {(1, 2): library(HOSTILE, error=HOSTILE, build_id="\x1b[31m", state="failed")}
    views = library_views(libraries, {7: process(7, (1, 2))})
    rows = (*library_rows(views), Row("process", "warn", clean(HOSTILE)))
    report = Report("0", True, rows, views)
    shown = render(report, 100)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert not any(line.lstrip().startswith("fake row") for line in shown.splitlines())
    assert json.loads(json.dumps(asdict(report)))["libraries"][0]["pids"] == [7]


def test_costly_sites_are_a_warning_that_names_them() -> None:
    views = library_views({(1, 2): library()}, {7: process(7, (1, 2)), 8: process(8, (1, 2))})
    (row,) = library_rows(views)
    assert row.status == "warn"
    assert "2 probes (1 cheap), 2 processes" in row.detail
    assert "pncclSend" in row.detail
    shown = render(Report("0", True, (row,), views), 100)
    assert re.search(r"0x4a2b0 +cheap +pncclAllReduce +\[push rbp\]", shown)
    assert re.search(r"0x4a3b0 +costly +pncclSend", shown)


def test_nothing_found_says_what_to_do() -> None:
    (row,) = library_rows(())
    assert (row.status, bool(row.remedy)) == ("info", True)


def test_blindness_is_told() -> None:
    nccl, cuda = (1, 1), (1, 2)
    libraries = {nccl: library(), cuda: library("/usr/lib/libcuda.so.1", kind="cuda")}
    processes = {10: process(10, nccl), 11: process(11, cuda), 12: process(12, nccl, cuda)}
    details = [row.detail for row in blind_rows(libraries, processes)]
    assert any("layout of its communicators unknown" in text for text in details)
    assert any("no NCCL that can be probed: 11" in text for text in details)
    assert any("no libcuda in NCCL processes 10" in text for text in details)
    assert any("CUDA graphs" in text for text in details)


def test_a_long_remedy_wraps_inside_the_width() -> None:
    row = Row("check", "fail", "word " * 60, "remedy " * 60)
    shown = render(Report("0", False, (row,), ()), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "does not work here" in shown


def test_an_unreadable_path_is_no_text(tmp_path: Path) -> None:
    assert doctor._text(tmp_path / "none") is None
