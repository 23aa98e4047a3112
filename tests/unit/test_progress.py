"""Operations that were lost, and rows that nobody will add to, on small flows."""

from __future__ import annotations

import numpy as np

from lanterne.collector.align import OPEN, Tables
from lanterne.collector.analyse.gather import Flow
from lanterne.collector.analyse.progress import EARLIEST_NS, Progress
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.who import Slot

NS = 10**9


def flow(
    member: list[int],
    seq: list[int],
    *,
    lane: int | list[int] = 0,
    process: list[int],
    stride: int = 1,
) -> Flow:
    n = len(seq)
    small = np.zeros(n, np.uint8)
    large = np.zeros(n, np.int64)
    table = np.broadcast_to(np.array(lane, np.int32), n).copy()
    return Flow(
        table=table,
        slot=table // 2,
        rank=np.array(member),
        member=np.array(member),
        process=np.array(process, np.int32),
        seq=np.array(seq),
        op=small,
        role=small,
        evidence=small + 1,
        flags=small,
        arrival=np.arange(n),
        duration=large,
        size=large,
        sync=large,
        stride=stride,
    )


def progress() -> Progress:
    made = Progress(8)
    made.forget(0, 0, 8)
    return made


def test_nothing_is_lost_where_numbers_follow_each_other() -> None:
    p = progress()
    assert p.add(flow([0, 0, 1, 1], [0, 1, 0, 1], process=[0, 0, 1, 1]), NS) is None
    assert p.add(flow([0, 1], [2, 2], process=[0, 1]), NS) is None


def test_a_communicator_may_be_met_running() -> None:
    p = progress()
    assert p.add(flow([0, 0], [700, 701], process=[0, 0]), NS) is None


def test_what_follows_a_loss_is_marked_within_a_flush_and_across_two() -> None:
    p = progress()
    lost = p.add(flow([0, 0, 0, 1, 1], [0, 1, 3, 0, 1], process=[0, 0, 0, 1, 1]), NS)
    assert lost is not None
    assert lost.tolist() == [False, False, True, False, False]
    lost = p.add(flow([0, 0, 1], [5, 6, 2], process=[0, 0, 1]), NS)
    assert lost is not None
    assert lost.tolist() == [True, False, False]


def test_operations_elsewhere_in_between_may_have_followed_the_lost_one() -> None:
    """Members 0 and 4 are one process in two communicators, which take turns; 4's 1 is lost."""
    lost = progress().add(flow([0, 4, 0, 0, 4, 0], [0, 0, 1, 2, 2, 3], process=[0] * 6), NS)
    assert lost is not None
    assert lost.tolist() == [False, False, True, True, True, False]


def test_sampled_operations_are_a_stride_apart() -> None:
    p = progress()
    assert p.add(flow([0, 0, 0], [0, 4, 8], process=[0] * 3, stride=4), NS) is None
    lost = p.add(flow([0, 0], [16, 20], process=[0] * 2, stride=4), NS)
    assert lost is not None
    assert lost.tolist() == [True, False]


def opened(rows: int) -> tuple[Tables, Registry]:
    """A communicator of three ranks, whose first rows are open since the first second."""
    tables = Tables(cells=1 << 10, rows=1 << 8, tables=2)
    assert tables.open(0, 3, 31)
    tables.tag[:rows], tables.state[:rows], tables.since[:rows] = np.arange(rows), OPEN, NS
    registry = Registry(slots=1, members=8, processes=8, nodes=2)
    registry.slots.append(Slot(1, 3, 0, "nccl", "", "", "", ""))
    return tables, registry


def test_rows_that_all_ranks_have_gone_past_are_not_waited_for() -> None:
    p = progress()
    tables, registry = opened(4)
    p.add(flow([0, 0, 1, 2], [0, 3, 1, 2], process=[0, 0, 1, 2]), NS)
    later = NS + EARLIEST_NS + 1
    assert p.passed(tables, registry, later, 10 * NS).tolist() == [0, 1]
    assert not len(p.passed(tables, registry, NS + EARLIEST_NS, 10 * NS))  # too soon for anyone


def test_a_rank_that_never_reports_is_waited_for_once() -> None:
    p = progress()
    tables, registry = opened(4)
    p.add(flow([0, 1], [3, 2], process=[0, 1]), NS)
    assert not len(p.passed(tables, registry, 5 * NS, 10 * NS))
    p.add(flow([0, 1], [4, 3], process=[0, 1]), 12 * NS)
    assert p.passed(tables, registry, 13 * NS, 10 * NS).tolist() == [0, 1, 2, 3]


def test_a_rank_that_falls_silent_is_waited_for_until_the_deadline() -> None:
    p = progress()
    tables, registry = opened(4)
    p.add(flow([0, 1, 2], [0, 0, 0], process=[0, 1, 2]), NS)
    p.add(flow([0, 1], [3, 3], process=[0, 1]), 9 * NS)
    assert p.passed(tables, registry, 10 * NS, 10 * NS).tolist() == [0]
    assert p.passed(tables, registry, 12 * NS, 10 * NS).tolist() == [0, 1, 2, 3]
