"""Short-lived processes that map NCCL, ten a second: nothing stays behind.

A hundred and fifty of them; LANTERNE_CHURN=1000 makes it a thousand.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.rig.rig import RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

PROCESSES = int(os.environ.get("LANTERNE_CHURN", "150"))
AT_ONCE = 10


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths) -> Iterator[Stack]:
    short = {"analysis": {"ended_seconds": 3}}
    with Stack(tmp_path, [f"{paths.root}/*"], collector=short) as stack:
        yield stack.start()


def burst(paths: RigPaths, number: int) -> None:
    """`number` processes at once, each with a communicator of its own and fifty calls."""
    command = [str(paths.call), "--count=50", "--out-of-place"]
    env = dict(os.environ) | paths.env()
    running = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(number)]
    for process in running:
        assert process.wait(60) == 0


def measure(stack: Stack) -> dict[str, float]:
    assert stack.agent is not None
    assert stack.collector is not None
    agent, collector = psutil.Process(stack.agent.pid), psutil.Process(stack.collector.pid)
    return {
        "agent_fds": agent.num_fds(),
        "agent_threads": agent.num_threads(),
        "agent_mb": agent.memory_full_info().uss / 1e6,
        "collector_fds": collector.num_fds(),
        "collector_mb": collector.memory_full_info().uss / 1e6,
        "series": len(stack.collector_metrics().get("lanterne_communicator_ranks")),
    }


def test_short_lived_processes_leave_nothing(stack: Stack, paths: RigPaths) -> None:
    # The libraries stay mapped by one process, so that they stay attached.
    with subprocess.Popen(
        [str(paths.call), "--rate=1", "--seconds=250"],
        env=dict(os.environ) | paths.env(), stdout=subprocess.DEVNULL,
    ) as holder:  # fmt: skip
        try:
            wait_for(
                lambda: (
                    stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2
                ),
                30,
                f"libraries attached\n{stack.logs()}",
            )
            for _ in range(10):  # what grows once (pools, caches) has grown then
                burst(paths, AT_ONCE)
            time.sleep(5)
            before = measure(stack)
            started = time.monotonic()
            for turn in range(PROCESSES // AT_ONCE):
                burst(paths, AT_ONCE)
                time.sleep(max(0.0, started + turn + 1 - time.monotonic()))

            # Of the ended ones nothing is left; the holder's communicator stays.
            wait_for(lambda: measure(stack)["series"] == 1, 30, "series of ended processes vanish")
            after = measure(stack)
        finally:
            holder.kill()
    print(before, after)
    assert after["agent_fds"] <= before["agent_fds"] + 2
    assert after["collector_fds"] <= before["collector_fds"] + 2
    assert after["agent_threads"] <= before["agent_threads"] + 1
    assert after["agent_mb"] <= before["agent_mb"] * 1.25 + 4
    assert after["collector_mb"] <= before["collector_mb"] * 1.25 + 8
    assert stack.agent_metrics().total("lanterne_agent_events_lost_total") == 0
