"""Steps of a real job of the rig, from the GPU times that the profiler plugin tells."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.build import build as build_plugin
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

RANKS, LAYERS, EXPERT_US = 4, 2, 2000


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths) -> Iterator[Stack]:
    with Stack(tmp_path, [f"{paths.root}/*"], env={"LD_LIBRARY_PATH": str(paths.root)}) as made:
        yield made.start()


def attached(stack: Stack) -> bool:
    metrics = stack.agent_metrics()
    return metrics.total("lanterne_agent_libraries", kind="nccl", state="attached") >= 1


def steps(stack: Stack) -> dict[str, Any] | None:
    for comm in stack.snapshot()["communicators"]:
        if comm["serving"] is not None:
            found: dict[str, Any] = comm["serving"]
            return found
    return None


def test_a_job_of_known_steps(stack: Stack, paths: RigPaths) -> None:
    plugin = Path(shutil.copy(build_plugin().library, paths.root / "libnccl-profiler.so"))
    config = JobConfig(
        ranks=RANKS, ranks_per_node=RANKS, tokens=64, hidden=128, layers=LAYERS, attn_us=4000,
        expert_us=EXPERT_US, mode="run-ahead", seconds=60,
    )  # fmt: skip
    env = {
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "LANTERNE_PROFILER": "always",
        "LANTERNE_WORKLOAD": "job",
    }
    with Job(config, paths=paths, env=env, hold="start") as job:
        wait_for(lambda: attached(stack), 30, f"libnccl attached\n{stack.logs()}")
        job.release()
        job.wait_ready()
        found = wait_for(lambda: steps(stack), 60, f"steps\n{stack.logs()}")
        page = stack.collector_metrics()
    assert found["evidence"] == "device"
    assert found["period"] in (2 * LAYERS, 2 * LAYERS + 1)  # the gradients may be elsewhere
    medians = found["medians"]
    assert medians["expert"] > 0
    assert medians["dispatch"] > 0
    assert medians["combine"] > 0
    parts = ("dispatch", "expert", "combine", "wait", "other_transfer", "other_compute",
             "elsewhere", "idle")  # fmt: skip
    columns = found["steps"]
    for number, span in enumerate(columns["span"]):
        added = sum(columns[part][number] for part in parts)
        assert added == pytest.approx(span, rel=1e-3, abs=1e-6)
    name = "lanterne_moe_step_seconds"
    assert page.total(name, workload="job", part="span", source="device") > 0


def test_a_rank_of_several_communicators_has_steps_over_all_of_them(
    stack: Stack, paths: RigPaths
) -> None:
    """Experts over all ranks, gradients in two groups, activations to the next stage."""
    plugin = Path(shutil.copy(build_plugin().library, paths.root / "libnccl-profiler.so"))
    config = JobConfig(
        ranks=RANKS, ranks_per_node=RANKS, tokens=64, hidden=128, layers=LAYERS, attn_us=4000,
        expert_us=EXPERT_US, mode="run-ahead", seconds=90, dp_groups=2, pipeline=True,
    )  # fmt: skip
    env = {
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "LANTERNE_PROFILER": "always",
        "LANTERNE_WORKLOAD": "job",
    }
    with Job(config, paths=paths, env=env, hold="start") as job:
        wait_for(lambda: attached(stack), 30, f"libnccl attached\n{stack.logs()}")
        job.release()
        job.wait_ready()

        def known() -> dict[str, Any]:
            found: dict[str, Any] = stack.snapshot()
            return found if len(found["rank_steps"]) == RANKS else {}

        snapshot = wait_for(known, 80, f"steps of every rank\n{stack.logs()}")
    assert {found["rank"] for found in snapshot["rank_steps"]} == set(range(RANKS))
    for found in snapshot["rank_steps"]:
        over = [snapshot["communicators"][number] for number in found["communicators"]]
        assert len(over) >= 2
        alone = snapshot["communicators"][found["comm"]]["serving"]
        assert found["steps"]["period"] > alone["period"]
        medians = found["steps"]["medians"]
        assert medians["dispatch"] > 0
        assert medians["other_transfer"] > 0
        assert medians["expert"] > 0
