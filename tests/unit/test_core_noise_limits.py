"""What is taken for noise: its size from few windows, the limit where many stand out at once."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.collector.analyse import straggler, together
from lanterne.collector.analyse.past import LAGS, STATISTICS, Past
from lanterne.collector.analyse.peers import Groups
from tests.bench import detect_sim
from tests.bench.detect_sim import Fault, Noise, follow

F64 = npt.NDArray[np.float64]

# Own times that stay high or low for some two seconds: the mean of a window spreads by 3 %.
MEMORY = Noise(0.04, memory=2.0)


def after(apart: F64) -> Past:
    """apart: [window, rank]"""
    past, members = Past(apart.shape[1]), np.arange(apart.shape[1])
    past.forget(members)
    for row in apart:
        same = np.tile(row, (STATISTICS, 1))
        past.push(members, same, same)
    return past


def noise_of(past: Past, ranks: int, steady: npt.NDArray[np.bool_]) -> tuple[F64, F64]:
    one, shared, _ = past.noise(np.arange(ranks), Groups(np.zeros(ranks, np.int64)), steady)
    return one[0], shared[0]


@pytest.mark.parametrize("windows", [3, 4, 5, 6, 8, 9, 10, 11, 12, 15, 18, 24])
def test_noise_told_from_few_windows_is_not_too_much(windows: int) -> None:
    ranks, sigma = 1024, 0.03
    past = after(np.random.default_rng(30).normal(0, sigma, (windows, ranks)))
    one, _ = noise_of(past, ranks, np.ones(ranks, bool))
    # Too few to know how alike neighbours are: rather too much.
    few = windows <= max(LAGS)
    assert one == pytest.approx(np.full(ranks, sigma), rel=0.24 if few else 0.06)


def test_ranks_that_have_become_slower_are_no_noise() -> None:
    ranks, sigma = 256, 0.03
    apart = np.random.default_rng(33).normal(0, sigma, (20, ranks))
    slow = np.arange(ranks) % 4 == 1
    apart[14:, slow] += 0.2
    past = after(apart)
    one, shared = noise_of(past, ranks, ~slow)
    assert one == pytest.approx(np.full(ranks, sigma), rel=0.08)
    assert shared.max() < 0.1
    more, alike = noise_of(past, ranks, np.ones(ranks, bool))
    assert more.min() > 1.05 * one.max()
    assert alike.min() > shared.max()


def test_noise_is_known_where_hardly_a_rank_is_steady() -> None:
    ranks, sigma = 16, 0.03
    past = after(np.random.default_rng(34).normal(0, sigma, (20, ranks)))
    everybody, _ = noise_of(past, ranks, np.ones(ranks, bool))
    one, _ = noise_of(past, ranks, np.arange(ranks) < 3)
    np.testing.assert_array_equal(one, everybody)


@pytest.mark.parametrize("many", [2, 8, 32, 150])
def test_the_limit_of_many_has_as_many_times_the_probability_of_one(many: int) -> None:
    def above(z: float) -> float:
        return math.erfc(z / math.sqrt(2)) / 2

    share = float(together.needed(np.array([many]))[0])
    assert above(share * straggler.LIMIT) == pytest.approx(many * above(straggler.LIMIT), rel=0.25)


def test_many_that_stand_out_together_need_less_each() -> None:
    group = np.repeat([0, 1], 64)
    ratio = np.full((1, 128), 0.3)
    ratio[0, :16] = 0.905  # what sixteen need, and eleven do not reach
    ratio[0, 64:74] = 0.905
    ratio[0, 74] = 1.1  # is beyond the limit on its own
    ratio[0, 75] = np.nan
    found = together.beyond(ratio, group, np.ones(128, bool))[0]
    assert np.flatnonzero(found).tolist() == [*range(16), 74]


def test_few_peers_are_judged_one_by_one() -> None:
    ratio = np.array([[0.95, 0.97, 1.0, 0.1]])
    found = together.beyond(ratio, np.zeros(4, np.int64), np.zeros(4, bool))
    assert found.tolist() == [[False, False, True, False]]


def test_many_of_256_ten_per_cent_slower_in_noise_with_memory() -> None:
    slow = tuple(range(3, 256, 8))
    run = follow(31, 256, 34, MEMORY, (Fault(slow, 1.1, first=20, last=28),))
    named = set().union(*run.named)
    assert named <= set(slow)
    assert len(named) >= 0.6 * len(slow)


def test_those_that_are_named_make_it_no_harder_to_name_the_others() -> None:
    """In more noise than above: the first are named long before the last."""
    slow = tuple(range(3, 256, 8))
    fault = Fault(slow, 1.1, first=20, last=28)
    names: list[int] = []
    for seed in (31, 32, 33):
        run = follow(seed, 256, 34, Noise(0.05, memory=2.0), (fault,))
        names += set().union(*run.named)
    assert set(names) <= set(slow)
    assert len(names) >= 65  # of 96; with them counted as noise it is 58


@pytest.mark.parametrize("steps", [21, 25, 29])
def test_slow_now_and_then_with_few_steps_a_window(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_steps(monkeypatch, steps)
    run = follow(35, 64, 34, Noise(0.03), (Fault((5,), 6.0, first=20, last=28, share=0.2),))
    assert set().union(*run.named) == {5}


@pytest.mark.parametrize("steps", [20, 25, 31])
def test_long_pauses_now_and_then_with_few_steps_a_window(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_steps(monkeypatch, steps)
    pauses = Noise(0.03, spike_rate=0.005, spike_seconds=2 * detect_sim.OWN_SECONDS)
    assert not set().union(*follow(36, 64, 400, pauses).named)


def test_a_job_of_few_steps_that_begins_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own times that stay high or low for longer than a window: its first windows are alike."""
    set_steps(monkeypatch, 13)
    for seed in range(70, 90):
        run = follow(seed, 64, 6, Noise(0.04, memory=8.0))
        assert not set().union(*run.named)


def set_steps(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    seconds = detect_sim.WINDOW_SECONDS * detect_sim.COMPUTE_SHARE / (steps + 0.5)
    monkeypatch.setattr(detect_sim, "OWN_SECONDS", seconds)


def test_a_verdict_ends_with_calm_windows_whatever_the_many_before_say() -> None:
    """Usually faster than its peers; slow for eight windows, then as fast as they are."""
    faults = (
        Fault((1,), 0.97, first=0, last=60),
        Fault((1,), 2.0, first=20, last=23),
        Fault((1,), 1.2, first=23, last=28),
        Fault((1,), 1.045, first=28, last=34),
    )
    run = follow(32, 8, 60, Noise(0.02), faults)
    assert all(run.named[w] == {1} for w in range(21, 28))
    assert not any(run.named[w] for w in range(29, 60))
