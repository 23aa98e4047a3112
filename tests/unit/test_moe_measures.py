"""Measures of expert load: worked examples, edge cases, and what must hold for any load."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lanterne.collector.analyse import layers, moe, routing

NAN = math.nan
F64 = npt.NDArray[np.float64]

loads = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.integers(0, 10_000).map(float),
)
EACH = (moe.skew, moe.gini, moe.excess_gini, moe.balancedness, moe.overflow)


@given(loads, st.randoms(use_true_random=False))
def test_the_numbering_of_experts_does_not_matter(load: F64, random: object) -> None:
    order = np.arange(load.shape[1])
    random.shuffle(order)  # type: ignore[attr-defined]
    for figure in EACH:
        np.testing.assert_allclose(figure(load), figure(load[:, order]), rtol=1e-9, atol=1e-9)
    for a, b in zip(moe.skew_range(load), moe.skew_range(load[:, order]), strict=True):
        np.testing.assert_allclose(a, b)


@given(loads, st.integers(2, 1000))
def test_ratios_do_not_change_with_the_amount(load: F64, factor: int) -> None:
    for figure in (moe.skew, moe.gini, moe.balancedness):
        np.testing.assert_allclose(figure(load), figure(load * factor), rtol=1e-9, atol=1e-9)


@given(loads)
def test_figures_stay_in_their_range(load: F64) -> None:
    empty = load.sum(axis=1) == 0
    experts = load.shape[1]
    for figure, low, high in (
        (moe.skew, 1, experts),
        (moe.gini, 0, 1 - 1 / experts),
        (moe.excess_gini, 0, 1),
        (moe.balancedness, 1 / experts, 1),
        (moe.overflow, 0, 1),
    ):
        values = np.asarray(figure(load))
        assert (np.isnan(values) == empty).all(), figure
        known = values[~empty]
        assert (known >= low - 1e-9).all(), figure
        assert (known <= high + 1e-9).all(), figure


@given(loads)
def test_all_layers_at_once_are_each_layer_alone(load: F64) -> None:
    for figure in EACH:
        np.testing.assert_array_equal(figure(load), [figure(row) for row in load])
    every = layers.measure(load)
    for number, row in enumerate(load):
        one = layers.measure(row[None])
        for name in layers.LayerMeasures.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(every, name)[number], getattr(one, name)[0])


@pytest.mark.parametrize("figure", EACH)
def test_one_expert_and_none(figure: object) -> None:
    one = {moe.gini: 0, moe.excess_gini: 0, moe.overflow: 0}
    assert figure(np.array([7.0])) == one.get(figure, 1)  # type: ignore[operator, call-overload]
    assert math.isnan(figure(np.array([0.0])))  # type: ignore[operator]
    assert math.isnan(figure(np.array([])))  # type: ignore[operator]


@pytest.mark.parametrize("figure", [*EACH, moe.skew_range, moe.low_confidence, moe.hot_set])
@pytest.mark.parametrize(
    ("bad", "says"), [(NAN, "nan"), (math.inf, "inf"), (-1.0, "holds -1; no expert")]
)
def test_what_cannot_be_a_load_is_refused(figure: object, bad: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        figure(np.array([1.0, bad, 2.0]))  # type: ignore[operator]


def test_opposite_infinities_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        moe.skew(np.array([math.inf, -math.inf]))


def test_gini_with_top_k_reaches_its_maximum() -> None:
    load = np.zeros(8)
    load[:2] = 100  # every token goes to the same two experts
    assert moe.gini(load) == pytest.approx(1 - 2 / 8)


def test_capacity_is_rounded_up_and_not_by_rounding_errors() -> None:
    # One token of 16 each: int(1.25 * 16 / 256) = 0 would have dropped all of them.
    load = np.zeros(256)
    load[:16] = 1
    assert moe.overflow(load) == 0
    # 1.1 * 100 / 10 = 11.000000000000002 in floating point: the capacity is 11.
    load = np.array([12.0] + [88 / 9] * 9)
    assert moe.overflow(load, capacity_factor=1.1) == pytest.approx(1 / 100)
    with pytest.raises(ValueError, match="capacity_factor"):
        moe.overflow(load, capacity_factor=0)


def test_uniform_routing_has_no_excess() -> None:
    rng = np.random.default_rng(5)
    load = routing.counts(routing.top_k(rng.random((4096, 64)), 8), 64)
    assert load.mean() == 512
    assert moe.excess_gini(load) < 0.01
    assert not moe.low_confidence(load)
    assert moe.low_confidence(load / 20)


def test_hot_set_is_a_tenth_and_ties_go_by_number() -> None:
    assert moe.hot_set(np.arange(30.0)).tolist() == [29, 28, 27]
    assert len(moe.hot_set(np.ones(256))) == 26
    assert moe.top(np.array([1.0, 5, 5, 0]), 3).tolist() == [1, 2, 0]
    assert moe.hot_set(np.array([3.0])).tolist() == [0]


def test_loads_of_ranks_and_of_logical_experts() -> None:
    load = np.array([[4.0, 1, 1, 2], [0, 0, 8, 0]])
    np.testing.assert_array_equal(moe.rank_loads(load, [0, 0, 1, 1]), [[5, 3], [0, 8]])
    per_layer = [[0, 0, 1, 1], [1, 0, 1, 0]]
    np.testing.assert_array_equal(moe.rank_loads(load, per_layer, 3), [[5, 3, 0], [0, 8, 0]])
    np.testing.assert_array_equal(moe.logical_loads(load, [0, 1, 2, 0]), [[6, 1, 1], [0, 0, 8]])
    with pytest.raises(ValueError, match="rank_of_expert has shape"):
        moe.rank_loads(load, [0, 1])
    with pytest.raises(ValueError, match="holds 0 to 5, not 0 to 1"):
        moe.rank_loads(load, [0, 0, 1, 5], 2)
    with pytest.raises(ValueError, match="whole numbers"):
        moe.rank_loads(load, [0.0, 0, 1, 1])


def test_replicas_change_the_ranks_not_the_logical_skew() -> None:
    """Expert 0 is hot; a second copy on the other rank halves its rank's load."""
    alone = layers.measure([[80, 20, 20, 20]], rank_of_expert=[0, 0, 1, 1])
    copied = layers.measure(
        [[40, 20, 40, 20, 20]],
        rank_of_expert=[0, 0, 1, 1, 1],
        logical_of_physical=[0, 1, 0, 2, 3],
    )
    assert copied.skew == alone.skew
    assert copied.spread == alone.spread == 4
    assert alone.balancedness[0] == pytest.approx(70 / 100)
    assert copied.balancedness[0] == pytest.approx(7 / 8)


def test_local_hit() -> None:
    by_source = np.array([[[3.0, 1]], [[1, 1]]])  # two ranks, one layer, an expert on each
    found = layers.measure([[4, 2]], rank_of_expert=[0, 1], by_source=by_source)
    assert found.local_hit.tolist() == [4 / 6]
    assert moe.local_hits(np.array([[3, 1], [1, 1]])) == (4 / 6, 0.5)
    with pytest.raises(ValueError, match="needs rank_of_expert"):
        layers.measure([[4, 2]], by_source=by_source)


def test_summary_leaves_out_what_is_not_known() -> None:
    found = layers.measure([[1, 3], [0, 0]]).summary()
    assert found["skew_max"] == 1.5
    assert "balancedness_min" not in found
    assert layers.measure(np.zeros((2, 3))).summary() == {}


# -- Routing strategies --------------------------------------------------------------------------


def test_padding_counts_nothing_and_k_may_vary() -> None:
    chosen = np.array([[0, 2, -1], [2, -1, -1], [-1, -1, -1]])
    assert routing.counts(chosen, 4).tolist() == [1, 0, 2, 0]
    assert routing.per_token(chosen).tolist() == [2, 1, 0]
    weights = np.array([[0.75, 0.25, 9], [1, 9, 9], [9, 9, 9]])
    assert routing.counts(chosen, 4, weights).tolist() == [0.75, 0, 1.25, 0]
    both = routing.counts(np.stack([chosen, np.full_like(chosen, 3)]), 4)
    assert both.tolist() == [[1, 0, 2, 0], [0, 0, 0, 9]]
    assert routing.counts(np.zeros((0, 2)), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("chosen", "experts", "says"),
    [
        ([[4]], 4, "hold 4 to 4; allowed are -1"),
        ([[-2]], 4, "hold -2"),
        ([[0.5]], 4, "whole numbers"),
        ([0], 4, "shape"),
        ([[0]], 0, "one at least"),
    ],
)
def test_assignments_that_cannot_be(chosen: object, experts: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        routing.counts(chosen, experts)  # type: ignore[arg-type]


def test_weights_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="finite"):
        routing.counts([[0, 1]], 2, [[1, NAN]])
    with pytest.raises(ValueError, match="shape"):
        routing.counts([[0, 1]], 2, [[1]])
    with pytest.raises(ValueError, match="shares"):
        routing.soft_counts([[0.5, -0.5]])


def test_top_k_with_bias_and_groups() -> None:
    logits = np.array([[5.0, 1, 4, 3], [0, 0, 0, 0]])
    assert routing.top_k(logits, 2).tolist() == [[0, 2], [0, 1]]
    assert routing.top_k(logits, 1, bias=[0, 10, 0, 0]).tolist() == [[1], [1]]
    # Groups (5, 1) and (4, 3): the second has the greater sum of its two best.
    assert routing.top_k(logits, 2, groups=2, top_groups=1).tolist() == [[2, 3], [0, 1]]
    with pytest.raises(ValueError, match="groups"):
        routing.top_k(logits, 1, groups=3)
    with pytest.raises(ValueError, match="k is 3"):
        routing.top_k(logits, 3, groups=2, top_groups=1)
    with pytest.raises(ValueError, match="NaN"):
        routing.top_k([[NAN, 1]], 1)


def test_dynamic_k_takes_as_few_as_reach_p() -> None:
    logits = np.log([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])
    assert routing.top_p(logits, 0.7).tolist() == [[0, -1, -1], [0, 1, -1]]
    assert routing.top_p(logits, 1.0, most=2).tolist() == [[0, 1], [0, 1]]


def test_expert_choice_fills_every_expert() -> None:
    rng = np.random.default_rng(1)
    chosen = routing.expert_choice(rng.random((50, 5)), 7)
    assert routing.counts(chosen, 5).tolist() == [7] * 5
    assert (routing.per_token(chosen) < 5).any()
    assert routing.expert_choice(np.ones((4, 2)), 0).shape == (4, 0)


def test_every_strategy_gives_measures() -> None:
    rng = np.random.default_rng(2)
    tokens, experts = 600, 12
    logits = rng.normal(size=(tokens, experts)) + np.linspace(0, 2, experts)
    tied = np.arange(tokens)[:, None]
    found = {
        "token choice": routing.counts(routing.top_k(logits, 2), experts),
        "group limited": routing.counts(routing.top_k(logits, 2, groups=4, top_groups=2), experts),
        "dynamic k": routing.counts(routing.top_p(logits, 0.6, most=4), experts),
        "expert choice": routing.counts(routing.expert_choice(logits, 100), experts),
        "balanced": routing.counts(tied % experts, experts),
        "hash": routing.counts(tied * 2654435761 % 97 % experts, experts),
        "soft": routing.soft_counts(routing.softmax(logits)),
    }
    measured = layers.measure(np.stack(list(found.values())))
    by_name = dict(zip(found, measured.skew, strict=True))
    assert by_name["expert choice"] == by_name["balanced"] == 1
    assert by_name["token choice"] > by_name["soft"] > 1
    assert not np.isnan(measured.overflow).any()
    assert found["soft"].sum() == pytest.approx(tokens)


@given(
    hnp.arrays(np.int64, st.tuples(st.integers(0, 20), st.integers(0, 4)),
               elements=st.integers(-1, 5))
)  # fmt: skip
def test_load_is_the_number_of_assignments_that_are_no_padding(chosen: object) -> None:
    load = routing.counts(chosen, 6)  # type: ignore[arg-type]
    assert load.sum() == (np.asarray(chosen) >= 0).sum()


def test_counters_that_restart() -> None:
    assert routing.increase([5, 7], [6, 9]).tolist() == [1, 2]
    assert routing.increase([5, 7], [6, 2]).tolist() == [6, 2]  # one fell: all began anew
    assert routing.increase([5, 7], [1, 2, 3]).tolist() == [1, 2, 3]
