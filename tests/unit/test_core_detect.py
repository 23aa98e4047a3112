"""Verdicts by each comparison, what they rest on, and what is nothing to name anybody for."""

from __future__ import annotations

import pytest

from lanterne.collector.snapshot import METHODS
from tests.bench.detect_sim import NOISES, Fault, Noise, Run, follow

LONG_MEMORY = Noise(0.1, memory=1.5)


def named(run: Run) -> set[int]:
    return set().union(*run.named)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_that_becomes_slower_is_named_alone_and_cleared(ranks: int) -> None:
    fault = Fault((1,), 1.1, first=20, last=60)
    run = follow(11, ranks, 80, NOISES["quiet"], (fault,))
    assert named(run) == {1}
    assert all(1 in run.named[w] for w in range(24, 60))
    assert not any(run.named[w] for w in [*range(20), *range(66, 80)])


@pytest.mark.parametrize("ranks", [3, 4, 16])
def test_a_rank_slow_from_the_start_is_named_by_its_peers(ranks: int) -> None:
    assert named(follow(12, ranks, 20, NOISES["quiet"], (Fault((1,), 1.2, first=0),))) == {1}


def test_a_lone_pair_slow_from_the_start_has_no_verdict() -> None:
    assert named(follow(13, 2, 40, NOISES["quiet"], (Fault((1,), 1.3, first=0),))) == set()


@pytest.mark.parametrize(
    "fault",
    [
        Fault((3,), 1.8, share=0.2),  # of the steps
        Fault((3,), 1.5, duty=(1, 3)),  # of the windows
    ],
)
def test_now_and_then_is_named(fault: Fault) -> None:
    assert named(follow(14, 8, 70, NOISES["quiet"], (fault,))) == {3}


def test_several_at_once() -> None:
    assert named(follow(15, 8, 60, NOISES["quiet"], (Fault((1, 4, 6), 1.2),))) == {1, 4, 6}


def test_half_of_them_do_something_else() -> None:
    assert named(follow(16, 8, 40, NOISES["quiet"], (Fault((4, 5, 6, 7), 1.5, first=0),))) == set()


def test_a_pair_that_drifts_for_hours() -> None:
    fault = Fault((1,), 1.3, first=100, last=1400, slope=True)
    run = follow(17, 2, 1400, Noise(0.02), (fault,))
    assert named(run) == {1}


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.2), (8, 1.1), (8, 2.0)])
@pytest.mark.parametrize("over", [False, True])
def test_what_was_known_before_a_silence_counts_after_it(
    ranks: int, factor: float, over: bool
) -> None:
    """A rank that was named is named by the first window after it, unless that is over."""
    silent = range(40, 60)
    fault = Fault((1,), factor, first=20, last=50 if over else 70)
    run = follow(21, ranks, 80, NOISES["quiet"], (fault,), silent)
    assert run.named[39] == {1}
    assert run.named[59] == set()
    assert run.named[60] == (set() if over else {1})
    assert all(found == run.named[60] for found in run.named[60:70])


@pytest.mark.parametrize("noise", ["pauses", "burst", "lost"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_names_nobody(noise: str, ranks: int) -> None:
    assert named(follow(18, ranks, 300, NOISES[noise])) == set()


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_noise_with_a_long_memory_names_nobody(ranks: int) -> None:
    assert named(follow(19, ranks, 600, LONG_MEMORY)) == set()


def test_a_verdict_does_not_flap() -> None:
    """Slow in two windows of five, over and over."""
    fault = Fault((2,), 1.3, first=20, last=200, duty=(2, 5))
    run = follow(20, 8, 200, NOISES["quiet"], (fault,))
    cleared = sum(2 in a and 2 not in b for a, b in zip(run.named, run.named[1:], strict=False))
    assert cleared <= 6


def test_methods_are_told() -> None:
    run = follow(21, 8, 60, NOISES["quiet"], (Fault((1,), 1.3),))
    assert run.methods[1] in METHODS[1:]
