"""Data really moves between processes, and jobs do exactly what was computed for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.rig.known import seen_by_probes
from tests.rig.rig import (
    Job,
    JobConfig,
    RigPaths,
    build,
    expected_bytes,
    expected_calls,
    known_calls,
)

SHORT = {"RIG_NCCL_TIMEOUT_MS": "20000"}


@pytest.fixture(scope="module")
def normal() -> RigPaths:
    return build()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_moves_the_right_data(
    normal: RigPaths, tmp_path: Path, ranks: int
) -> None:
    env = dict(os.environ) | SHORT | {"RIG_SHM_PREFIX": f"rig-data-{os.getpid()}-{ranks}"}
    command = [sys.executable, "-m", "tests.rig.peer", str(normal.root), str(ranks)]
    peers = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=env, stdout=subprocess.PIPE,
                         text=True, cwd=Path(__file__).parents[2])
        for rank in range(ranks)
    ]  # fmt: skip
    for peer in peers:
        text, _ = peer.communicate(timeout=60)
        results = json.loads(text)
        assert len(results) == 16
        assert set(results.values()) == {True}, results
    assert not list(Path("/dev/shm").glob(f"rig-data-{os.getpid()}-{ranks}*"))


def test_known_calls() -> None:
    one, two = known_calls(ranks=1), known_calls(ranks=2, repeat=2)
    assert one["ncclAllReduce"] == 8  # 6 a round and rank, split and the one in init-all included
    assert two["ncclAllReduce"] == 2 * 2 * 7 + 2
    assert two["ncclGroupStart"] - two["ncclGroupEnd"] == two["ncclGroupSimulateEnd"] == 4
    assert seen_by_probes(two)["ncclBroadcast"] == two["ncclBroadcast"] + two["ncclBcast"] == 8


CONFIGS = {
    "eager": JobConfig(ranks=4, steps=6, layers=2, zipf=1.2, topk=4, experts=16, seed=5),
    "hot": JobConfig(ranks=4, steps=6, experts=16, topk=4, faults=("hot-expert:5:30@3",)),
    "capped": JobConfig(ranks=2, steps=4, topk=2, experts=4, faults=("hot-expert:1:1000",)),
    "graph": JobConfig(ranks=4, steps=6, mode="graph", dp_groups=2, pipeline=True),
    "equal": JobConfig(ranks=3, steps=5, mode="run-ahead", equal_split=True, pipeline=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_job_does_exactly_what_was_computed(name: str) -> None:
    config = CONFIGS[name]
    with Job(config, env=SHORT) as job:
        assert job.wait() == [0] * config.ranks
        truths = job.truths()
    for phase in ("dispatch", "combine"):
        wanted = expected_bytes(config, config.steps, phase)
        assert np.array_equal([x[f"{phase}_bytes_sent"] for x in truths], wanted)
        assert np.array_equal([x[f"{phase}_bytes_received"] for x in truths], wanted.T)
    for rank, truth in enumerate(truths):
        assert truth["state"] == "done"
        assert truth["steps"] == config.steps
        assert truth["data_errors"] == 0
        calls = expected_calls(config, config.steps, rank)
        assert {key: truth["calls"][key] for key in calls} == calls
        world = truth["comms"][0]
        assert world["collectives"] == config.steps
        assert world["p2p_groups"] == 2 * config.layers * config.steps
        assert truth["waits"]["dispatch"]["count"] == config.layers * config.steps


def test_old_and_stripped_libraries_run_the_same_job() -> None:
    for variant in ("stripped", "old"):
        with Job(JobConfig(ranks=2, steps=3), paths=build(variant), env=SHORT) as job:
            assert job.wait() == [0, 0]
