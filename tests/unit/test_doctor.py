"""agent/doctor.py: checks on real sockets and interpreters, the view on hostile input."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lanterne.agent import config as configuration
from lanterne.agent import doctor, running
from lanterne.agent.discover import ProcessInfo
from lanterne.agent.doctor_view import (
    Report,
    Row,
    blind_rows,
    clean,
    library_rows,
    library_views,
    nccl_version,
    render,
    steps_rows,
)
from lanterne.agent.kernel import KernelSupport
from lanterne.agent.library import AttachedLibrary, Site

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
        ("none integrity [confidentiality]\n", "info"),
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


def test_moved_and_dropped_sites_are_told() -> None:
    sites = (
        Site(1, "pncclAllReduce", 0x1004, True, "push rbp", skip=4),
        Site(2, "pncclSend", 0x2000, True, "push rbp"),
    )
    dropped = ("pncclRecv: the kernel takes no probe at its first instruction, ldr x0, #8",)
    views = library_views({(1, 2): library(sites=sites, dropped=dropped)}, {})
    moved, left_out = library_rows(views)
    assert moved.status == "ok"
    assert re.search(r"2 probes \(2 cheap\).* 1 placed behind .*: pncclAllReduce$", moved.detail)
    assert left_out.status == "warn"
    assert "pncclRecv" in left_out.detail
    shown = render(Report("0", True, (moved,), views), 100)
    assert re.search(r"0x1004 +cheap +pncclAllReduce\+4 +\[push rbp\]", shown)


def test_nothing_found_says_what_to_do() -> None:
    (row,) = library_rows(())
    assert (row.status, bool(row.remedy)) == ("info", True)


@pytest.mark.parametrize(
    ("page", "status", "text"),
    [
        ("lanterne_agent_steps_total 40.0\nlanterne_agent_blind_steps_total 10.0\n", "warn", "25%"),
        ("lanterne_agent_steps_total 4e+01\nlanterne_agent_blind_steps_total 0.0\n", "ok", "0 ran"),
        ("lanterne_agent_steps_total 0.0\nlanterne_agent_blind_steps_total 0.0\n", "", ""),
        ("nothing\n", "", ""),
    ],
)
def test_blind_steps_of_the_agent_that_runs_here(page: str, status: str, text: str) -> None:
    rows = steps_rows(running.parse(page.encode()))
    assert [row.status for row in rows] == ([status] if status else [])
    assert all(text in row.detail for row in rows)


def test_no_agent_runs_here() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening
        assert running.read(f"127.0.0.1:{unused.getsockname()[1]}") == {}
    assert running.read("nowhere") == {}


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


def test_the_survey_finds_a_running_job_and_attaches_nothing(tmp_path: Path) -> None:
    from tests.rig import rig

    # A copy of the libraries: other inodes than those that other tests attach to.
    paths = rig.build(dest=tmp_path / "rig")
    with rig.running(rig.JobConfig(ranks=2, steps=0), paths=paths) as job:
        config = configuration.load(None, {}, {"probes.include": f"{tmp_path}/*"})
        rows, libraries = doctor.survey(config, Path("/proc"))
        (nccl,) = (library for library in libraries if library.kind == "nccl")
        assert nccl.path == str(paths.nccl)
        assert set(job.pids) <= set(nccl.pids)
        assert any("AllReduce" in s.symbol or "EnqueueCheck" in s.symbol for s in nccl.sites)
        assert all(site.cheap and site.offset > 0 for site in nccl.sites)
        assert any(row.check == "library" and str(paths.nccl) in row.detail for row in rows)
        original = paths.nccl.read_bytes()
        for site in nccl.sites:
            # A probed place holds a breakpoint, in the process and not in the file.
            mapped = code_at(job.pids[0], paths.nccl, site.offset)
            assert mapped == original[site.offset : site.offset + 1] != b"\xcc"


def code_at(pid: int, library: Path, offset: int) -> bytes:
    """The byte of the process's memory that maps this offset of the file."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, base, *_, name = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        inside = offset - int(base, 16)
        if name == str(library) and "x" in mode and 0 <= inside < end - start:
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(start + inside)
                return memory.read(1)
    raise AssertionError(f"{library} is not mapped at {offset:#x}")


def test_a_broken_library_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(b"\x7fELF" + bytes(8192))
    script = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)\n"
        "print('up', flush=True)\ninput()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, broken], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        config = configuration.load(None, {}, {"probes.include": f"{tmp_path}/*"})
        rows, libraries = doctor.survey(config, Path("/proc"))
    finally:
        child.communicate(b"\n")
    (library_,) = libraries
    assert (library_.state, library_.pids, library_.sites) == ("failed", (child.pid,), ())
    assert any(row.status == "warn" and str(broken) in row.detail for row in rows)


def command(*prefix: str) -> subprocess.CompletedProcess[str]:
    agent = Path(sys.executable).with_name("lanterne-agent")
    return subprocess.run(
        [*prefix, agent, "doctor", "--json", "--set", "probes.include=/nowhere/*"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.kernel
def test_here_it_works_and_says_so() -> None:
    done = command()
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["works"] is True
    status = {row["check"]: row["status"] for row in report["rows"]}
    assert (status["bcc"], status["self-test"]) == ("ok", "ok")


@pytest.mark.skipif(os.geteuid() != 0, reason="drops the capabilities that only root has")
def test_without_privileges_it_says_what_is_missing() -> None:
    done = command("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["works"] is False
    failed = [row for row in report["rows"] if row["status"] == "fail"]
    assert any("BPF" in row["detail"] for row in failed)
    assert all(row["remedy"] for row in failed)
