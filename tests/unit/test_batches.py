"""From which size on a larger batch no longer pays, from recorded steps."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.collector.analyse.advice import Advisor
from lanterne.collector.analyse.batches import KEPT, Batches
from lanterne.collector.snapshot import StepView

# batch -> seconds of the experts, of dispatch and combine, of the whole step
CLAIMED = {
    16: (0.45e-3, 0.42e-3, 16e-3),
    32: (0.78e-3, 0.72e-3, 22e-3),
    64: (1.42e-3, 1.85e-3, 44e-3),
    128: (2.80e-3, 4.92e-3, 88e-3),
}


def _view(batch: int, when: float, n: int = 10, *, assignments: bool = True) -> StepView:
    expert, exchange, span = CLAIMED[batch]
    rng = np.random.default_rng(batch)

    def about(value: float) -> np.ndarray:
        return value * rng.lognormal(0, 0.02, n)

    steps = {
        "start": when + np.arange(n) * 0.1,
        "span": about(span),
        "idle": np.zeros(n),
        "expert": about(expert),
        "dispatch": about(exchange / 2),
        "combine": about(exchange / 2),
        "size": np.full(n, batch * 8 * 7168.0),
        "assignments": np.full(n, batch * 8.0 if assignments else np.nan),
    }
    return StepView(10, "device", steps, np.ones(n, bool), {})


@pytest.mark.parametrize("assignments", [True, False])
def test_the_limits_are_found(assignments: bool) -> None:
    batches = Batches()
    for i, batch in enumerate(CLAIMED):
        assert batches.of("chat") is None or i == 3
        batches.add("chat", _view(batch, 10.0 * i, assignments=assignments))
    found = batches.of("chat")
    assert found is not None
    unit = 8 if assignments else 8 * 7168
    assert found.unit == ("assignments" if assignments else "bytes")
    assert found.limit.communication_above == 64 * unit
    assert found.limit.saturated_above == 32 * unit  # 22 to 44 ms: twice the batch, twice the time
    assert found.sizes == 4


def test_each_step_counts_once_and_few_do_not_count() -> None:
    batches = Batches()
    for batch in CLAIMED:
        view = _view(batch, 10.0 * batch, n=5)
        for _ in range(10):  # the same steps, seen again
            batches.add("chat", view)
    assert batches.of("chat") is None
    for i in range(20):
        batches.add("chat", _view(16, 5000.0 + 10 * i))
    (kept,) = (k for k in batches._seen["chat"]["assignments"].values() if len(k) > 5)
    assert len(kept) == KEPT
    batches.forget(set())
    assert batches._seen == {}


def test_advice_says_where() -> None:
    advisor = Advisor()
    for i, batch in enumerate(CLAIMED):
        advisor.add_steps([("chat", _view(batch, 10.0 * i))])
    (piece,) = advisor.advice()
    assert piece.kind == "batch"
    assert "from 512 assignments a step on" in piece.text
    assert piece.evidence["communication_above"] == 512
    advisor.add_steps([])
    assert advisor.advice() == ()
