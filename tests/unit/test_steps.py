"""The period of a program's operations, and where the time of its steps goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse import ops, steps
from lanterne.collector.analyse.period import find_period, starts
from lanterne.collector.analyse.steps import PARTS, Operations, Steps

F64 = npt.NDArray[np.float64]
D, C, G, X = 1, 2, 9, 77  # dispatch, combine, a gather once a step, something now and then


def layered(layers: int = 3) -> list[int]:
    return [D, C] * layers + [G]


# -- The period ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 5, 58])
def test_the_period_is_the_step_not_the_layer(layers: int) -> None:
    assert find_period(layered(layers) * 12) == 2 * layers + 1


def test_without_a_mark_the_layer_is_all_that_repeats() -> None:
    assert find_period([D, C] * 50) == 2


def test_prefill_among_decodes_does_not_hide_the_step() -> None:
    rng = np.random.default_rng(3)
    sequence: list[int] = []
    for _ in range(80):
        if rng.random() < 0.1:
            sequence += [X, X]  # a prefill begins with operations of its own, without any rule
        sequence += layered(4)
    assert find_period(sequence) == 9


def test_lost_operations_do_not_hide_the_step() -> None:
    rng = np.random.default_rng(4)
    sequence = np.array(layered(4) * 60)
    assert find_period(sequence[rng.random(len(sequence)) > 0.01]) == 9


def test_several_marks_in_a_step() -> None:
    assert find_period([G, D, C, G, D, C, D, C] * 12) == 8


def test_what_does_not_repeat_has_no_period() -> None:
    rng = np.random.default_rng(5)
    assert find_period(rng.integers(0, 6, 400)) == 0
    assert find_period([]) == 0
    assert find_period([1, 2, 1]) == 0
    assert find_period(np.arange(200)) == 0
    with pytest.raises(ValueError, match="shape"):
        find_period([[1]])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(8, 14))
def test_any_program_that_repeats_has_a_period_that_divides_it(step: list[int], n: int) -> None:
    found = find_period(step * n)
    assert found > 0
    whole = np.array(step * n)
    assert (whole[:-found] == whole[found:]).mean() >= 0.5
    assert find_period([10 + s for s in step] * n) == found  # names do not matter


def test_steps_begin_after_the_longest_pause() -> None:
    gap = np.tile([5.0, 1, 1, 1, 1, 1, 2], 10)
    assert starts([9, 1, 2, 1, 2, 1, 3] * 10, 7, gap).tolist() == list(range(0, 70, 7))
    gap = np.tile([1.0, 1, 1, 1, 1, 1, 7], 10)
    assert starts([9, 1, 2, 1, 2, 1, 3] * 10, 7, gap).tolist() == list(range(6, 70, 7))
    assert starts([1, 1, 2, 2] * 10, 4, np.tile([1.0, 8, 1, 1], 10)).tolist()[:2] == [1, 5]
    assert starts([1, 2], 0, [1, 1]).tolist() == []


# -- Records -------------------------------------------------------------------------------------


def program(n: int = 10, layers: int = 2, pause: float = 0.005, scale: Any = None) -> Operations:
    """Per layer: 1 ms own, dispatch 2 ms (0.5 waiting), experts 3 ms, combine 1 ms (0.25); then a
    gather of 0.5 ms after 1 ms in other communicators. Between steps: `pause`, and 0 to n ms."""
    factor = np.ones(n) if scale is None else np.asarray(scale)
    rows: list[tuple[float, ...]] = []
    at = 100.0
    for step in range(n):
        f = factor[step]
        for layer in range(layers):
            before = 0.001 if layer else pause + 0.001 * step
            at += before
            rows.append((D, ops.DISPATCH, at, 0.002 * f, 0.0005, before, 1000 * f))
            at += 0.002 * f + 0.003 * f
            rows.append((C, ops.COMBINE, at, 0.001, 0.00025, 0.003 * f, 1000 * f))
            at += 0.001
        at += 0.002
        rows.append((G, 0, at, 0.0005, 0.0, 0.001, 10))
        at += 0.0005
    table = np.array(rows)
    return Operations(
        symbol=table[:, 0].astype(np.int64),
        role=table[:, 1].astype(np.int64),
        arrival=table[:, 2],
        duration=table[:, 3],
        wait=table[:, 4],
        own=table[:, 5],
        own_most=table[:, 5] * 2,
        slowest=np.where(table[:, 0] == C, 5, 1),
        size=table[:, 6],
        broken=np.zeros(len(table), bool),
    )


def test_each_part_of_a_known_program() -> None:
    period, found = steps.split(program())
    assert period == 5
    assert len(found) == 8  # the first lacks what came before, the last what comes after
    assert set(found.operations.tolist()) == {5}
    known = {
        "dispatch": 2 * 0.0015, "expert": 2 * 0.003, "combine": 2 * 0.00075,
        "wait": 2 * 0.00075, "other_transfer": 0.0005, "elsewhere": 0.001,
        "expert_most": 2 * 0.006, "size": 2000,
    }  # fmt: skip
    for name, value in known.items():
        np.testing.assert_allclose(getattr(found, name), value, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.idle, 0.001 * np.arange(8), atol=1e-9)
    assert (found.slowest == 5).all()
    assert np.isnan(found.assignments).all()


def total(found: Steps) -> F64:
    return np.sum([getattr(found, part) for part in PARTS], axis=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 20), st.integers(1, 6), st.floats(0.0001, 0.05))
def test_the_parts_add_up_to_the_span(n: int, layers: int, pause: float) -> None:
    _, found = steps.split(program(n, layers, pause))
    assert len(found) == n - 2
    np.testing.assert_allclose(total(found), found.span, rtol=1e-6, atol=1e-9)


def test_a_prefill_is_a_step_of_another_kind() -> None:
    scale = np.ones(12)
    scale[5] = 16
    _, found = steps.split(program(12, scale=scale))
    usual = steps.usual(found)
    assert usual.sum() == len(found) - 1
    assert found.dispatch[~usual] > 10 * found.dispatch[usual].max()
    medians = steps.medians(found, usual)
    assert medians["expert"] == pytest.approx(0.006)
    assert "assignments" not in medians


def changed(table: Operations, **columns: Any) -> Operations:
    return Operations(**{n: getattr(table, n) for n in Operations.__dataclass_fields__} | columns)


def test_steps_with_a_missing_operation_are_left_out() -> None:
    table = program()
    broken = table.broken.copy()
    broken[23] = True
    _, found = steps.split(changed(table, broken=broken))
    assert len(found) == 7


def test_what_is_not_known_is_nan() -> None:
    table = program()
    _, found = steps.split(changed(table, own=np.full(len(table.own), np.nan)))
    assert np.isnan(found.expert).all()
    assert not np.isnan(found.dispatch).any()
    _, found = steps.split(changed(table, duration=np.full(len(table.own), np.nan)))
    assert len(found) == 0


def test_assignments_are_those_of_the_dispatches() -> None:
    table = program()
    told = np.where(table.role == ops.DISPATCH, 64.0, 7.0)
    _, found = steps.split(changed(table, assignments=told))
    assert (found.assignments == 128).all()


def test_nothing_gives_nothing() -> None:
    table = program(1)
    period, found = steps.split(table)
    assert (period, len(found)) == (0, 0)
    assert steps.usual(found).tolist() == []
    assert steps.medians(found, steps.usual(found)) == {}
