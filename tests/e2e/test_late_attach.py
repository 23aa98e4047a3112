"""Agents that come late, at different moments, to a running job: its collectives join rightly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

RANKS = 16
SLOW = 11
CONFIG = JobConfig(
    ranks=RANKS, ranks_per_node=RANKS // 2, tokens=64, hidden=64, zipf=0.3, layers=2,
    attn_us=20_000, expert_us=5_000, mode="eager", faults=(f"slow-rank:{SLOW}:1.6",),
)  # fmt: skip


@contextmanager
def two_nodes(folder: Path, workload: str) -> Iterator[tuple[Job, Stack, Stack]]:
    """A job whose halves load the libraries from two copies, and an agent for each copy."""
    halves = [build(dest=folder / name) for name in ("first", "second")]
    with ExitStack() as held:
        first = held.enter_context(Stack(folder, [f"{halves[0].root}/*"], node="first"))
        other = folder / "other"
        other.mkdir()
        address = {"collector": {"addresses": [f"127.0.0.1:{first.grpc_port}"]}}
        second = held.enter_context(
            Stack(other, [f"{halves[1].root}/*"], node="second", agent=address)
        )
        rank_env = {rank: half_env(halves[rank * 2 // RANKS]) for rank in range(RANKS)}
        job = held.enter_context(
            Job(CONFIG, paths=halves[0], env={"LANTERNE_WORKLOAD": workload}, rank_env=rank_env,
                hold="start")
        )  # fmt: skip
        yield job, first, second


def half_env(paths: RigPaths) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(paths.root)}


def per_operation(stack: Stack, workload: str, seconds: float) -> np.ndarray:
    """Seconds of wait per scored operation of each rank, over the next `seconds`."""

    def totals() -> tuple[np.ndarray, float]:
        found = np.full(RANKS, np.nan)
        metrics = stack.collector_metrics()
        for labels, value in metrics.get(
            "lanterne_rank_wait_seconds_total", workload=workload, source="enqueue"
        ):
            found[int(labels["rank"])] = value
        counted = metrics.total("lanterne_collective_wait_seconds_count", workload=workload)
        return found, counted / RANKS

    before, operations = totals()
    time.sleep(seconds)
    after, more = totals()
    absent = stack.collector_metrics().get("lanterne_communicator_waits_absent", workload=workload)
    assert np.isfinite(before).all(), absent
    assert np.isfinite(after).all(), absent
    waits: np.ndarray = (after - before) / (more - operations)
    return waits


def named(stack: Stack, workload: str) -> set[int]:
    return {row["rank"] for row in stack.named() if row["workload"] == workload}


def test_two_late_agents_three_seconds_apart(tmp_path: Path) -> None:
    early_folder, late_folder = tmp_path / "early", tmp_path / "late"
    early_folder.mkdir()
    late_folder.mkdir()
    with two_nodes(early_folder, "early") as (job, first, second):
        first.start()
        second.start_agent()
        for stack in (first, second):
            wait_for(lambda s=stack: attached(s), 30, f"attached\n{first.logs()}{second.logs()}")
        job.release()
        job.wait_ready()
        wait_for(lambda: named(first, "early") == {SLOW}, 60, f"named\n{first.logs()}")
        early = per_operation(first, "early", 10)
    with two_nodes(late_folder, "late") as (job, first, second):
        job.release()
        job.wait_ready()
        time.sleep(2)
        first.start()
        time.sleep(3)
        second.start_agent()
        wait_for(lambda: named(first, "late") == {SLOW}, 60, f"named\n{first.logs()}")
        late = per_operation(first, "late", 10)
        metrics = first.collector_metrics()
        (view,) = [c for c in first.snapshot()["communicators"] if c["workload"] == "late"]
        assert view["ranks_seen"] == RANKS
        assert view["comm_hash"] == f"0x{int(job.truth(0)['comms'][0]['hash'], 16):016x}"
        # Wrong joins would show as different operations in one row.
        assert metrics.total("lanterne_collector_dropped_total", reason="misaligned") == 0
        everybody = [r for r in range(RANKS) if r != SLOW]
        assert late[everybody].mean() == pytest.approx(early[everybody].mean(), rel=0.15)
        assert late[SLOW] < 0.2 * late[everybody].mean()


def attached(stack: Stack) -> bool:
    return stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2
