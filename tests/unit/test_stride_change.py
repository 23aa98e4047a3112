"""Agents take a new stride one after the other: joins, verdicts and idle communicators survive."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from lanterne.collector.snapshot import Snapshot
from lanterne.proto import telemetry_pb2 as pb

S, MS = 10**9, 10**6
RANKS, NODES = 8, 2
STEP = 20 * MS
LATE = 4 * MS
SLOW = 6
WINDOWS = 40


def window(node: int, number: int, stride: int) -> pb.Batch:
    """One second of half of the ranks, thinned as an agent does."""
    mine = np.arange(node * RANKS // NODES, (node + 1) * RANKS // NODES)
    steps = np.arange(number * S // STEP, (number + 1) * S // STEP)
    steps = steps[steps % stride == 0]
    index, seq = (a.ravel() for a in np.meshgrid(np.arange(len(mine)), steps, indexing="ij"))
    slow = mine[index] == SLOW
    arrival = 100 * S + seq * STEP + np.where(slow, LATE, 0)
    n = len(seq)
    return pb.Batch(
        schema=1, node=f"n{node}", epoch=1, sequence=number + 1, boot_id="b", stride=stride,
        start_ns=100 * S + number * S, end_ns=100 * S + (number + 1) * S,
        communicators=[
            pb.Communicator(comm_hash=7, library=2, n_ranks=RANKS, rank=r, pid=10 + r,
                            pid_start_ticks=1, workload="w", gpu_index=-1, complete=True)
            for r in mine.tolist()
        ],
        processes=[pb.Process(pid=10 + r, pid_start_ticks=1) for r in mine.tolist()],
        instances=pb.Instances(
            rows=n, communicator=index.astype("<u4").tobytes(), seq=seq.astype("<u4").tobytes(),
            lane=bytes(n), op=bytes([8]) * n, role=bytes(n), evidence=bytes([2]) * n,
            flags=bytes(n), arrival_ns=arrival.astype("<u8").tobytes(),
            duration_ns=np.where(slow, MS, MS + LATE).astype("<u8").tobytes(),
            payload_bytes=np.full(n, 64, "<u8").tobytes(),
            sync_blocked_ns=np.zeros(n, "<u8").tobytes(),
        ),
    )  # fmt: skip


def run(strides: list[tuple[int, int]], idle: int = 0) -> tuple[Engine, list[Snapshot]]:
    """strides: of each agent, by window; then `idle` windows without an operation."""
    engine = Engine(EngineConfig(window_seconds=2.0, hang_seconds=5.0))
    found = []
    for number in range(len(strides) + idle):
        for node in range(NODES):
            if number < len(strides):
                message = window(node, number, strides[number][node])
            else:
                message = window(node, number, 1)
                message.ClearField("instances")
            now = message.end_ns + 10 * MS
            engine.apply(decode(message.SerializeToString(), received_ns=now))
        found.append(engine.snapshot(now / 1e9, now_ns=now))
    return engine, found


def named(snapshot: Snapshot) -> list[int]:
    return snapshot.ranks.rank[snapshot.ranks.straggler == 1].tolist()


def changing() -> list[tuple[int, int]]:
    """Up to 4 and down again; for a window after each change the agents disagree."""
    levels = [1] * 10 + [2] * 8 + [4] * 8 + [2] * 6 + [1] * 8
    return list(zip(levels, [1, *levels[:-1]], strict=True))


def test_a_change_while_agents_disagree_costs_nothing_but_single_operations() -> None:
    _, steady = run([(1, 1)] * WINDOWS)
    engine, found = run(changing())
    assert named(steady[-1]) == [SLOW]
    first = next(n for n, s in enumerate(found) if named(s))
    assert all(named(s) == [SLOW] for s in found[first:])
    # Of the operations that all agents told, every one was joined.
    both = [max(pair) for pair in changing()]
    wanted = sum(len(range(n * 50, (n + 1) * 50)[::s]) for n, s in enumerate(both))
    comm = found[-1].communicators[0]
    complete = comm.complete_share * comm.instances
    assert complete == pytest.approx(wanted, abs=4)
    assert engine.engine_counts()["rows_overrun"] == 0
    # Waits are in proportion to what was joined: no partial operation distorts them.
    share, steady_share = found[-1].ranks.wait_share, steady[-1].ranks.wait_share
    np.testing.assert_allclose(share, steady_share, atol=0.02)


@pytest.mark.parametrize("last", [(1, 2), (2, 1), (4, 1), (1, 1), (4, 4)])
def test_a_job_that_idles_while_agents_disagree_does_not_hang(last: tuple[int, int]) -> None:
    _, found = run([(1, 1)] * 8 + [last], idle=12)
    assert [c.hang for s in found for c in s.communicators if c.hang is not None] == []
