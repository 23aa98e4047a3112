"""What is taken for noise: its size from few windows, the limit where many stand out at once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lanterne.collector.analyse import straggler, together
from lanterne.collector.analyse.past import STATISTICS, Past
from lanterne.collector.analyse.peers import Groups
from tests.bench.detect_sim import Fault, Noise, follow

# Own times that stay high or low for some two seconds: the mean of a window spreads by 3 %.
MEMORY = Noise(0.04, memory=2.0)


@pytest.mark.parametrize("windows", [3, 4, 5, 6, 8, 9, 10, 11, 12, 15, 18, 24])
def test_noise_told_from_few_windows_is_not_too_much(windows: int) -> None:
    rng = np.random.default_rng(30)
    ranks, sigma = 256, 0.03
    past, members = Past(ranks), np.arange(ranks)
    past.forget(members)
    for _ in range(windows):
        apart = rng.normal(0, sigma, (STATISTICS, ranks))
        past.push(members, apart, apart)
    one, _, _ = past.noise(members, Groups(np.zeros(ranks, np.int64)))
    assert one == pytest.approx(np.full(one.shape, sigma), rel=0.24)


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
