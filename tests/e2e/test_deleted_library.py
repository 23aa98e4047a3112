"""An agent that has given up its privileges still reaches a libnccl that was deleted before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.rig import JobConfig, build, running
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


def test_deleted_before_the_agent_came(tmp_path: Path) -> None:
    paths = build(dest=tmp_path / "lib")
    config = JobConfig(ranks=2, layers=1, attn_us=20_000, truth_every=1.0)
    env = {"LANTERNE_WORKLOAD": "deleted"}
    with (
        running(config, paths=paths, env=env) as job,
        Stack(tmp_path, [f"{paths.root}/*"]) as stack,
    ):
        paths.nccl.unlink()
        stack.start()

        def seen() -> list[int]:
            found = stack.snapshot()["communicators"]
            return [view["ranks_seen"] for view in found if view["workload"] == "deleted"]

        wait_for(lambda: seen() == [2], 60, "its communicator is known")
        assert stack.agent_metrics().total("lanterne_agent_libraries", state="failed") == 0
        assert all(process.poll() is None for process in job.processes)
