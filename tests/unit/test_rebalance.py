"""Placement advice: judged on the window after the one planned from, and silent where in doubt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lanterne.collector.analyse import placement, rebalance

LAYERS, EXPERTS, GPUS = 4, 32, 8
Rng = np.random.Generator


def _zipf(rng: Rng, power: float = 1.0) -> np.ndarray:
    """[layers, experts] popularity, in a different order in every layer."""
    popularity = 1.0 / np.arange(1, EXPERTS + 1) ** power
    return np.array([rng.permutation(popularity / popularity.sum()) for _ in range(LAYERS)])


def _draw(rng: Rng, popularity: np.ndarray, tokens: int = 20_000) -> np.ndarray:
    return np.array([rng.multinomial(tokens, p / p.sum()) for p in popularity], dtype=float)


def _steady(rng: Rng, windows: int) -> np.ndarray:
    popularity = _zipf(rng)
    return np.array([_draw(rng, popularity) for _ in range(windows)])


def _even(rng: Rng, windows: int) -> np.ndarray:
    return np.array([_draw(rng, np.ones((LAYERS, EXPERTS))) for _ in range(windows)])


def _few_tokens(rng: Rng, windows: int) -> np.ndarray:
    """Uniform routing of so few tokens that chance alone looks like skew."""
    return np.array([_draw(rng, np.ones((LAYERS, EXPERTS)), 64) for _ in range(windows)])


def _reshuffled(rng: Rng, windows: int) -> np.ndarray:
    """Strong skew, but on other experts every window: the past says nothing."""
    return np.array([_draw(rng, _zipf(rng)) for _ in range(windows)])


def _drifting(rng: Rng, windows: int) -> np.ndarray:
    log = np.log(_zipf(rng))
    found = []
    for _ in range(windows):
        log = log + rng.normal(0, 0.1, log.shape)
        found.append(_draw(rng, np.exp(log)))
    return np.array(found)


def _alternating(rng: Rng, windows: int) -> np.ndarray:
    two = _zipf(rng), _zipf(rng)
    return np.array([_draw(rng, two[i % 2]) for i in range(windows)])


def _bursty(rng: Rng, windows: int) -> np.ndarray:
    popularity = _zipf(rng, 0.8)
    return np.array(
        [_draw(rng, popularity, int(20_000 * rng.lognormal(0, 1.5)) + 10) for _ in range(windows)]
    )


def test_steady_skew_is_worth_moving_for() -> None:
    history = _steady(np.random.default_rng(1), 7)
    current = placement.in_order(LAYERS, EXPERTS, GPUS)
    verdict = rebalance.weigh(history[:6], current, spare_slots=GPUS)
    best = verdict.best
    assert best.plan is not None
    kept = rebalance.gain(current, best.plan, history[6])
    assert best.gain > 0.1
    assert kept == pytest.approx(best.gain, abs=0.05)
    assert [o.name for o in verdict.options[-1:]] == ["nothing"]
    assert {o.name for o in verdict.options} == {"placement", "hot_set", "replication", "nothing"}
    # Replication costs memory and placement none; both cost moves.
    by_name = {o.name: o for o in verdict.options}
    assert by_name["placement"].added_slots == 0
    assert by_name["replication"].added_slots == GPUS
    assert by_name["hot_set"].moved == GPUS * LAYERS
    assert by_name["replication"].gain > by_name["placement"].gain
    assert by_name["hot_set"].cost_bytes(10.0) == (GPUS * LAYERS * 10.0, GPUS * LAYERS * 10.0)
    # Once done, there is nothing more to gain.
    after = rebalance.weigh(history[:6], best.plan, spare_slots=0)
    assert after.best.name == "nothing"


@pytest.mark.parametrize(
    "load", [_even, _few_tokens, _reshuffled], ids=["even", "few tokens", "reshuffled"]
)
def test_nothing_to_gain_says_nothing(load: Callable[[Rng, int], np.ndarray]) -> None:
    current = placement.in_order(LAYERS, EXPERTS, GPUS)
    for seed in range(10):
        verdict = rebalance.weigh(load(np.random.default_rng(seed), 9), current)
        assert verdict.best is rebalance.NOTHING
        assert verdict.reason


@pytest.mark.parametrize(
    "load", [_steady, _even, _few_tokens, _reshuffled, _drifting, _alternating, _bursty]
)
def test_never_worse_than_doing_nothing(load: Callable[[Rng, int], np.ndarray]) -> None:
    """What is advised from the windows so far, scored on the next: at most 1 % worse."""
    current = placement.in_order(LAYERS, EXPERTS, GPUS)
    advised = 0
    for seed in range(6):
        history = load(np.random.default_rng(100 + seed), 12)
        for now in range(3, len(history)):
            for spare in (0, GPUS):
                best = rebalance.weigh(history[:now], current, spare_slots=spare).best
                if best.plan is not None:
                    advised += 1
                    assert rebalance.gain(current, best.plan, history[now]) >= -0.01
    if load in (_steady, _drifting, _bursty):
        assert advised > 50


def test_planned_gain_is_the_rosier_one() -> None:
    """Chance skews are planned away on the window planned from, and come back on the next."""
    history = _few_tokens(np.random.default_rng(3), 8)
    current = placement.in_order(LAYERS, EXPERTS, GPUS)
    options = rebalance.weigh(history, current).options
    planned = next(o for o in options if o.name == "placement")
    assert planned.planned_gain > planned.gain + 0.03


def test_hot_copies_go_where_they_are_missing() -> None:
    current = placement.in_order(1, 4, 2)  # GPU 0: 0 1, GPU 1: 2 3
    found = rebalance.replicate_hot(current, np.array([[8.0, 1.0, 2.0, 1.0]]), 6)
    # 0 is hottest, GPU 1 lacks it; GPU 0 gets the hottest of what it lacks: 2.
    assert found.phy2log.tolist() == [[0, 1, 2, 2, 3, 0]]


def test_too_little_seen() -> None:
    current = placement.in_order(1, 4, 2)
    verdict = rebalance.weigh(np.zeros((9, 1, 4)), current)
    assert verdict.best is rebalance.NOTHING
    assert "only 0 of more than" in verdict.reason


@pytest.mark.parametrize(
    ("history", "text"),
    [
        (np.ones((3, 1, 5)), "must be"),
        (np.ones((3, 4)), "must be"),
        (np.full((3, 1, 4), np.nan), "finite"),
        (np.full((3, 1, 4), -1.0), "not negative"),
    ],
)
def test_refused(history: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rebalance.weigh(history, placement.in_order(1, 4, 2))
