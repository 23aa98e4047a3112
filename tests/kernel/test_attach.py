"""Where and when libraries are found, attached and let go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lanterne.agent.attach import Links, Site, examine
from lanterne.agent.errors import AttachError
from tests.kernel.stub import Caller, compile_stub

pytestmark = pytest.mark.kernel

BREAKPOINT = 0xCC
PUSH_RBP = 0x55
both_methods = pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)


def first_byte(pid: int, address: int) -> int:
    """Of a function in another process: a breakpoint while a uprobe stands there."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(1)[0]


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
        assert first_byte(caller.pid, address) == PUSH_RBP
        bad = Site(8, "pncclAllGather", 1 << 40, True, "")
        links = Links(loaded.programs)
        with pytest.raises(AttachError):
            links.add(str(library), [good, bad])
        assert wait_until(lambda: first_byte(caller.pid, address) == PUSH_RBP)
        links.add(str(library), [good])
        assert first_byte(caller.pid, address) == BREAKPOINT
        links.close()
        assert wait_until(lambda: first_byte(caller.pid, address) == PUSH_RBP)


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
    with Caller(library):
        assert len(attacher.scan().new_libraries) == 1


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


@pytest.mark.parametrize("method", ["multi", "perf"])
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
        assert first_byte(caller.pid, address) == BREAKPOINT
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=30)
        assert wait_until(lambda: first_byte(caller.pid, address) == PUSH_RBP)
        assert caller.call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0) == 0
