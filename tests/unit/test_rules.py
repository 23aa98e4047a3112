"""Routing bias, batch limits, dropped tokens, shared experts beside hot ones."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.collector.analyse import rules


def test_bias_moves_against_the_load_outside_the_band() -> None:
    # Mean 1000; chance 2 sqrt(1000) = 63, 5 % = 50: the band is 63.
    counts = [[1100.0, 1060.0, 900.0, 940.0]]
    assert rules.bias_steps(counts).tolist() == [[-0.001, 0.0, 0.001, 0.0]]
    # Few tokens: 12 against a mean of 8 is chance (band 5.7).
    assert not rules.bias_steps([[12.0, 8.0, 8.0, 4.0]]).any()
    assert rules.bias_steps([[0.0, 0.0]]).tolist() == [[0.0, 0.0]]
    # Driven by its own steps, a skewed router settles inside the band and stays there.
    rng = np.random.default_rng(5)
    affinity, bias = rng.normal(0, 0.3, 16), np.zeros((1, 16))
    for _ in range(3000):
        p = np.exp(3 * (affinity + bias[0]))
        counts = [rng.multinomial(4096, p / p.sum())]
        bias += rules.bias_steps(counts)
    assert np.max(counts) < 1.4 * np.mean(counts)


def test_batch_limit_of_the_claimed_table() -> None:
    """The published figures: at batch 1 communication is already the longer part."""
    batch = [1, 16, 32, 64, 128]
    ffn = [0.28, 0.45, 0.78, 1.42, 2.80]
    exchange = [0.35, 0.42, 0.72, 1.85, 4.92]
    per_token_ms = np.array([18.5, 21.2, 28.6, 45.2, 89.5])
    found = rules.batch_limit(batch, ffn, exchange, 1000 * np.array(batch) / per_token_ms)
    assert found.communication_above == 64  # above 1, below 1 at 16 and 32, above from 64 on
    assert not found.always
    # 1,119 to 1,416 to 1,430 tokens/s: 64 to 128 adds 1 %.
    assert found.saturated_above == 64
    assert found.best == 128
    assert rules.batch_limit(batch, ffn, 2 * np.array(ffn)).always
    assert rules.batch_limit(batch, ffn, 2 * np.array(ffn)).communication_above is None
    assert rules.batch_limit(batch, 3 * np.array(exchange), exchange).communication_above is None


def test_batch_limit_is_robust() -> None:
    # Several measurements of one batch count by their median; what is no number is left out.
    found = rules.batch_limit([1, 1, 1, 8, 8], [1, 1, 1, 1, 0], [0.5, 0.5, 9, 2, 9])
    assert found.communication_above == 8
    assert found.saturated_above is None
    assert rules.batch_limit([], [], []) == rules.BatchLimit(None, False, None, None)
    assert rules.batch_limit([1, 2, 4], [1] * 3, [0] * 3, [10, 20, 40]).saturated_above is None
    with pytest.raises(ValueError, match="differ in length"):
        rules.batch_limit([1, 2], [1], [1])


def test_dropping() -> None:
    assert rules.dropping([[4.0, 0.0]], 0) is None
    found = rules.dropping([[300.0, 100.0, 0.0, 0.0], [0.0] * 4, [100.0] * 4], 40.0)
    assert found == rules.Dropping(dropped_share=0.05, capacity_factor_needed=3.0)
    assert rules.dropping([[0.0, 0.0]], 3.0) is None


def test_shared_beside_hot() -> None:
    routed = [[10.0, 4.0, 4.0], [1.0, 9.0, 1.0], [5.0, 5.0, 5.0]]
    found = rules.shared_with_hot(routed, [0, 0, -1], [2.0, 3.0, 4.0])
    # Layer 0: 12 becomes max(10, 6) = 10. Layer 1: GPU 0 is not the busiest, 9 stays 9.
    assert found == [rules.SharedExpert(0, 0, 1, pytest.approx(1 - 10 / 12))]
    with pytest.raises(ValueError, match="beyond"):
        rules.shared_with_hot(routed, [3, 0, 0], [1.0] * 3)
    with pytest.raises(ValueError, match="must be"):
        rules.shared_with_hot(routed, [0, 0], [1.0] * 3)
    assert rules.shared_with_hot(routed, [-1] * 3, [1.0] * 3) == []


@pytest.mark.parametrize("bad", [[1.0], [[np.nan]], [[-1.0]], [[]]])
def test_counts_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="counts"):
        rules.bias_steps(bad)  # type: ignore[arg-type]
