"""Each fault has its effect; what dies or hangs leaves nothing behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rig.rig import Job, JobConfig, dispatch_rows

SHORT = {"RIG_NCCL_TIMEOUT_MS": "20000"}


def finished(config: JobConfig) -> list[dict[str, Any]]:
    with Job(config, env=SHORT) as job:
        assert job.wait() == [0] * config.ranks
        return job.truths()


def waits(truths: list[dict[str, Any]], phase: str = "dispatch") -> np.ndarray[Any, Any]:
    return np.array([x["waits"][phase]["sum_ns"] for x in truths])


def arrivals(truths: list[dict[str, Any]], phase: str) -> np.ndarray[Any, Any]:
    """Begin times [instance, rank], in order of step and layer."""
    rows = [
        [row[4] for row in sorted(x["arrivals"]) if row[2] == phase] for x in truths
    ]  # row: step, layer, phase, host, begin, end
    return np.array(rows).T


def test_slow_rank_comes_last_and_waits_least() -> None:
    truths = finished(JobConfig(ranks=4, steps=10, attn_us=1500, faults=("slow-rank:2:6@5",)))
    assert waits(truths).argmin() == 2
    late = arrivals(truths, "dispatch").argmax(axis=1)
    assert (late[10:] == 2).mean() >= 0.8
    assert (late[:10] == 2).mean() < (late[10:] == 2).mean()


def test_intermittent_rank_is_late_in_every_other_block() -> None:
    truths = finished(
        JobConfig(ranks=3, steps=16, layers=1, attn_us=1500, faults=("intermittent:1:6:4",))
    )
    late = arrivals(truths, "dispatch").argmax(axis=1)
    slow = np.arange(16) // 4 % 2 == 1
    assert (late[slow] == 1).mean() >= 0.75
    assert (late[~slow] == 1).mean() < (late[slow] == 1).mean()


def test_slow_host_enqueues_late() -> None:
    truths = finished(JobConfig(ranks=3, steps=8, layers=1, faults=("slow-host:0:8",)))
    assert (arrivals(truths, "dispatch").argmax(axis=1) == 0).mean() >= 0.75
    assert waits(truths).argmin() == 0


def test_slow_sender_makes_the_others_wait() -> None:
    truths = finished(JobConfig(ranks=4, steps=8, faults=("slow-sender:1:8",)))
    assert waits(truths).argmin() == 1
    assert (np.delete(waits(truths), 1) > 8 * 2 * 6_000_000).all()


def spans(truth: dict[str, Any], phase: str) -> np.ndarray[Any, Any]:
    """How long each operation lasted on this rank's device."""
    return np.array([row[5] - row[4] for row in truth["arrivals"] if row[2] == phase])


def test_slow_receiver_takes_long_each_time_and_comes_late_to_the_next() -> None:
    truths = finished(JobConfig(ranks=4, steps=8, faults=("slow-receiver:3:8",)))
    for phase in ("dispatch", "combine"):
        assert spans(truths[3], phase).min() >= 8_000_000
    assert (arrivals(truths, "combine").argmax(axis=1) == 3).mean() >= 0.8


def test_slow_path_delays_only_its_receiver() -> None:
    truths = finished(JobConfig(ranks=4, steps=8, faults=("slow-path:0:3:8@2",)))
    assert spans(truths[3], "dispatch")[4:].min() >= 8_000_000
    assert (arrivals(truths, "combine").argmax(axis=1)[4:] == 3).mean() >= 0.8
    assert spans(truths[0], "dispatch")[:4].min() < 8_000_000


def test_hot_expert_gives_its_rank_the_most_tokens() -> None:
    config = JobConfig(ranks=4, steps=4, zipf=0.1, faults=("hot-expert:5:8",))
    tokens = np.array([x["phases"]["tokens_received"] for x in finished(config)])
    assert tokens.argmax() == 5 // 2
    wanted = sum(
        dispatch_rows(config, s, layer).sum(axis=0) for s in range(4) for layer in range(2)
    )
    assert np.array_equal(tokens, wanted)


def leftovers(job: Job) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{job.shm_prefix}*"))


@pytest.fixture
def waiting() -> Iterator[Job]:
    """Three ranks of which two wait for the one that hangs at step 3."""
    with Job(JobConfig(ranks=3, faults=("hang:1:3",), grace=0.3), env=SHORT) as job:
        end = time.monotonic() + 20
        while not (job.truth_file(1).exists() and job.truth(1)["state"] == "hung"):
            assert time.monotonic() < end
            time.sleep(0.02)
        yield job


def test_hang_costs_no_cpu_and_ends_on_request(waiting: Job) -> None:
    time.sleep(0.2)
    before = np.array(waiting.cpu_seconds())
    time.sleep(1.0)
    used = np.array(waiting.cpu_seconds()) - before
    assert len(used) == 3
    assert (used <= 0.05).all(), used
    assert waiting.stop() == [4, 4, 4]
    assert {x["state"] for x in waiting.truths()} == {"stuck"}
    waiting.close()
    assert not leftovers(waiting)


def test_crash_is_noticed_by_the_others() -> None:
    with Job(JobConfig(ranks=3, faults=("crash:1:3",)), env=SHORT) as job:
        assert job.wait(20) == [6, -signal.SIGKILL, 6]
        assert job.truth(0)["error"] == 6
        assert job.truth(0)["steps"] == 3
    assert not leftovers(job)


def test_killed_before_meeting_leaves_nothing() -> None:
    with Job(JobConfig(ranks=2, grace=0.3), hold="start", env=SHORT) as job:
        time.sleep(0.1)
        job.kill(1)
        job.release()
        time.sleep(0.3)
    assert not leftovers(job)
    assert all(process.poll() is not None for process in job.processes)


def test_sigterm_ends_all_ranks_at_one_step() -> None:
    with Job(JobConfig(ranks=4, truth_every=0.1), env=SHORT) as job:
        job.wait_ready()
        time.sleep(0.4)
        assert job.truth(0)["steps"] > 0  # written while it runs
        assert job.stop() == [0] * 4
        assert len({x["steps"] for x in job.truths()}) == 1
        assert {x["state"] for x in job.truths()} == {"stopped"}
