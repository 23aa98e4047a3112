"""A second job on the same library file while the agent runs: its probes are there before the agent
has looked at its processes, and still every rank has its own GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

RANKS = 3
SCAN_SECONDS = 4.0  # the second job has made many calls before


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


def gpus(stack: Stack, workload: str) -> dict[int, str]:
    """Rank -> GPU of the communicator of all ranks of a job."""
    told = stack.snapshot()
    of = [
        number
        for number, comm in enumerate(told["communicators"])
        if comm["workload"] == workload and comm["n_ranks"] == RANKS
    ]
    rows = zip(told["ranks"]["comm"], told["ranks"]["rank"], told["ranks"]["gpu"], strict=True)
    return {rank: gpu for comm, rank, gpu in rows if comm in of}


def test_bus_ids_of_a_second_job(tmp_path: Path, paths: RigPaths) -> None:
    config = JobConfig(ranks=RANKS, layers=1, seconds=60)
    wanted = {rank: str(rank) for rank in range(RANKS)}
    env = {"LD_LIBRARY_PATH": str(paths.root)}
    agent = {"window": {"scan_seconds": SCAN_SECONDS}}
    with Stack(tmp_path, [f"{paths.root}/*"], env=env, agent=agent) as stack:
        stack.start()
        for workload in ("first", "second"):
            with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": workload}) as job:
                job.wait_ready()

                def told(name: str = workload) -> bool:
                    return gpus(stack, name) == wanted

                try:
                    wait_for(told, 30, "the GPU of every rank")
                except TimeoutError:
                    pytest.fail(f"{workload}: {gpus(stack, workload)}\n{stack.logs()}")
        assert stack.agent_metrics().total("lanterne_agent_comms_unresolved") == 0
