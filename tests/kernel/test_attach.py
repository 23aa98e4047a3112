"""Where and when libraries are found, attached and let go."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.errors import AttachError
from lanterne.agent.library import Site, examine
from lanterne.agent.links import Closer, Links
from tests.kernel.stub import Caller, compile_stub

pytestmark = pytest.mark.kernel

# What a uprobe puts in place of an instruction: int3; brk #5.
BREAKPOINT = {"x86_64": b"\xcc", "aarch64": bytes.fromhex("a00020d4")}[platform.machine()]
both_methods = pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)


def probed(pid: int, address: int) -> bool:
    """Whether a uprobe stands at the beginning of a function in another process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(len(BREAKPOINT)) == BREAKPOINT


def wait_until(condition: Any, seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return compile_stub(tmp_path / "lib", "nccl", enqueue=False)


@pytest.fixture
def attacher(loaded: Any, tmp_path: Path) -> Iterator[Any]:
    with loaded.attacher(tmp_path) as found:
        yield found


def test_attached_library_says_what_it_is(attacher: Any, library: Path) -> None:
    with Caller(library) as caller:
        (found,) = attacher.scan().new_libraries
        assert (found.state, found.error, found.kind) == ("attached", "", "nccl")
        assert found.path == str(library)
        assert len(found.build_id) == 40
        key = (library.stat().st_dev, library.stat().st_ino)
        assert attacher.libraries[key] is found
        assert attacher.processes[caller.pid].libraries == (key,)
        if platform.machine() == "x86_64":
            assert {site.first_instruction for site in found.sites} == {"push rbp"}
            assert all(site.cheap for site in found.sites)
        assert not attacher.scan().new_libraries


def test_one_attach_for_all_processes(loaded: Any, attacher: Any, library: Path) -> None:
    with Caller(library) as first:
        assert len(attacher.scan().new_libraries) == 1
        with Caller(library) as second:  # started later, never scanned before it calls
            for caller in (first, second):
                caller.call("call_all_gather", 5, 0x5550)
            records = loaded.ring.drain(1 << 20)
            for caller in (first, second):
                mine = records[records["tgid"] == caller.pid]
                assert mine["seq"].tolist() == [0, 1, 2, 3, 4]
            assert not attacher.scan().new_libraries


def test_library_opened_later(loaded: Any, attacher: Any, library: Path) -> None:
    with Caller() as caller:
        assert not attacher.scan().new_libraries
        caller.open(library)
        assert len(attacher.scan().new_libraries) == 1
        caller.call("call_all_gather", 2, 0x5550)
        assert len(loaded.records(caller.pid)) == 2


def test_library_in_another_mount_namespace(loaded: Any, attacher: Any, library: Path) -> None:
    """The path that the process sees leads elsewhere for the agent."""
    folder = library.parents[1] / "inside"
    folder.mkdir()
    script = f'mount --bind {library.parent} {folder} && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    with Caller(folder / library.name, prefix=prefix) as caller:
        assert not (folder / library.name).exists()
        (found,) = attacher.scan().new_libraries
        assert found.state == "attached"
        assert found.path == str(folder / library.name)
        caller.call("call_all_gather", 3, 0x5550)
        assert len(loaded.records(caller.pid)) == 3


def test_library_that_was_deleted(loaded: Any, attacher: Any, library: Path) -> None:
    with Caller(library) as caller:
        library.unlink()
        (found,) = attacher.scan().new_libraries
        assert found.state == "attached", found.error
        caller.call("call_all_gather", 3, 0x5550)
        assert len(loaded.records(caller.pid)) == 3


def test_another_file_at_the_path_is_not_taken_for_it(
    loaded: Any, attacher: Any, library: Path
) -> None:
    with Caller(library) as caller:
        other = library.with_suffix(".new")
        other.write_bytes(library.read_bytes())
        old = library.stat().st_ino
        other.rename(library)
        assert library.stat().st_ino != old
        attacher.scan()
        caller.call("call_all_gather", 3, 0x5550)
        assert len(loaded.records(caller.pid)) == 3


@both_methods
def test_failed_attach_leaves_nothing(loaded: Any, library: Path) -> None:
    """The second site lies outside the file: the probes placed before it are taken back."""
    with Caller(library) as caller, library.open("rb") as file:
        found = examine(file.fileno(), "nccl", str(library), str(library))
        good = next(site for site in found.sites if site.row == 66)  # entry and return
        address = caller.address("pncclGroupEnd")
        assert not probed(caller.pid, address)
        bad = Site(8, "pncclAllGather", 1 << 40, True, "")
        links = Links(loaded.programs, Closer())
        with pytest.raises(AttachError):
            links.add(str(library), [good, bad])
        assert wait_until(lambda: not probed(caller.pid, address))
        links.add(str(library), [good])
        assert probed(caller.pid, address)
        links.close()
        assert wait_until(lambda: not probed(caller.pid, address))


def test_process_that_ends_is_forgotten(loaded: Any, attacher: Any, library: Path) -> None:
    with Caller(library) as caller:
        attacher.scan()
        caller.call("call_all_gather", 3, 0x5550)
        pid = caller.pid
        threads, comms = loaded.programs._threads.slots, loaded.programs._comms.slots
        assert (threads["id"] >> 32 == pid).sum() == 1
        assert (comms["tgid"] == pid).sum() == 1
    assert pid in attacher.scan().gone_pids
    assert pid not in attacher.processes
    assert not (threads["id"] >> 32 == pid).any()
    assert not (comms["tgid"] == pid).any()


def test_library_that_nobody_maps_is_let_go(attacher: Any, library: Path) -> None:
    with Caller(library):
        assert len(attacher.scan().new_libraries) == 1
    for _ in range(5):
        attacher.scan()
    assert len(attacher.libraries) == 1  # a job that restarts finds its probes in place
    for _ in range(10):
        attacher.scan()
    assert not attacher.libraries
    found: list[Any] = []
    with Caller(library):  # perf events that are still being let go may hold up a scan or two
        assert wait_until(lambda: found.extend(attacher.scan().new_libraries) or found)
    assert [one.state for one in found] == ["attached"]


@both_methods
def test_close_takes_every_probe_away(loaded: Any, tmp_path: Path, library: Path) -> None:
    with Caller(library) as caller:
        attacher = loaded.attacher(tmp_path)
        (found,) = attacher.scan().new_libraries
        addresses = [caller.address(site.symbol) for site in found.sites]
        assert all(probed(caller.pid, address) for address in addresses)
        assert attacher.close(60)
        assert not any(probed(caller.pid, address) for address in addresses)


class Gate:
    """os.close that waits until it is opened, and remembers what it closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.closed: list[int] = []

    def __call__(self, fd: int) -> None:
        self.opened.wait(60)
        self.closed.append(fd)
        os.close(fd)


@both_methods
def test_detaching_makes_nobody_wait(loaded: Any, tmp_path: Path, library: Path) -> None:
    """Scans and the shutdown go on while the kernel is still busy with what is let go."""
    gate = Gate()
    closer = Closer(gate)
    attacher = Attacher(loaded.programs, include=[f"{tmp_path}/*"], closer=closer)
    with Caller(library) as caller:
        attacher.scan()
        attacher.release_all()
        assert (closer.pending, gate.closed) == (1, [])
        again = attacher.scan().new_libraries
        if loaded.programs.method == "perf":  # one lock: the next scan attaches
            assert not again
        else:
            assert [one.state for one in again] == ["attached"]
        assert not attacher.close(0.01)
        gate.opened.set()
        assert closer.wait(60)
        assert caller.call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0) == 0


def test_entries_go_before_returns_and_events_last() -> None:
    closed: list[int] = []
    closer = Closer(closed.append)
    stages = [list(range(0, 40)), list(range(40, 60)), list(range(60, 90))]
    closer.add(stages)
    assert closer.wait(30)
    assert set(closed[:40]) == set(stages[0])
    assert set(closed[40:60]) == set(stages[1])
    assert set(closed[60:]) == set(stages[2])
    closer.add([[], []])
    assert closer.pending == 0


@pytest.mark.parametrize("method", ["multi", "perf"], indirect=True)
def test_agent_that_is_told_to_stop_leaves_no_probe(
    method: str, library: Path, tmp_path: Path
) -> None:
    log = tmp_path / "agent.log"
    settings = [f"probes.include={library.parent}/*", "collector.shutdown_seconds=0.2"]
    with Caller(library) as caller, log.open("wb") as output:
        address = caller.address("pncclAllGather")
        agent = subprocess.Popen(
            [sys.executable, "-m", "lanterne.agent.main", "--metrics", "", "--method", method,
             "--collector", "127.0.0.1:1", *(f"--set={one}" for one in settings)],
            stderr=output,
        )  # fmt: skip
        try:
            assert wait_until(lambda: probed(caller.pid, address), 60)
            agent.terminate()
            assert agent.wait(60) == 0
        finally:
            agent.kill()
        assert not probed(caller.pid, address)
        assert "agent stopped" in log.read_text()
        assert "probes are left" not in log.read_text()


HOLDER = """
import sys, time
from pathlib import Path
from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import load
programs = load(method=sys.argv[1])
attacher = Attacher(programs, include=[sys.argv[2] + "/*"])
print(len(attacher.scan().new_libraries), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("method", ["multi", "perf"], indirect=True)
def test_kill_of_the_holder_leaves_no_probe(method: str, library: Path) -> None:
    with Caller(library) as caller:
        address = caller.address("pncclAllGather")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, method, str(library.parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "1"
        assert probed(caller.pid, address)
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=30)
        assert wait_until(lambda: not probed(caller.pid, address))
        assert caller.call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0) == 0
