"""Communicators older than the agent, of a libnccl whose file does not tell where they keep who
they are: NCCL's RAS service names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.ras import RasServer, job_report
from tests.rig.rig import Job, JobConfig, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

RANKS = 4
CONFIG = JobConfig(ranks=RANKS, layers=1, attn_us=20_000, expert_us=5_000, truth_every=1.0,
                   dp_groups=2)  # fmt: skip


def test_named_by_ras(tmp_path: Path) -> None:
    paths = build("opaque", tmp_path / "lib")
    job = Job(CONFIG, paths=paths)
    with RasServer(lambda: job_report(job)) as server:
        job.env = {"NCCL_RAS_ADDR": server.address, "LANTERNE_WORKLOAD": "old"}
        with job, Stack(tmp_path, [f"{paths.root}/*"]) as stack:
            job.wait_ready()
            stack.start()

            def seen() -> dict[str, tuple[int, int]]:
                return {
                    view["comm_hash"]: (view["n_ranks"], view["ranks_seen"])
                    for view in stack.snapshot()["communicators"]
                    if view["workload"] == "old"
                }

            truth = {
                comm["hash"]: (comm["nranks"], comm["nranks"])
                for rank in job.truths()
                for comm in rank["comms"]
                if comm["collectives"] + comm["p2p_groups"]
            }
            assert len(truth) > 1
            wait_for(lambda: seen() == truth, 60, f"{seen()} is {truth}\n{stack.logs()}")
            metrics = stack.agent_metrics()
            assert metrics.total("lanterne_agent_comms_unresolved") == 0
            assert metrics.total("lanterne_agent_source_success", source="ras") == 1
            # The ranks of one host are asked about together.
            assert server.queries < RANKS


def test_without_ras_they_stay_unresolved_and_counted(tmp_path: Path) -> None:
    """The very job, so that it is RAS that names them above."""
    paths = build("opaque", tmp_path / "lib")
    env = {"NCCL_RAS_ENABLE": "0", "LANTERNE_WORKLOAD": "old"}
    with Job(CONFIG, paths=paths, env=env) as job, Stack(tmp_path, [f"{paths.root}/*"]) as stack:
        job.wait_ready()
        stack.start()
        wait_for(
            lambda: stack.agent_metrics().total("lanterne_agent_operations_unresolved_total") > 0,
            60, f"operations without a communicator\n{stack.logs()}",
        )  # fmt: skip
        assert stack.agent_metrics().total("lanterne_agent_comms_unresolved") >= RANKS
        assert not [c for c in stack.snapshot()["communicators"] if c["workload"] == "old"]
