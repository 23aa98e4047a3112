"""The stride: up under load, down when it is over, steady where load stays."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lanterne.collector.analyse.stride import Stride

WINDOW = 5.0


def run(stride: Stride, load: float, windows: int) -> list[int]:
    """Agents that obey, a collector that keeps up with 1.0; -> the stride after each window."""
    found = []
    for _ in range(windows):
        if load / stride.value > 1.0:
            stride.crowded()
        stride.close()
        found.append(stride.value)
    return found


def test_rises_until_it_fits_and_falls_when_the_load_does() -> None:
    stride = Stride(WINDOW, 1024)
    assert run(stride, 0.9, 50) == [1] * 50
    assert run(stride, 7.0, 4) == [2, 4, 8, 8]
    falling = run(stride, 0.5, 3 * 13)
    assert falling[-1] == 1
    assert sorted(falling, reverse=True) == falling
    assert falling[:10] == [8] * 10  # not at the first calm window


def test_a_steady_overload_makes_it_swing_less_and_less() -> None:
    stride = Stride(WINDOW, 1024)
    found = run(stride, 1.5, 720)  # an hour
    tries = [n for n, (a, b) in enumerate(pairwise(found)) if a == 2 and b == 1]
    gaps = [b - a for a, b in pairwise(tries)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 8 * gaps[0] * 0.9
    assert set(found) == {1, 2}


def test_patience_is_short_again_after_a_try_that_went_well() -> None:
    stride = Stride(WINDOW, 1024)
    run(stride, 1.5, 200)
    run(stride, 0.1, 720)
    assert stride.value == 1
    run(stride, 1.5, 1)
    assert run(stride, 0.1, 13)[-1] == 1


@pytest.mark.parametrize("most", [1, 16])
def test_is_bounded(most: int) -> None:
    assert run(Stride(WINDOW, most), 1e9, 20)[-1] == most
