"""An expert-parallel job on DeepEP's launchers, under a real agent and collector."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.moe.build import build_deepep, build_job
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

RANKS = 4
SLOW = 2


class Job:
    """The job's launcher and its rank processes; `begin` lets them start calling."""

    def __init__(self, folder: Path, build: str, workload: str, **options: object) -> None:
        library = build_deepep(folder / "lib", build)
        program = build_job(folder, library, build)
        self.start = folder / "go"
        options = {"ranks": RANKS, "start": self.start} | options
        self.process = subprocess.Popen(
            [str(program), *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": str(RANKS),
               "LANTERNE_WORKLOAD": workload},
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.communicate()

    def begin(self, stack: Stack) -> None:
        def attached() -> bool:
            metrics = stack.agent_metrics()
            return metrics.total("lanterne_agent_libraries", kind="deepep", state="attached") == 1

        wait_for(attached, 30, f"the library is attached\n{stack.logs()}")
        self.start.touch()

    def truth(self) -> list[dict[str, int]]:
        out, _ = self.process.communicate(timeout=90)
        assert self.process.returncode == 0
        found: list[dict[str, int]] = json.loads(out)
        return found


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, [f"{tmp_path}/lib/*"]) as stack:
        yield stack.start()


def calls(stack: Stack, workload: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(operation, source) -> calls and bytes, over the communicators of a workload."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for comm in stack.snapshot()["communicators"]:
        if comm["workload"] == workload:
            assert (comm["library"], comm["n_ranks"]) == ("deepep", RANKS)
            for row in comm["calls"]:
                key = row["op"], row["source"]
                before = found.get(key, (0, 0))
                found[key] = before[0] + row["calls"], before[1] + row["bytes"]
    return found


def count_of(found: dict[tuple[str, str], tuple[int, int]], op: str) -> int:
    return sum(n for (name, _), (n, _) in found.items() if name == op)


def settled(stack: Stack, workload: str, truth: list[dict[str, int]]) -> Any:
    """The calls, once as many have arrived as the job says that it made."""
    wanted = sum(t["combines"] for t in truth)

    def all_there() -> Any:
        found = calls(stack, workload)
        return found if count_of(found, "combine") >= wanted else None

    return wait_for(all_there, 20, f"{wanted} combines; {calls(stack, workload)}\n{stack.logs()}")


def test_a_slow_rank_is_named_on_blocking_evidence(stack: Stack, tmp_path: Path) -> None:
    options = {"slow_rank": SLOW, "slow_us": 4000, "steps": 700}
    with Job(tmp_path, "sgl", "slow", **options) as job:
        job.begin(stack)
        rows = wait_for(lambda: list(stack.named()), 60, f"a named rank\n{stack.logs()}")
        assert {(row["rank"], row["workload"]) for row in rows} == {(SLOW, "slow")}
        assert {row["evidence"] for row in rows} == {"blocking"}
        metrics = stack.collector_metrics()
        waits = {
            int(labels["rank"]): value
            for labels, value in metrics.get("lanterne_rank_wait_seconds_total", source="blocking")
        }
        assert min(waits, key=waits.__getitem__) == SLOW
        assert len(waits) == RANKS
        histogram = metrics.total(
            "lanterne_moe_dispatch_duration_seconds_count", workload="slow", source="blocking"
        )
        assert histogram > 0
        assert not metrics.get("lanterne_moe_combine_duration_seconds_count", source="blocking")


@pytest.mark.parametrize("build", ["v1.2.1", "head"])
def test_normal_mode_is_counted_exactly(stack: Stack, tmp_path: Path, build: str) -> None:
    with Job(tmp_path, build, "known", steps=40, hot_rank=1) as job:
        job.begin(stack)
        truth = job.truth()
        found = settled(stack, "known", truth)
        hidden = 1024 * 2
        assert found == {
            ("dispatch", "blocking"): (
                sum(t["dispatches"] for t in truth),
                sum(t["sent_tokens"] for t in truth) * hidden,
            ),
            ("combine", "none"): (
                sum(t["combines"] for t in truth),
                sum(t["received_tokens"] for t in truth) * hidden,
            ),
        }
        agent = stack.agent_metrics()
        assert agent.total("lanterne_agent_events_lost_total") == 0
        # The spread of tokens: what each rank's combines sent back.
        (comm,) = [c for c in stack.snapshot()["communicators"] if c["workload"] == "known"]
        received = [t["received_tokens"] for t in truth]
        mean = sum(received) / RANKS
        assert comm["load"]["skew"] == pytest.approx(max(received) / mean)
        assert comm["load"]["balancedness"] == pytest.approx(mean / max(received))
        assert max(received) > 1.5 * mean
        assert comm["load_share"] == pytest.approx([n / sum(received) for n in received])
        if comm["tokens"] != received:  # the span is shorter than the job
            assert sum(comm["tokens"]) < sum(received)


@pytest.mark.parametrize(("build", "mode"), [("sgl", "hook"), ("head", "ll")])
def test_low_latency_mode_is_counted_once_and_not_timed(
    stack: Stack, tmp_path: Path, build: str, mode: str
) -> None:
    with Job(tmp_path, build, "ll", mode=mode, steps=40) as job:
        job.begin(stack)
        truth = job.truth()
        found = settled(stack, "ll", truth)
        tokens = sum(t["sent_tokens"] for t in truth)
        assert found == {
            ("dispatch", "none"): (sum(t["dispatches"] for t in truth), tokens * 1024),
            ("combine", "none"): (sum(t["combines"] for t in truth), tokens * 1024 * 2),
        }
        metrics = stack.collector_metrics()
        assert not metrics.get("lanterne_rank_wait_seconds_total", workload="ll")
        assert not list(stack.named())


def test_no_wait_is_told_where_the_host_does_not_wait(stack: Stack, tmp_path: Path) -> None:
    with Job(tmp_path, "sgl", "worst", steps=40, worst=4096) as job:
        job.begin(stack)
        truth = job.truth()
        assert set(settled(stack, "worst", truth)) == {("dispatch", "none"), ("combine", "none")}
