"""Agents that come late, at different moments, to a running job: its collectives join rightly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.feeder import Feeder
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(480)]

RANKS = 16
SLOW = 11
CONFIG = JobConfig(
    ranks=RANKS, ranks_per_node=RANKS // 2, tokens=64, hidden=64, zipf=0.3, layers=2,
    attn_us=20_000, expert_us=5_000, mode="eager", faults=(f"slow-rank:{SLOW}:1.6",),
)  # fmt: skip


@contextmanager
def two_nodes(
    folder: Path, workload: str, **collector: dict[str, object]
) -> Iterator[tuple[Job, Stack, Stack]]:
    """A job whose halves load the libraries from two copies, and an agent for each copy."""
    halves = [build(dest=folder / name) for name in ("first", "second")]
    with ExitStack() as held:
        first = held.enter_context(
            Stack(folder, [f"{halves[0].root}/*"], node="first", collector=collector)
        )
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
        assert metrics.total("lanterne_collector_rows_total", status="misaligned") == 0
        everybody = [r for r in range(RANKS) if r != SLOW]
        assert late[everybody].mean() == pytest.approx(early[everybody].mean(), rel=0.15)
        assert late[SLOW] < 0.2 * late[everybody].mean()


class Figures:
    """Totals of the job's only communicator, by rank."""

    def __init__(self, stack: Stack, other: Stack, workload: str) -> None:
        metrics = stack.collector_metrics()
        self.stride = stride(stack) if stride(stack) == stride(other) else 0.0
        self.told = metrics.total("lanterne_collector_rows_total", status="taken") / RANKS
        counts = {"workload": workload, "op": "all_to_all_v"}
        self.scored = metrics.total("lanterne_collective_wait_seconds_count", **counts) / RANKS
        self.exchanges = metrics.total("lanterne_collective_calls_total", **counts) / RANKS
        self.called = metrics.total("lanterne_collective_calls_total", workload=workload) / RANKS
        self.misaligned = metrics.total("lanterne_collector_rows_total", status="misaligned")


def test_late_agents_of_a_crowded_collector(tmp_path: Path) -> None:
    """The second half is met while the collector asks for samples: all ranks tell the same."""
    keep = {"ingest": {"queue_batches": 16}, "analysis": {"window_seconds": 2.0}}
    with two_nodes(tmp_path, "busy", **keep) as (job, first, second):
        job.release()
        job.wait_ready()
        first.start()
        with ThreadPoolExecutor(1) as pool:
            crowd(first)
            starts = pool.submit(second.start_agent)
            wait_for(lambda: starts.done() or crowd(first), 90, "the second agent")
            starts.result()
        crowd(first)
        wait_for(lambda: named(first, "busy") == {SLOW}, 60, f"named\n{first.logs()}")
        before, after = wait_for(lambda: sampled(first, second), 90, f"one stride\n{first.logs()}")
        # Some windows of either agent are on their way at both ends of the time.
        told, called = after.told - before.told, after.called - before.called
        assert told == pytest.approx(called / after.stride, rel=0.3)
        # Those that are sampled are among the exchanges that have evidence of waiting.
        scored, exchanges = after.scored - before.scored, after.exchanges - before.exchanges
        assert scored == pytest.approx(exchanges / after.stride, rel=0.3)
        assert after.misaligned == 0
        assert named(first, "busy") == {SLOW}


def crowd(stack: Stack) -> None:
    """More batches than may wait, at a moment: the collector asks for less, for a minute."""
    while stride(stack) == 1:
        with Feeder(f"127.0.0.1:{stack.grpc_port}", history=60):
            time.sleep(2)


def sampled(first: Stack, second: Stack) -> tuple[Figures, Figures] | None:
    """Some seconds in which both agents sampled by one stride; None where they did not."""
    crowd(first)
    aligned = {"aligned": 1, "whole": 0, "waiting": 0}
    wait_for(lambda: states(first) == aligned, 30, f"aligned\n{first.logs()}")
    time.sleep(3)  # until both have heard of it, and what they told before has been scored
    before = Figures(first, second, "busy")
    time.sleep(6)
    after = Figures(first, second, "busy")
    return (before, after) if before.stride == after.stride > 1 else None


def stride(stack: Stack) -> float:
    return stack.agent_metrics().total("lanterne_agent_stride")


def states(stack: Stack) -> dict[str, float]:
    found = stack.collector_metrics().get("lanterne_collector_communicators_met_running")
    return {labels["state"]: value for labels, value in found}


def attached(stack: Stack) -> bool:
    return stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2
