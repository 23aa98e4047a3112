"""Intervals of change: they cover the truth, and find what is there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lanterne.collector.analyse.intervals import change, holm, student


def windows(rng: np.random.Generator, n: int, level: float = 1.0, alike: float = 0.4):  # type: ignore[no-untyped-def]
    """(sums, counts): a figure of mean `level` whose neighbouring windows are alike."""
    noise = np.zeros(n)
    for t in range(1, n):
        noise[t] = alike * noise[t - 1] + rng.normal(0, 0.08)
    count = rng.integers(40, 60, n).astype(float)
    return level * count * np.exp(noise), count


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (4, 2.7764), (10, 2.2281), (30, 2.0423)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert student(0.975, freedom) == pytest.approx(quantile, rel=1e-4)


def test_the_interval_covers_no_change_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(11)
    runs = 200
    covered = 0
    for _ in range(runs):
        found = change(windows(rng, 40), windows(rng, 60))
        covered += found.low <= 0 <= found.high
    assert covered / runs > 0.88


def test_a_change_is_found_with_its_size() -> None:
    rng = np.random.default_rng(12)
    found = change(windows(rng, 60), windows(rng, 60, 1.25))
    assert found.change == pytest.approx(0.25, abs=0.08)
    assert 0 < found.low < found.change < found.high
    assert found.p < 0.001
    back = change(windows(rng, 60, 1.25), windows(rng, 60))
    assert back.high < 0


def test_the_same_input_gives_the_same_interval() -> None:
    a = windows(np.random.default_rng(1), 30)
    b = windows(np.random.default_rng(2), 30)
    assert change(a, b) == change(a, b)


def test_too_short_absent_and_constant_figures_are_defined() -> None:
    one = (np.ones(7), np.ones(7))
    short = change(one, one)
    assert short.change == 0
    assert math.isnan(short.low)
    assert math.isnan(short.p)
    none = (np.zeros(20), np.zeros(20))
    absent = change(none, (np.ones(20), np.ones(20)))
    assert math.isnan(absent.a)
    assert math.isnan(absent.change)
    empty = change((np.zeros(0), np.zeros(0)), (np.zeros(0), np.zeros(0)))
    assert math.isnan(empty.change)
    flat = change((np.ones(20), np.ones(20)), (2 * np.ones(20), np.ones(20)))
    assert (flat.change, flat.low, flat.high, flat.p) == (1.0, 1.0, 1.0, 0.0)
    same = change((np.ones(20), np.ones(20)), (np.ones(20), np.ones(20)))
    assert same.p == 1.0
    holes = (np.r_[np.ones(20), np.nan], np.r_[np.ones(20), 1.0])
    assert change(holes, holes).a == 1.0


def test_many_looks_need_more_than_one_good_chance() -> None:
    assert holm([0.04, 0.5, 0.6, 0.9], 0.05) == [False] * 4
    assert holm([0.001, 0.5, 0.015, 0.9], 0.05) == [True, False, True, False]
    assert holm([math.nan, 0.01]) == [False, True]
    assert holm([]) == []


def test_without_a_change_a_family_of_figures_rarely_shows_one() -> None:
    rng = np.random.default_rng(13)
    wrong = 0
    for _ in range(40):
        chances = [change(windows(rng, 40), windows(rng, 40)).p for _ in range(8)]
        wrong += any(holm(chances))
    assert wrong <= 8
