"""Which shift brings the numbers of two ranks together, from their times and kinds of operation."""

from __future__ import annotations

import numpy as np

from lanterne.collector.analyse.gather import Flow
from lanterne.collector.analyse.joining import KEEP, Joining
from lanterne.collector.analyse.shifts import Rows, Series, newest, shift
from lanterne.probes.layout import Func

DISPATCH, COMBINE = (int(Func.ALL_TO_ALL_V) << 8 | role for role in (1, 2))
MS = 10**6


def pairs(steps: int, attention_ms: float, experts_ms: float, late: float) -> tuple[Series, Series]:
    """Arrivals at dispatch and combine, alternately, of a rank `late` times as slow, and of one
    that waits for it each time."""
    slow, fast = [], []
    together = 0.0
    for number in range(2 * steps):
        own = experts_ms if number % 2 else attention_ms
        fast.append(together + own)
        slow.append(together + own * late)
        together = slow[-1]
    kind = np.where(np.arange(2 * steps) % 2, COMBINE, DISPATCH)
    seq = np.arange(2 * steps)
    return tuple((seq, (np.array(t) * MS).astype(np.int64), kind) for t in (slow, fast))  # type: ignore[return-value]


def test_a_rank_late_by_much_of_the_period_is_brought_into_step() -> None:
    slow, fast = pairs(50, 20, 5, 1.6)
    seq, time, kind = slow
    for missed in (1, 2, 7):
        mine = (seq[: len(seq) - missed], time[missed:], kind[missed:])
        assert shift(mine, fast) == missed


def test_without_kinds_that_is_not_clear() -> None:
    (seq, time, _), (_, fast, _) = pairs(50, 20, 5, 1.6)
    same = np.full(len(seq), int(Func.ALL_REDUCE) << 8)
    assert shift((seq, time, same), (seq, fast, same)) is None


def test_different_operations_are_never_set_against_each_other() -> None:
    (seq, time, kind), fast = pairs(50, 20, 5, 1.0)
    other = np.where(kind == DISPATCH, COMBINE, DISPATCH)
    found = shift((seq, time, other), fast)
    assert found is None or found % 2 == 1


def test_of_each_rank_the_newest_operations_are_kept() -> None:
    member = np.array([5, 3, 5, 3, 5, 9, 5])
    column = np.arange(7)
    rows = Rows(member, column, column, column, np.ones(7, bool))
    assert newest(rows, 2).seq.tolist() == [1, 3, 4, 5, 6]
    assert newest(rows, 9).seq.tolist() == list(range(7))


def test_many_ranks_are_aligned_though_more_is_told_than_is_kept() -> None:
    """One node after the other tells a second of its ranks' operations."""
    ranks, told, a_node = 1200, 100, 8
    joining = Joining(4, ranks)
    joining.forget(1, 0, ranks, late=True, fresh=True)
    first = np.arange(ranks) * 7 % 50
    rng = np.random.default_rng(1)
    found: list[Flow] = []
    for begin in range(0, 3 * told, told):
        for node in range(0, ranks, a_node):
            member = np.repeat(np.arange(node, node + a_node), told)
            number = np.tile(np.arange(begin, begin + told), a_node)
            number, member = (a[number >= first[member]] for a in (number, member))
            n = len(member)
            flow = Flow(
                table=np.full(n, 2, np.int32), slot=np.full(n, 1, np.int32), rank=member,
                member=member, process=member.astype(np.int32), seq=number - first[member],
                op=np.full(n, 4, np.uint8), role=np.zeros(n, np.uint8),
                evidence=np.full(n, 2, np.uint8), flags=np.zeros(n, np.uint8),
                arrival=number * 10 * MS + rng.integers(0, MS, n),
                duration=np.full(n, MS), size=np.full(n, 64), sync=np.zeros(n, np.int64), stride=1,
            )  # fmt: skip
            rest = joining.align(flow, np.zeros(ranks, bool), np.zeros(n), {1: ranks}, begin * MS)
            found += [rest] if rest is not None else []
    assert ranks * told > 2 * KEEP
    last = found[-ranks // a_node :]
    rows = np.array([part.seq.reshape(a_node, told) for part in last]).reshape(ranks, told)
    assert (rows == rows[0]).all()
