"""The detector on a small part of `make bench-detect`, seeds fixed: what was promised, holds."""

from __future__ import annotations

from functools import cache

import pytest

from tests.bench.detect import cases, runs, summary
from tests.bench.detect.cases import Case
from tests.bench.detect.scoring import Score

CASES = tuple(cases.smoke("report"))


@cache
def scored(case: Case) -> Score:
    """Our detector's; each run once for all tests."""
    return runs.measure(case)[runs.OURS]


def together(chosen: list[Case]) -> Score:
    assert chosen
    pooled = Score()
    for case in chosen:
        pooled.add(scored(case))
    return pooled


def told(chosen: list[Case]) -> str:
    """Every run that was not perfect, for the message of a failure."""
    lines = [f"{c}: {s}" for c in chosen if (s := scored(c)).missed or s.false]
    return "\n".join(lines)


def test_from_a_fifth_on_every_slow_rank_is_named_alone_and_soon() -> None:
    chosen = [c for c in CASES if c.slowdown >= 1.2 and c.size >= 4]
    score = together(chosen)
    shown = summary.figures(score)
    assert shown["precision"][0] >= 0.98, told(chosen)
    assert shown["recall"][0] >= 0.98, told(chosen)
    assert shown["delay"][0] <= 3, score.delays


def test_a_tenth_is_found_mostly_and_nobody_else() -> None:
    chosen = [c for c in CASES if c.slowdown == 1.1]
    shown = summary.figures(together(chosen))
    assert shown["precision"][0] >= 0.98, told(chosen)
    assert shown["recall"][0] >= 0.9, told(chosen)


def test_two_and_three_ranks_by_their_own_history() -> None:
    chosen = [c for c in CASES if c.size < 4]
    shown = summary.figures(together(chosen))
    assert shown["precision"][0] >= 0.9, told(chosen)
    assert shown["recall"][0] >= 0.9, told(chosen)


@pytest.mark.parametrize("noise", cases.NOISES)
def test_nobody_is_named_without_a_fault(noise: str) -> None:
    chosen = [c for c in CASES if c.kind == "none" and c.noise == noise]
    assert together(chosen).false == 0, told(chosen)


def test_the_class_is_right_where_the_evidence_tells() -> None:
    chosen = [c for c in CASES if c.kind != "none" and runs.class_known(c)]
    score = together(chosen)
    assert score.class_right >= 0.95 * score.class_known, score.classes
