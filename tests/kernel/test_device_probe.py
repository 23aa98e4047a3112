"""The profiler plugin's probe: every operation of a rig job in the device ring, nothing lost."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import load
from lanterne.agent.ring import Ring
from lanterne.probes import layout
from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler.usdt import PEER_WAIT
from tests.plugin.build import build
from tests.rig.rig import Job, JobConfig
from tests.stack import wait_for

pytestmark = pytest.mark.kernel
RANKS, STEPS, LAYERS = 3, 6, 2
A_STEP = {Func.P2P_GROUP: 2 * LAYERS, Func.ALL_REDUCE: 1}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    return Path(shutil.copy(build().library, tmp_path / "libnccl-profiler.so"))


@pytest.fixture
def holder(plugin: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the file mapped before any job."""
    hold = f"import ctypes, sys; ctypes.CDLL({str(plugin)!r}); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE) as process:
        yield process


def run(plugin: Path, steps: int = STEPS) -> list[int]:
    config = JobConfig(ranks=RANKS, steps=steps, layers=LAYERS)
    with Job(config, env={"NCCL_PROFILER_PLUGIN": str(plugin)}) as job:
        assert job.wait() == [0] * RANKS
        return job.pids


@pytest.mark.parametrize("method", ["multi", "perf"], indirect=True)
@pytest.mark.usefixtures("holder")
def test_every_operation_once(plugin: Path, method: str) -> None:
    with (
        load(method=method) as programs,
        Ring(programs.device_ring_fd, programs.device_ring_bytes, layout.DEVICE) as ring,
    ):
        with Attacher(programs, include=[f"{plugin.parent}/*"]) as attacher:
            (library,) = wait_for(lambda: attacher.scan().new_libraries, 20, "plugin attached")
            assert (library.kind, library.state) == ("profiler", "attached")
            pids = run(plugin)
            rows = ring.drain()
            assert set(rows["tgid"].tolist()) == set(pids)
            # A job of more than half a second tells what it waited for its peers, too.
            operations = rows[rows["func"] != PEER_WAIT]
            for pid in pids:
                mine = operations[operations["tgid"] == pid]
                each = {func: STEPS * count for func, count in A_STEP.items()}
                assert Counter(mine["func"].tolist()) == each
            assert (rows["stop_ns"] >= rows["start_ns"]).all()
            counts = programs.counters()
            assert counts["device_submitted"] == len(rows)
            for cause in ("lost_device_ring", "lost_device_version", "lost_read"):
                assert counts[cause] == 0, cause
        # With the probe goes its semaphore: nobody listens, and nothing is told.
        run(plugin)
        assert len(ring.drain()) == 0
        assert programs.counters()["device_submitted"] == counts["device_submitted"]


@pytest.mark.usefixtures("holder")
def test_what_does_not_fit_is_counted(plugin: Path) -> None:
    size = mmap.PAGESIZE
    operations = RANKS * sum(A_STEP.values())
    steps = 2 * size // layout.DEVICE.itemsize // operations + 1  # twice what the ring holds
    with (
        load(device_ring_bytes=size) as programs,
        Ring(programs.device_ring_fd, size, layout.DEVICE) as ring,
        Attacher(programs, include=[f"{plugin.parent}/*"]) as attacher,
    ):
        wait_for(lambda: attacher.scan().new_libraries, 20, "plugin attached")
        began = time.monotonic()
        run(plugin, steps)
        seconds = time.monotonic() - began
        counts = programs.counters()
        assert counts["lost_device_ring"] > 0
        assert counts["device_submitted"] == len(ring.drain())
        told = counts["device_submitted"] + counts["lost_device_ring"]
        most = RANKS * RANKS * int(2 * seconds + 1)  # peer waits, twice a second of a slow job
        assert 0 <= told - steps * operations <= most
