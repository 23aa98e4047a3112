"""Which shift brings the numbers of two ranks together, from their times and kinds of operation."""

from __future__ import annotations

import numpy as np

from lanterne.collector.analyse.joining import Series, _shift
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
        assert _shift(mine, fast) == missed


def test_without_kinds_that_is_not_clear() -> None:
    (seq, time, _), (_, fast, _) = pairs(50, 20, 5, 1.6)
    same = np.full(len(seq), int(Func.ALL_REDUCE) << 8)
    assert _shift((seq, time, same), (seq, fast, same)) is None


def test_different_operations_are_never_set_against_each_other() -> None:
    (seq, time, kind), fast = pairs(50, 20, 5, 1.0)
    other = np.where(kind == DISPATCH, COMBINE, DISPATCH)
    found = _shift((seq, time, other), fast)
    assert found is None or found % 2 == 1
