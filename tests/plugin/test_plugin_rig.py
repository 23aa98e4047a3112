"""The rig's jobs with the plugin: what it tells of the device, against what the device did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler.usdt import PEER_WAIT, OpFlag
from tests.plugin.build import build
from tests.plugin.tracer_process import BpfTracer
from tests.rig.rig import Job, JobConfig

pytestmark = pytest.mark.kernel
RANKS, STEPS, LAYERS = 4, 12, 2


@pytest.fixture(scope="module")
def library() -> Path:
    return build().library


@pytest.fixture(scope="module")
def tracer(library: Path) -> Iterator[BpfTracer]:
    with BpfTracer(library) as tracer:
        tracer.attach()
        yield tracer


def run(library: Path, tracer: BpfTracer, *, version: int = 5, **options: Any) -> tuple[Any, Any]:
    """(operations by rank, truth by rank) of one job."""
    config = JobConfig(ranks=RANKS, steps=STEPS, layers=LAYERS, attn_us=2000.0,
                       faults=("slow-rank:2:3",), **options)  # fmt: skip
    env = {"NCCL_PROFILER_PLUGIN": str(library), "RIG_PROFILER_VERSION": str(version),
           "RIG_NCCL_TIMEOUT_MS": "20000"}  # fmt: skip
    tracer.read()
    with Job(config, env=env) as job:
        assert job.wait() == [0] * RANKS
        truths, pids = job.truths(), job.pids
    tgids, rows = tracer.read()
    operations = rows["func"] != PEER_WAIT
    return [rows[operations & (tgids == pid)] for pid in pids], truths


def arrivals(truth: dict[str, Any], *phases: str) -> np.ndarray:
    """[begin, end] of each operation, in order."""
    rows = [row[4:6] for row in truth["arrivals"] if row[2] in phases]
    return np.array(rows, np.int64)


def spans(rows: np.ndarray, func: int) -> np.ndarray:
    """[start, stop] by sequence number, which must have no gaps."""
    mine = np.sort(rows[rows["func"] == func], order="seq")
    assert mine["seq"].tolist() == list(range(len(mine)))
    return np.stack([mine["start_ns"], mine["stop_ns"]], axis=1).astype(np.int64)


def waits(all_spans: list[np.ndarray]) -> np.ndarray:
    """Per rank, from durations alone: w = d - min d."""
    durations = np.stack([np.diff(span, axis=1)[:, 0] for span in all_spans])
    total: np.ndarray = (durations - durations.min(axis=0)).sum(axis=1)
    return total


@pytest.mark.parametrize("version", [4, 5, 6, 7])
def test_device_times_are_those_of_the_device(
    library: Path, tracer: BpfTracer, version: int
) -> None:
    ops, truths = run(library, tracer, version=version)
    world = int(truths[0]["comms"][0]["hash"], 16)
    for rank, rows in enumerate(ops):
        assert set(rows["comm_hash"]) == {world}
        assert set(rows["rank"]) == {rank}
        assert not rows["flags"].any()
        assert not rows["dropped"].any()
        assert set(rows["func"]) == {Func.P2P_GROUP, Func.ALL_REDUCE}
        sent = rows[rows["func"] == Func.P2P_GROUP]["bytes"].sum()
        truth = truths[rank]
        assert sent == sum(truth["dispatch_bytes_sent"]) + sum(truth["combine_bytes_sent"])
    told = [spans(rows, Func.P2P_GROUP) for rows in ops]
    true = [arrivals(truth, "dispatch", "combine") for truth in truths]
    assert [len(span) for span in told] == [len(span) for span in true]
    told_waits, true_waits = waits(told), waits(true)
    assert told_waits.argmin() == true_waits.argmin()
    others = np.arange(RANKS) != true_waits.argmin()
    assert np.allclose(told_waits[others], true_waits[others], rtol=0.01)
    for rows, truth in zip(ops, truths, strict=True):
        assert len(spans(rows, Func.ALL_REDUCE)) == len(arrivals(truth, "allreduce"))


def test_times_are_of_the_hosts_clock(library: Path, tracer: BpfTracer) -> None:
    """The device's timer is the wall clock here; what is told is CLOCK_MONOTONIC."""
    ops, truths = run(library, tracer)
    for rows, truth in zip(ops, truths, strict=True):
        told = spans(rows, Func.P2P_GROUP)
        true = arrivals(truth, "dispatch", "combine")
        # Not before it began; the delay of delivery is in the offset, and is one for both ends.
        shift = told - true
        assert np.median(np.abs(shift)) < 0.1 * np.median(true[:, 1] - true[:, 0])
        assert (rows["enqueue_ns"] >= truth["begin_ns"]).all()
        assert (rows["enqueue_ns"] <= rows["stop_ns"] + 1_000_000).all()


def test_every_replay_of_a_graph_is_seen(library: Path, tracer: BpfTracer) -> None:
    ops, truths = run(library, tracer, mode="graph")
    for rows, truth in zip(ops, truths, strict=True):
        groups = rows[rows["func"] == Func.P2P_GROUP]
        replayed = groups[(groups["flags"] & OpFlag.GRAPH) != 0]
        assert len(replayed) == len(arrivals(truth, "dispatch", "combine")) == STEPS * LAYERS * 2
        assert sorted(replayed["seq"].tolist()) == list(range(len(replayed)))
        reduced = rows[rows["func"] == Func.ALL_REDUCE]
        assert sorted(reduced["seq"].tolist()) == list(range(STEPS))


def test_one_call_all_to_all_is_a_group(library: Path, tracer: BpfTracer) -> None:
    ops, truths = run(library, tracer, equal_split=True)
    for rows, truth in zip(ops, truths, strict=True):
        groups = rows[rows["func"] == Func.P2P_GROUP]
        assert len(groups) == truth["comms"][0]["p2p_groups"]
        assert set(groups["tasks"]) == {2 * RANKS}


def test_nobody_listens_and_the_job_runs_as_ever(library: Path) -> None:
    config = JobConfig(ranks=2, steps=3)
    with Job(config, env={"NCCL_PROFILER_PLUGIN": str(library)}) as job:
        assert job.wait() == [0, 0]
        assert job.truth(0)["data_errors"] == 0
