"""The whole path on the rig: real uprobes, agent, gRPC, collector, metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.rig.known import result
from tests.rig.rig import Job, JobConfig, RigPaths, build, expected_bytes, start_calls
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

RANKS = 8
SLOW = 5
BASE = {
    "ranks": RANKS, "ranks_per_node": RANKS, "tokens": 128, "hidden": 256, "zipf": 0.4, "layers": 2,
    "attn_us": 4000, "expert_us": 1000,
}  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths) -> Iterator[Stack]:
    # The agent finds the stand-in libnvidia-ml there.
    env = {"LD_LIBRARY_PATH": str(paths.root)}
    with Stack(tmp_path, [f"{paths.root}/*"], env=env) as stack:
        yield stack.start()


def attached(stack: Stack) -> bool:
    return stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2


def job(paths: RigPaths, workload: str, **options: object) -> Job:
    config = JobConfig(**(BASE | options))  # type: ignore[arg-type]
    return Job(config, paths=paths, env={"LANTERNE_WORKLOAD": workload}, hold="start")


def begin(stack: Stack, running: Job) -> None:
    """Every call of the job is made with the probes in place."""
    wait_for(lambda: attached(stack), 30, f"libnccl and libcuda attached\n{stack.logs()}")
    running.release()
    running.wait_ready()


def test_eager_slow_rank_is_named_on_enqueue_evidence(stack: Stack, paths: RigPaths) -> None:
    with job(paths, "eager", seconds=60, mode="eager", faults=(f"slow-rank:{SLOW}:2",)) as running:
        begin(stack, running)
        rows = wait_for(lambda: list(stack.named()), 60, f"a named rank\n{stack.logs()}")
        assert {(row["rank"], row["workload"]) for row in rows} == {(SLOW, "eager")}
        assert {row["evidence"] for row in rows} == {"enqueue"}
        assert {row["klass"] for row in rows} == {"slow_compute"}
        metrics = stack.collector_metrics()
        named = metrics.get("lanterne_rank_straggler", workload="eager")
        assert {labels["rank"] for labels, value in named if value == 1} == {str(SLOW)}
        assert len(named) >= RANKS
        waits = {
            int(labels["rank"]): value
            for labels, value in metrics.get("lanterne_rank_wait_seconds_total", source="enqueue")
        }
        assert min(waits, key=waits.__getitem__) == SLOW
        assert stack.agent_metrics().total("lanterne_agent_events_lost_total") == 0
        # NVML's GPUs, and which of them each rank has: by the communicator's bus id.
        assert {labels["gpu"]: int(labels["rank"]) for labels, _ in named} == {
            str(gpu): gpu for gpu in range(RANKS)
        }
        warm = metrics.get("lanterne_gpu_temperature_celsius", node="demo")
        assert {labels["gpu"] for labels, _ in warm} == {str(gpu) for gpu in range(RANKS)}


def test_run_ahead_names_nobody_and_says_why(stack: Stack, paths: RigPaths) -> None:
    with job(
        paths, "ahead", seconds=60, mode="run-ahead", faults=(f"slow-rank:{SLOW}:2",)
    ) as running:
        begin(stack, running)

        def seen() -> bool:
            found = [c for c in stack.snapshot()["communicators"] if c["workload"] == "ahead"]
            return bool(found) and all(c["ranks_seen"] == RANKS for c in found)

        wait_for(seen, 60, f"the communicator, of all ranks\n{stack.logs()}")
        # Longer than it takes to name a rank where there is evidence.
        time.sleep(15)
        metrics = stack.collector_metrics()
        assert not list(stack.named())
        assert not metrics.get("lanterne_rank_wait_seconds_total", workload="ahead")
        assert not metrics.get("lanterne_collective_wait_seconds_count", workload="ahead")
        absent = metrics.get("lanterne_communicator_waits_absent", workload="ahead")
        assert {labels["reason"] for labels, value in absent if value} == {"host_ahead"}
        messages = stack.stragglers()["messages"]
        assert any("ahead of the GPU" in m["text"] for m in messages if m["kind"] == "blind")


def test_nobody_is_named_without_a_fault(stack: Stack, paths: RigPaths) -> None:
    with job(paths, "even", seconds=60, mode="eager") as running:
        begin(stack, running)
        ever: set[int] = set()
        end = time.monotonic() + 25
        while time.monotonic() < end:
            time.sleep(1)
            ever |= {row["rank"] for row in stack.named()}
        assert stack.collector_metrics().get("lanterne_rank_straggler_ratio", workload="even")
        assert not ever


def test_known_workload_gives_exact_counts(stack: Stack, paths: RigPaths) -> None:
    steps = 20
    with job(paths, "known", steps=steps, mode="eager") as running:
        begin(stack, running)
        running.wait()
        truths = running.truths()
        calls = sum(
            n for t in truths for name, n in t["calls"].items()
            if name in ("ncclSend", "ncclRecv", "ncclAllReduce")
        )  # fmt: skip

        def settled() -> bool:
            return stack.agent_metrics().total("lanterne_agent_events_read_total") >= calls

        wait_for(settled, 20, f"{calls} events read")
        time.sleep(2.5)  # the last windows reach the collector
        agent = stack.agent_metrics()
        assert agent.total("lanterne_agent_events_read_total") == calls
        assert agent.total("lanterne_agent_events_lost_total") == 0
        metrics = stack.collector_metrics()
        sent = np.zeros(RANKS)
        for labels, value in metrics.get("lanterne_alltoall_bytes_total", workload="known"):
            sent[int(labels["rank"])] += value
        expected = expected_bytes(running.config, steps, "dispatch")
        expected = expected + expected_bytes(running.config, steps, "combine")
        assert sent.tolist() == expected.sum(axis=1).tolist()
        # Two all-to-alls a layer and one all-reduce a step, of every rank, each once.
        operations = steps * (2 * running.config.layers + 1) * RANKS
        counted = metrics.get("lanterne_collective_calls_total", workload="known")
        assert sum(value for _, value in counted) == operations, counted


def test_ring_too_small_counts_what_it_loses(tmp_path: Path, paths: RigPaths) -> None:
    calls = 300_000
    start = tmp_path / "go"
    small = {"probes": {"ring_bytes": 4096}}
    with Stack(tmp_path, [f"{paths.root}/*"], agent=small) as stack:
        stack.start()
        with start_calls(f"--count={calls}", paths=paths, start_file=start) as caller:
            wait_for(lambda: attached(stack), 30, f"libraries attached\n{stack.logs()}")
            start.touch()
            made = int(result(caller)["calls"])  # type: ignore[call-overload]

        def all_accounted() -> bool:
            agent = stack.agent_metrics()
            read = agent.total("lanterne_agent_events_read_total")
            return read + agent.total("lanterne_agent_events_lost_total") >= made

        assert made >= calls
        wait_for(all_accounted, 20, "every call read or counted as lost")
        time.sleep(1)
        agent = stack.agent_metrics()
        read = agent.total("lanterne_agent_events_read_total")
        lost = {
            labels["reason"]: value
            for labels, value in agent.get("lanterne_agent_events_lost_total")
            if value
        }
        assert 0 < read < made
        assert read + sum(lost.values()) == made, lost
        # The collector, and so the operator, knows too.
        wait_for(
            lambda: (
                stack.collector_metrics().total("lanterne_node_events_lost_total")
                == sum(lost.values())
            ),
            20,
            "the losses at the collector",
        )


def test_doctor_says_what_cannot_be_seen(stack: Stack, paths: RigPaths) -> None:
    import json
    import subprocess

    from tests.stack import SCRIPTS

    with job(paths, "doctor", seconds=30, mode="run-ahead") as running:
        begin(stack, running)
        done = subprocess.run(
            [str(SCRIPTS / "lanterne-agent"), "--config", str(stack.agent_config), "doctor",
             "--json"],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        checks = json.loads(done.stdout)
        text = json.dumps(checks)
        assert str(paths.nccl) in text
        assert "ncclEnqueueCheck" in text
        assert "ahead" in text
