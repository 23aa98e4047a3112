"""Hangs end to end: who is missing, that it clears, and what is none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for
from tests.torch_job import PYTHON, TorchJob

RANKS = 4


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
    config = JobConfig(
        ranks=RANKS, tokens=32, hidden=64, layers=2, attn_us=3000, seconds=120, mode="eager",
        faults=("hang:1:400",),
    )  # fmt: skip
    with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "stuck"}, hold="start") as running:
        wait_for(lambda: attached(stack, 2), 30, f"libraries attached\n{stack.logs()}")
        running.release()
        wait_for(lambda: missing(stack, "stuck"), 60, f"a missing rank\n{stack.logs()}")
        assert missing(stack, "stuck") == {1}
        assert hung(stack, "stuck") > 0
        rows = {row["rank"]: row for row in stack.named() if row["workload"] == "stuck"}
        assert rows[1]["klass"] == "hang"


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
