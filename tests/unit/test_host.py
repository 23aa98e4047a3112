"""agent/host.py: the parsers on literal kernel text, the reader on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import psutil
import pytest

from lanterne.agent.host import (
    HostReader,
    parse_cgroup,
    parse_pressure,
    parse_run_queue_seconds,
)
from tests.stack import wait_for

STAT = (
    b"7 (py (th) 1) x) S 1 7 7 0 -1 4194304 100 0 0 0 12 34 0 0 20 0 5 0 987654 1000000 250"
    b" 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 3 0 0 0 0 0\n"
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"187038887 12934652 441\n", 0.012934652), (b"0 0 0\n", 0.0), (b"", None), (b"1 x 2", None)],
)
def test_run_queue(text: bytes, seconds: float | None) -> None:
    assert parse_run_queue_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        (
            b"some avg10=12.50 avg60=0.22 avg300=0.94 total=15309304\nfull avg10=99.00 avg60=0\n",
            0.125,
        ),
        (b"full avg10=3.00 avg60=0.00 avg300=0.00 total=0\n", None),
        (b"some avg10=oops\n", None),
        (b"", None),
    ],
)
def test_pressure(text: bytes, ratio: float | None) -> None:
    assert parse_pressure(text) == ratio


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"12:memory:/old\n0::/kubepods/pod1/c1\n", PurePosixPath("kubepods/pod1/c1")),
        (b"0::/\n", PurePosixPath(".")),
        (b"0::/../../etc\n", None),  # above the reader's cgroup namespace
        (b"4:memory:/only/v1\n", None),
        (b"", None),
    ],
)
def test_cgroup(text: bytes, path: PurePosixPath | None) -> None:
    assert parse_cgroup(text) == path


def test_reads_a_real_process_and_leaves_out_a_dead_one() -> None:
    burner = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
    child = subprocess.Popen(
        [sys.executable, "-c", burner + "print('up', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        reader = HostReader()
        readings = reader.read([child.pid, os.getpid()])
        reading = readings[child.pid]
        assert reading.cpu_seconds is not None
        assert reading.cpu_seconds >= 0.19
        assert reading.rss_bytes is not None
        assert reading.rss_bytes > 1 << 20
        assert reading.start_ticks > readings[os.getpid()].start_ticks > 0
        assert reading.command.startswith("python")
    finally:
        child.communicate(b"\n")
    assert reader.read([child.pid]) == {}


def test_a_stopped_process_is_told_until_it_goes_on() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        reader = HostReader()
        assert reader.read([child.pid])[child.pid].stopped is False
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: reader.read([child.pid])[child.pid].stopped, 10, "told as stopped")
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: not reader.read([child.pid])[child.pid].stopped, 10, "told to go on")
    finally:
        child.kill()
        child.wait()


def test_a_process_in_a_frozen_cgroup_is_stopped() -> None:
    """A real one: its tasks look as if they slept."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    root = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    if root is None:
        pytest.skip("no cgroup of version 2 is mounted")
    group = root / f"lanterne-frozen-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of version 2 can be made: {error}")
    child = subprocess.Popen(["sleep", "60"])
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        reader = HostReader(cgroups=root)
        assert reader.read([child.pid])[child.pid].stopped is False
        (group / "cgroup.freeze").write_text("1")
        wait_for(lambda: reader.read([child.pid])[child.pid].stopped, 10, "told as stopped")
        assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
    finally:
        (group / "cgroup.freeze").write_text("0")
        child.kill()
        child.wait()
        wait_for(lambda: not (group / "cgroup.procs").read_text(), 10, "the cgroup to be empty")
        group.rmdir()


def test_a_hostile_process_name_is_made_printable() -> None:
    rename = (
        "import ctypes\n"
        "ctypes.CDLL(None).prctl(15, b'\\x1b]0;own\\x07\\n', 0, 0, 0)\n"  # PR_SET_NAME
        "print('up', flush=True)\ninput()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert HostReader().read([child.pid])[child.pid].command == "?]0;own??"
    finally:
        child.communicate(b"\n")


def fake_proc(root: Path, cgroup: str) -> Path:
    """A /proc elsewhere, as when the host's is mounted into a container, with one process 7."""
    proc = root / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "stat").write_text(f"cpu  1 2 3 4\nbtime {int(time.time())}\n")
    (proc / "7" / "stat").write_bytes(STAT)
    (proc / "7" / "statm").write_text("1000 250 100 1 0 50 0\n")
    (proc / "7" / "cmdline").write_bytes(b"python\0")
    (proc / "7" / "cgroup").write_text(f"0::{cgroup}\n")
    (proc / "pressure").mkdir()
    (proc / "pressure" / "cpu").write_text("some avg10=50.00 avg60=0 avg300=0 total=0\n")
    return proc


@pytest.fixture
def real_proc_afterwards() -> object:
    yield
    HostReader()


@pytest.mark.usefixtures("real_proc_afterwards")
def test_pressure_of_the_cgroup_wins_over_the_hosts(tmp_path: Path) -> None:
    cgroups = tmp_path / "cgroup"
    (cgroups / "job").mkdir(parents=True)
    (cgroups / "job" / "cpu.pressure").write_text("some avg10=25.00 avg60=0 avg300=0 total=0\n")
    proc = fake_proc(tmp_path, "/job")
    reading = HostReader(proc, cgroups=cgroups).read([7])[7]
    assert reading.cpu_pressure_ratio == 0.25
    assert reading.memory_pressure_ratio is None
    assert reading.start_ticks == 987654
    assert reading.run_queue_seconds is None
    assert reading.rss_bytes == 250 * os.sysconf("SC_PAGE_SIZE")
    (cgroups / "job" / "cpu.pressure").unlink()
    assert HostReader(proc, cgroups=cgroups).read([7])[7].cpu_pressure_ratio == 0.5
