"""Hangs end to end: who is missing, that it clears, and what is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.build import build as build_plugin
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for
from tests.torch_job import PYTHON, TorchJob

RANKS = 4
SMALL = JobConfig(ranks=RANKS, tokens=32, hidden=64, layers=2, attn_us=3000, seconds=120)
STUCK = "slow-rank:1:100000@400"  # its GPU computes on for minutes


def missing(stack: Stack, workload: str) -> set[int]:
    found = stack.collector_metrics().get("lanterne_rank_missing", workload=workload)
    return {int(labels["rank"]) for labels, value in found if value}


def hung(stack: Stack, workload: str) -> float:
    return stack.collector_metrics().total("lanterne_communicator_hung_seconds", workload=workload)


def attached(stack: Stack, least: int) -> bool:
    return stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= least


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths) -> Iterator[Stack]:
    soon = {"analysis": {"hang_seconds": 4}}
    with Stack(tmp_path, [f"{paths.root}/*"], collector=soon) as stack:
        yield stack.start()


@pytest.mark.kernel
@pytest.mark.timeout(180)
def test_a_rank_that_stops_calling_is_missing(stack: Stack, paths: RigPaths) -> None:
    """Its process lives; the others have enqueued and wait for their GPU."""
    config = replace(SMALL, mode="eager", faults=("hang:1:400",))
    with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "stuck"}, hold="start") as running:
        wait_for(lambda: attached(stack, 2), 30, f"libraries attached\n{stack.logs()}")
        running.release()
        wait_for(lambda: missing(stack, "stuck"), 60, f"a missing rank\n{stack.logs()}")
        assert missing(stack, "stuck") == {1}
        assert hung(stack, "stuck") > 0
        rows = {row["rank"]: row for row in stack.named() if row["workload"] == "stuck"}
        assert rows[1]["klass"] == "hang"


@pytest.fixture
def plugin(paths: RigPaths, stack: Stack) -> Iterator[Path]:
    """Its probe is attached before a job begins: the agent knows the file."""
    library = Path(shutil.copy(build_plugin().library, paths.root / "libnccl-profiler.so"))
    hold = f"import ctypes, sys; ctypes.CDLL({str(library)!r}); sys.stdin.read()"
    earlier = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: attached(stack, 1), 30, f"plugin attached\n{stack.logs()}")
        yield library
    finally:
        earlier.communicate()


@pytest.mark.kernel
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "fault", "timed", "late", "others"),
    [
        ("eager", "hang:1:400", False, "not_arrived_host_running", "arrived"),
        pytest.param(
            *("eager", STUCK, False, "not_arrived_host_synchronising", "arrived"),
            marks=pytest.mark.faults,
        ),
        pytest.param(
            *("run-ahead", "hang:1:400", True, "not_arrived_host_running"),
            "arrived_device_started",
            marks=pytest.mark.faults,
        ),
        ("run-ahead", STUCK, True, "arrived_device_not_started", "arrived_device_started"),
        ("graph", "hang:1:400", True, "not_arrived_host_running", "arrived_device_started"),
    ],
    ids=["host", "host-waits", "host-device", "device", "graph"],
)
def test_where_each_rank_stands(
    stack: Stack, paths: RigPaths, plugin: Path, mode: str, fault: str, timed: bool, late: str,
    others: str,
) -> None:  # fmt: skip
    """Hosts and GPUs: by the calls, the synchronise calls, and what the plugin has open."""
    config = replace(SMALL, mode=mode, faults=(fault,))
    env = {"LANTERNE_WORKLOAD": "stuck", "NCCL_PROFILER_PLUGIN": str(plugin) if timed else "none"}
    expected = {late: [1], others: [0, 2, 3]}
    with Job(config, paths=paths, env=env, hold="start") as running:
        wait_for(lambda: attached(stack, 3), 30, f"libraries attached\n{stack.logs()}")
        running.release()

        def states() -> list[dict[str, Any]]:
            hangs = [c["hang"] for c in stack.snapshot()["communicators"] if c["hang"]]
            return [s for hang in hangs for s in hang["states"]]

        def stands() -> bool:
            return {s["state"]: s["ranks"] for s in states()} == expected

        try:
            wait_for(stands, 60, "what was expected")
        except TimeoutError as error:
            raise AssertionError(f"{error}: {expected}; {states()}\n{stack.logs()}") from None
        assert missing(stack, "stuck") == {1}
        (row,) = [r for r in stack.named() if (r["workload"], r["rank"]) == ("stuck", 1)]
        (mine,) = [s["text"] for s in states() if s["ranks"] == [1]]
        assert row["klass"] == "hang"
        lead = mine[:40]  # before how long it has been so
        assert row["why"].startswith(lead)
        (message,) = [m["text"] for m in stack.stragglers()["messages"] if m["kind"] == "hang"]
        assert lead in message


@pytest.mark.kernel
@pytest.mark.torch
@pytest.mark.timeout(240)
def test_a_stopped_process_is_missing_until_it_goes_on(tmp_path: Path) -> None:
    """Gloo blocks: the others are seen inside the call."""
    if not PYTHON.exists():
        pytest.fail(f"no PyTorch at {PYTHON}: run make setup-torch")
    folder = tmp_path / "job"
    folder.mkdir()
    soon = {"analysis": {"hang_seconds": 4}}
    with Stack(tmp_path, ["*/libtorch_cpu.so"], collector=soon) as stack:
        stack.start()
        with TorchJob(RANKS, folder, steps=20_000, workload="halted") as job:
            job.wait_ready()
            wait_for(lambda: attached(stack, 1), 30, "libtorch_cpu.so attached")
            job.go()
            wait_for(
                lambda: stack.collector_metrics().get(
                    "lanterne_rank_wait_seconds_total", workload="halted"
                ),
                60,
                "operations",
            )
            assert missing(stack, "halted") == set()
            stopped = 2
            os.kill(job.pids[stopped], signal.SIGSTOP)
            try:
                wait_for(lambda: missing(stack, "halted"), 60, f"a missing rank\n{stack.logs()}")
                assert missing(stack, "halted") == {stopped}
                (comm,) = [c for c in stack.snapshot()["communicators"] if c["hang"] is not None]
                assert comm["hang"]["missing"] == [stopped]
                assert set(comm["hang"]["arrived"]) == set(range(RANKS)) - {stopped}
            finally:
                os.kill(job.pids[stopped], signal.SIGCONT)
            wait_for(lambda: not missing(stack, "halted"), 60, "the job to go on")
            assert hung(stack, "halted") == 0
