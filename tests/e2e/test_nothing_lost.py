"""Kills at random, a collector that is away, two collectors: every batch arrives, and once.

LANTERNE_KILLS=200 makes the random kills a long run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.agent import segments
from lanterne.agent.segments import Key
from lanterne.collector import acknowledged, journal
from lanterne.collector.seen import Seen
from tests.rig.rig import Job, JobConfig, RigPaths, build, expected_calls
from tests.stack import Stack, wait_for

KILLS = int(os.environ.get("LANTERNE_KILLS", "15"))
IDLE_AGENT = {"probes": {"enabled": False}, "sources": {"nvml": False, "host": False}}
RANKS = 4


def ranges(state: Path, node: str = "demo") -> dict[int, list[list[int]]]:
    """Of each run of the agent, the batches that a collector with this state acknowledged."""
    seen = Seen()
    data = (state / journal.NAME).read_bytes()
    assert acknowledged.unpack(data, seen) == len(data)
    return {e: known.ranges for e, known in dict(seen.items())[node].epochs.items()}


def on_disk(spool: Path) -> set[Key]:
    """Whole batches in the segments."""
    scans = (segments.scan(path.read_bytes()) for path in spool.glob("*.seg"))
    return {(r.epoch, r.sequence) for s in scans for r in s.records if r.kind == segments.BATCH}


@pytest.mark.faults  # minutes: make test-faults
@pytest.mark.timeout(120 + 8 * KILLS)
def test_kills_at_random_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """What an agent has sent or has on its disk arrives, whoever is killed, in order, once."""
    spool, state = tmp_path / "spool", tmp_path / "state"
    agent = IDLE_AGENT | {
        "spool": {"path": str(spool), "sync_seconds": 0.1},
        "window": {"seconds": 0.1},
        "collector": {"backoff_max_seconds": 0.5, "heartbeat_seconds": 0.2},
    }
    rng = random.Random(5)
    acknowledged_runs: dict[int, list[list[int]]] = {}
    safe: set[Key] = set()  # seen on the disk of a killed agent
    with Stack(tmp_path, [], agent=agent, collector={"state": {"path": str(state)}}) as stack:
        stack.start()
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.05, 1.2))
            victim = rng.choice(["agent", "collector"])
            if victim == "agent":
                stack.kill("agent")
                safe |= on_disk(spool)
            else:
                stack.kill("collector")
                time.sleep(rng.uniform(0.0, 1.0))
            if rng.random() < 0.3:  # both at once
                stack.kill("collector")
            if stack.collector is not None and stack.collector.poll() is not None:
                if state.exists():
                    acknowledged_runs |= ranges(state)
                stack.start_collector()
            if stack.agent is not None and stack.agent.poll() is not None:
                stack.start_agent()
        wait_for(
            lambda: stack.agent_metrics().total("lanterne_agent_queue_batches") <= 1,
            30,
            f"everything acknowledged\n{stack.logs()}",
        )
        refused = stack.collector_metrics().total("lanterne_collector_batches_refused_total")
        errors = stack.collector_metrics().total("lanterne_collector_state_errors_total")
        assert refused == 0
        assert errors == stack.collector_metrics().total(
            "lanterne_collector_state_errors_total", reason="journal_corrupt"
        )
        assert stack.stop_one("agent") == 0
        assert stack.stop_one("collector") == 0
    acknowledged_runs |= ranges(state)
    runs = [acknowledged_runs[epoch] for epoch in sorted(acknowledged_runs)]
    # One stretch from the first batch on, for every run of the agent: no hole.
    assert all(len(r) == 1 and r[0][0] == 1 for r in runs), runs
    arrived = {
        (epoch, n)
        for epoch, ((low, high),) in acknowledged_runs.items()
        for n in range(low, high + 1)
    }
    assert safe <= arrived
    assert len(safe) > KILLS // 4
    assert list(spool.glob("*.seg")) == []


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


BASE = {"ranks": RANKS, "tokens": 32, "hidden": 64, "layers": 2, "attn_us": 3000, "mode": "eager"}


def counted(stack: Stack, workload: str) -> float:
    return stack.collector_metrics().total("lanterne_collective_calls_total", workload=workload)


@pytest.mark.kernel
@pytest.mark.timeout(240)
def test_a_job_that_ran_while_nobody_listened_is_counted_exactly(
    tmp_path: Path, paths: RigPaths
) -> None:
    """The collector is away; the agent, told to stop, leaves the last window in the spool."""
    spool = tmp_path / "spool"
    agent = {
        "spool": {"path": str(spool)},
        "collector": {"queue_batches": 2, "shutdown_seconds": 0.5, "backoff_max_seconds": 0.5},
    }
    keep = {"analysis": {"ended_seconds": 600}, "state": {"path": str(tmp_path / "state")}}
    steps = 300
    config = JobConfig(**BASE, steps=steps)  # type: ignore[arg-type]
    with Stack(tmp_path, [f"{paths.root}/*"], agent=agent, collector=keep) as stack:
        stack.start_agent()
        with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "w"}, hold="start") as job:
            wait_for(
                lambda: (
                    stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2
                ),
                30,
                f"libraries attached\n{stack.logs()}",
            )
            job.release()
            assert job.wait(120) == [0] * RANKS
        wanted = ("ncclSend", "ncclRecv", "ncclAllReduce")
        calls = sum(expected_calls(config, steps, r)[n] for r in range(RANKS) for n in wanted)
        read = "lanterne_agent_events_read_total"
        wait_for(lambda: stack.agent_metrics().total(read) >= calls, 30, "all events read")
        assert stack.stop_one("agent") == 0
        assert list(spool.glob("*.seg"))
        stack.start_collector()
        stack.start_agent()
        operations = steps * (2 * config.layers + 1) * RANKS
        wait_for(lambda: counted(stack, "w") >= operations, 40, f"the job\n{stack.logs()}")
        # The page is of the last window: what was left may be sent before the first one closes.
        restored = "lanterne_agent_spool_restored_total"
        wait_for(lambda: stack.agent_metrics().total(restored) > 0, 20, "batches of the run before")
        assert stack.agent_metrics().total("lanterne_agent_batches_dropped_total") == 0
        wait_for(lambda: not list(spool.glob("*.seg")), 20, "an empty spool")
        assert counted(stack, "w") == operations


@pytest.mark.faults  # minutes: make test-faults
@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_a_crowded_collector_asks_all_for_less_and_loses_nothing(
    tmp_path: Path, paths: RigPaths
) -> None:
    """Two agents that do not fit into the queue at one moment: RETRY, and a stride for both."""
    keep = {
        "analysis": {"ended_seconds": 600, "window_seconds": 1.0},
        "ingest": {"queue_batches": 2},
    }
    (tmp_path / "other").mkdir()
    steps = 400
    config = JobConfig(**BASE, steps=steps)  # type: ignore[arg-type]
    with Stack(tmp_path, [f"{paths.root}/*"], collector=keep) as stack:
        stack.start()
        address = f"127.0.0.1:{stack.grpc_port}"
        busy = IDLE_AGENT | {"window": {"seconds": 0.1}, "collector": {"addresses": [address]}}
        with Stack(tmp_path / "other", [], node="other", agent=busy) as other:
            other.start_agent()
            with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "w"}, hold="start") as job:
                wait_for(
                    lambda: (
                        stack.agent_metrics().total("lanterne_agent_libraries", state="attached")
                        >= 2
                    ),
                    30,
                    f"libraries attached\n{stack.logs()}",
                )
                job.release()
                assert job.wait(120) == [0] * RANKS
            stride = "lanterne_agent_stride"
            wait_for(
                lambda: (
                    stack.agent_metrics().total(stride) == other.agent_metrics().total(stride) > 1
                ),
                60,
                f"one stride for both\n{stack.logs()}",
            )
            retried = "lanterne_collector_batches_total"
            wait_for(
                lambda: stack.collector_metrics().total(retried, status="retried") > 0, 60, "RETRY"
            )
        operations = steps * (2 * config.layers + 1) * RANKS
        wait_for(lambda: counted(stack, "w") >= operations, 60, f"the job\n{stack.logs()}")
        assert counted(stack, "w") == operations
        for page in (stack.agent_metrics(), stack.collector_metrics()):
            assert page.total("lanterne_agent_batches_dropped_total") == 0
            assert page.total("lanterne_collector_batches_refused_total") == 0


@pytest.fixture
def two(tmp_path: Path, paths: RigPaths) -> Iterator[tuple[Stack, Stack]]:
    """Two collectors, each with its own state; one agent that knows both."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    keep = {"analysis": {"ended_seconds": 600}}
    second = Stack(folders[1], [], collector=keep | {"state": {"path": str(folders[1] / "s")}})
    first = Stack(
        folders[0],
        [f"{paths.root}/*"],
        agent={
            "spool": {"path": str(tmp_path / "spool")},
            "collector": {"backoff_max_seconds": 0.5},
        },
        collector=keep | {"state": {"path": str(folders[0] / "s")}},
    )
    text = first.agent_config.read_text()
    address = f'"127.0.0.1:{first.grpc_port}"'
    assert address in text
    both = text.replace(address, f'{address}, "127.0.0.1:{second.grpc_port}"')
    first.agent_config.write_text(both)
    with second, first:
        second.start_collector()
        yield first.start(), second


@pytest.mark.kernel
@pytest.mark.timeout(400)
def test_the_second_collector_takes_over(
    two: tuple[Stack, Stack], paths: RigPaths, tmp_path: Path
) -> None:
    first, second = two
    slow = {"attn_us": 4000, "expert_us": 1000, "faults": ("slow-rank:2:2",)}
    config = JobConfig(**(BASE | slow), seconds=200)  # type: ignore[arg-type]
    with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "w"}, hold="start") as job:
        wait_for(
            lambda: first.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2,
            30,
            f"libraries attached\n{first.logs()}",
        )
        job.release()
        job.wait_ready()
        wait_for(
            lambda: [row["rank"] for row in first.named()] == [2], 90, f"verdict\n{first.logs()}"
        )
        first.kill("collector")
        wait_for(
            lambda: [row["rank"] for row in second.named()] == [2],
            90,
            f"the verdict of the second\n{second.logs()}\n{first.logs()}",
        )
        job.stop()
    page = first.agent_metrics()
    assert page.total("lanterne_agent_batches_dropped_total") == 0
    assert page.total("lanterne_agent_events_lost_total") == 0
    assert first.stop_one("agent") == 0
    assert second.stop_one("collector") == 0
    ((_, [before]),) = ranges(tmp_path / "first" / "s").items()
    ((_, [after]),) = ranges(tmp_path / "second" / "s").items()
    # The second goes on where the first left off; what was on its way may be with both.
    assert before[0] == 1
    assert after[0] <= before[1] + 1
    assert after[1] > before[1]
