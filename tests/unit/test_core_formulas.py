"""Each formula against values worked out by hand, and its edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lanterne.collector.analyse import blame, moe, ops, own, straggler, traffic, waits
from lanterne.probes.layout import Func

NAN = math.nan


def test_operation_names_are_those_of_the_probes() -> None:
    # Split sizes are a record of the kernel, and no operation: they never leave the agent.
    told = {f.value: f.name.lower() for f in Func if f is not Func.SPLITS}
    assert told == ops.NAMES


def test_wait_from_arrivals() -> None:
    arrivals = np.array([[10.0, 5], [30, NAN], [20, 9]])
    np.testing.assert_array_equal(waits.from_arrivals(arrivals), [[20, 4], [0, NAN], [10, 0]])


def test_wait_from_durations() -> None:
    durations = np.array([[25.0, 7], [5, NAN], [15, 3]])
    np.testing.assert_array_equal(waits.from_durations(durations), [[20, 4], [0, NAN], [10, 0]])


def test_both_waits_agree_when_all_leave_together() -> None:
    rng = np.random.default_rng(0)
    arrivals = rng.random((8, 50))
    durations = arrivals.max(axis=0) + 0.1 - arrivals
    np.testing.assert_allclose(waits.from_arrivals(arrivals), waits.from_durations(durations))


def test_last_two() -> None:
    last, margin = waits.last_two(np.array([[1.0, NAN, 3], [4, NAN, NAN], [9, 7, NAN]]))
    assert last.tolist() == [2, 2, 0]
    np.testing.assert_array_equal(margin, [5, NAN, NAN])


def test_coverage_needs_four_fifths_and_two() -> None:
    assert waits.covered(np.array([7, 6]), 8).tolist() == [True, False]
    assert waits.covered(np.array([1]), 1).tolist() == [False]
    assert waits.covered(np.array([1, 2]), 2).tolist() == [False, True]


def test_clock_error_hides_only_what_it_could_explain() -> None:
    shown = waits.suppress_clock_error(
        np.array([[0.0], [5], [5], [50]]),
        np.array([0]),
        np.array([[0], [0], [1], [1]]),
        np.array([[1.0], [1], [2], [2]]),
    )
    assert shown[:, 0].tolist() == [0, 5, 0, 50]  # twice (1 + 2) = 6


def test_own_time_with_and_without_durations() -> None:
    gap = own.before_wait(np.array([100, 100]), np.array([40, 40]), np.array([25.0, 0]), 1)
    assert gap.tolist() == [35, 60]
    after = own.after_wait(gap, np.array([NAN, 20], np.float32), np.array([False, True]))
    assert after.tolist() == [35, 40]
    assert own.before_wait(np.array([50]), np.array([40]), np.array([25.0]), 1).tolist() == [0]
    assert own.before_wait(np.array([100]), np.array([40]), np.array([5.0]), 2).tolist() == [25]


def test_medians_ignore_nan_and_means_are_cut() -> None:
    table = np.full((2, 40), NAN, np.float32)
    table[0, :5] = [5, 1, 4, 2, 3]
    table[1] = 1
    table[1, 7] = 1000  # one of forty lies above the 95 % quantile
    median, mean, upper, count = own.medians(table)
    assert median.tolist() == [3, 1]
    assert mean.tolist() == [3, 1]
    assert upper.tolist() == [5, 1]
    assert count.tolist() == [5, 40]
    assert np.isnan(own.medians(np.full((1, 3), NAN, np.float32))[0]).all()


@pytest.mark.parametrize("count", [10, 20, 21, 29, 30, 39, 40, 60, 100])
def test_two_long_pauses_of_a_window_say_nothing_and_more_do(count: int) -> None:
    table = np.ones((2, count), np.float32)
    table[0, [3, 7]] = 50, 90
    table[1, :: 5 if count >= 20 else 3] = 50
    median, mean, upper, _ = own.medians(table)
    assert median.tolist() == [1, 1]
    assert (mean[0], upper[0]) == (1, 1)
    assert mean[1] > 5
    assert upper[1] == 50


def test_blame_is_the_margin() -> None:
    margin = np.array([5.0, NAN])
    charged = blame.charge(margin, np.array([0, 1]), np.zeros((2, 2)), np.array([False, False]))
    np.testing.assert_array_equal(charged, margin)


def test_blame_of_a_victim_follows_its_own_time() -> None:
    own_time = np.array([[10.0, 10, NAN], [10, 13, 10]])
    charged = blame.charge(
        np.array([5.0, 5, 5]), np.array([1, 1, 1]), own_time, np.array([True, True, True])
    )
    assert charged.tolist() == [0, 3, 0]


def test_blame_sums_to_at_most_the_time() -> None:
    rng = np.random.default_rng(1)
    lateness = rng.random((5, 200))
    last, margin = waits.last_two(lateness)
    assert margin.sum() <= (lateness.max(axis=0) - lateness.min(axis=0)).sum()
    assert (last == lateness.argmax(axis=0)).all()


def test_leave_one_out_against_the_definition() -> None:
    rng = np.random.default_rng(2)
    for n in (1, 2, 3, 4, 7, 8):
        m = rng.random((3, n))
        m[0, rng.integers(n)] = NAN
        center = straggler.loo_median(m)
        mad, peers = straggler.spread(m)
        for c in range(3):
            for r in range(n):
                others = np.delete(m[c], r)
                others = others[~np.isnan(others)]
                assert peers[c, r] == len(others)
                if not len(others):
                    assert np.isnan(center[c, r])
                    continue
                assert center[c, r] == pytest.approx(np.median(others))
                spread = np.median(np.abs(others - np.median(others)))
                assert mad[c, r] == pytest.approx(spread)


def test_leave_one_out_of_many_is_close_to_the_definition() -> None:
    m = np.random.default_rng(3).normal(10, 1, (1, 501))
    center = straggler.loo_median(m)
    mad, _ = straggler.spread(m)
    others = np.delete(m[0], 17)
    assert center[0, 17] == pytest.approx(np.median(others))
    spread = np.median(np.abs(others - np.median(others)))
    assert mad[0, 17] == pytest.approx(spread, rel=0.02)


def test_limits_widen_where_the_noise_is_little_known() -> None:
    few, many = straggler.limit(np.array([5.0, 1e6]), 3.0)
    assert few == pytest.approx(5.5, rel=0.05)  # Student's t of 5 degrees beyond p(z > 3)
    assert many == pytest.approx(3.0, rel=1e-3)
    assert straggler.limit(np.array([0.0]), 3.0) == np.inf


def test_windows_that_go_together_count_as_fewer() -> None:
    shared = np.array([0.0, 0.5, 1.0])
    np.testing.assert_allclose(straggler.shrink(shared, 2), np.sqrt([0.5, 0.75, 1.0]))
    np.testing.assert_allclose(straggler.shrink(shared, 4)[[0, 2]], [0.5, 1.0])


def test_naming_and_clearing_take_two_windows() -> None:
    named, streak = np.array([False]), np.array([0])
    seen = []
    for candidate in (True, False, True, True, False, True, False, False):
        now = np.array([candidate])
        named, streak = straggler.settle(named, streak, now, ~now)
        seen.append(bool(named[0]))
    assert seen == [False, False, False, True, True, True, True, False]


def test_skew() -> None:
    assert moe.skew(np.array([1, 1, 4])) == 2
    assert math.isnan(moe.skew(np.zeros(4)))
    assert math.isnan(moe.skew(np.array([])))
    assert moe.skew_range(np.array([2, 8, 0, 0])) == (4, 0.5)
    assert math.isnan(moe.skew_range(np.zeros(2))[0])


def test_gini() -> None:
    assert moe.gini(np.array([5, 5, 5])) == pytest.approx(0)
    assert moe.gini(np.array([0, 0, 0, 1])) == pytest.approx(0.75)
    # x = 1, 3: 2 (1 + 6) / (2 * 4) - 3 / 2
    assert moe.gini(np.array([3, 1])) == pytest.approx(0.25)
    assert math.isnan(moe.gini(np.zeros(3)))


def test_excess_gini_of_uniform_routing_is_small() -> None:
    load = np.random.default_rng(4).multinomial(8 * 256, np.full(256, 1 / 256))
    assert moe.gini(load) == pytest.approx(0.20, abs=0.02)
    assert moe.excess_gini(load) < 0.02
    assert math.isnan(moe.excess_gini(np.zeros(3)))
    assert moe.excess_gini(np.array([0, 16])) == pytest.approx(0.5 - 1 / math.sqrt(8 * math.pi))


def test_balancedness() -> None:
    assert moe.balancedness(np.array([1, 1, 4])) == 0.5
    assert math.isnan(moe.balancedness(np.zeros(3)))


def test_overflow_capacity_is_rounded_up() -> None:
    # ceil(1.25 * 16 / 256) = 1, where int() would be 0 and overflow everything.
    load = np.zeros(256)
    load[:16] = 1
    assert moe.overflow(load, tokens=16, top_k=1) == 0
    load[:16] = [2] * 4 + [1] * 8 + [0] * 4
    assert moe.overflow(load, tokens=16, top_k=1) == 0.25
    assert math.isnan(moe.overflow(load, tokens=0, top_k=1))


def test_local_hit_ratio() -> None:
    assert moe.local_hit(np.array([6, 1, 1, 0]), 0) == (0.75, 0.25)
    assert math.isnan(moe.local_hit(np.zeros(4), 0)[0])


def test_domains() -> None:
    found = traffic.domain(
        rank=np.array([0, 0, 0, 0, 0, 0]),
        peer=np.array([0, 1, 2, 3, 4, 5]),
        node=np.array([7, 7, 7, 7, 7, -1]),
        peer_node=np.array([7, 7, 7, 8, -1, 7]),
        gpu=np.array([3, 3, 3, 3, 3, -1]),
        peer_gpu=np.array([3, 3, 4, 5, -1, -1]),
    )
    assert found.tolist() == [0, 0, 1, 2, 3, 3]


def test_bus_factor() -> None:
    assert traffic.bus_factor("all_reduce", 8) == 1.75
    assert traffic.bus_factor("all_to_all", 8) == 0.875
    assert traffic.bus_factor("broadcast", 8) == 1
    assert math.isnan(traffic.bus_factor("all_reduce", 1))
    assert math.isnan(traffic.bus_factor("barrier", 8))
