"""Fork and exec of a process with a live communicator: nothing is handed to the wrong program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.comms import Registry
from lanterne.agent.process import Processes
from tests.rig.build import build
from tests.rig.known import seen_by_probes

pytestmark = pytest.mark.kernel

# Makes a communicator, forks a child that uses nothing, and executes another program when told.
PARENT = textwrap.dedent(
    """
    import ctypes, json, os, signal, sys
    root, start = sys.argv[1:]
    lib = ctypes.CDLL(root + "/libnccl.so.2")
    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_ubyte * 128)]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("ready", flush=True)
    sys.stdin.readline()
    uid, comm = Id(), ctypes.c_void_p()
    lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    assert lib.ncclGetUniqueId(ctypes.byref(uid)) == 0
    assert lib.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0) == 0
    child = os.fork()
    if child == 0:
        signal.sigwait([signal.SIGUSR1])
        os.execv(root + "/rigcall", ["rigcall", "--known", "--ranks=2", "--start-file=" + start])
    print(json.dumps({"child": child, "comm": comm.value}), flush=True)
    sys.stdin.readline()
    os.execv("/bin/sleep", ["sleep", "60"])
    """
)


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_fork_and_exec(either: Any, tmp_path: Path) -> None:
    paths = build(dest=tmp_path)
    start = tmp_path / "start"
    parent = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", PARENT, str(tmp_path), str(start)],
        env=dict(os.environ) | paths.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = 0
    try:
        with either.attacher(tmp_path) as attacher:
            registry = registry_of(attacher)
            assert parent.stdout.readline() == "ready\n"
            attacher.scan()
            either.ring.drain(1 << 20)
            either.comm_ring.drain(1 << 20)
            parent.stdin.write("go\n")
            parent.stdin.flush()
            said = json.loads(parent.stdout.readline())
            child = said["child"]
            attacher.scan()
            registry.apply(either.events(parent.pid))
            registry.resolve(time.monotonic_ns())
            (comm,) = registry.alive()
            assert (comm.tgid, comm.pointer, comm.rank, comm.n_ranks) == (
                parent.pid, said["comm"], 0, 1,
            )  # fmt: skip
            assert child in attacher.processes, "it maps the library"
            assert registry.pids() == {parent.pid}, "and uses no communicator"
            check_child(either, attacher, child, start, parent)
            check_parent(attacher, registry, parent)
    finally:
        for pid in (child, parent.pid):
            if pid:
                os.kill(pid, signal.SIGKILL)
        parent.communicate()


def registry_of(attacher: Attacher) -> Registry:
    return Registry(
        libraries=lambda pid: [
            attacher.libraries[key] for key in attacher.processes[pid].libraries
        ],
        processes=Processes(),
    )


def check_child(
    either: Any, attacher: Attacher, child: int, start: Path, parent: subprocess.Popen[str]
) -> None:
    """The same pid and start, another program: its calls are its own, from number 0."""
    os.kill(child, signal.SIGUSR1)
    # In this order: the forked child has the library mapped as well.
    until(lambda: command_of(child) == "rigcall")
    until(lambda: "libcuda.so.1" in Path(f"/proc/{child}/maps").read_text())
    scan = attacher.scan()
    assert child in scan.gone_pids
    assert parent.pid not in scan.gone_pids
    assert child in attacher.processes
    start.touch()
    assert parent.stdout is not None
    calls = json.loads(read_json(parent))["calls"]
    records = either.records(child)
    assert len(records) == seen_by_probes(calls)["ncclEnqueueCheck"]


def read_json(parent: subprocess.Popen[str]) -> str:
    """The child writes to the stdout that it has from its parent."""
    assert parent.stdout is not None
    text = ""
    while True:
        text += parent.stdout.readline()
        try:
            json.loads(text)
        except ValueError:
            assert len(text) < 1 << 16
        else:
            return text


def check_parent(attacher: Attacher, registry: Registry, parent: subprocess.Popen[str]) -> None:
    assert parent.stdin is not None
    parent.stdin.write("exec\n")
    parent.stdin.flush()
    until(lambda: command_of(parent.pid) == "sleep")
    scan = attacher.scan()
    assert parent.pid in scan.gone_pids
    assert parent.pid not in attacher.processes
    registry.forget_processes(scan.gone_pids, time.monotonic_ns())
    assert registry.alive() == []
    assert registry.pids() == set()
