"""Which steps are blind: by captured collectives, by age of communicators, by the plugin's word."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lanterne.agent.cuda import Use
from lanterne.agent.steps import Steps

NOTHING = Use(0, 0, 0, 0, np.zeros(32, np.uint64), 0, 0, 0, 0, ())
PID = 7


def use(steps: int, replay_steps: int, captured: int = 0) -> Use:
    return replace(
        NOTHING,
        steps=steps,
        silent_steps=replay_steps,
        replay_steps=replay_steps,
        graph_launches=replay_steps,
        captured_ops=captured,
    )


def after(steps: Steps, *windows: tuple[Use, dict[int, bool], set[int]]) -> tuple[int, int, int]:
    for now, holders, told in windows:
        steps.update({PID: now}, {}, holders, told)
    steps.finish()
    return steps.steps, steps.blind_steps, steps.blind_launches


def test_a_process_without_a_communicator_has_no_steps() -> None:
    assert after(Steps(), (use(5, 5), {}, set())) == (0, 0, 0)


def test_graphs_of_a_process_that_has_captured_collectives_are_blind() -> None:
    windows = [(use(10 * n, 8 * n, captured=2), {PID: False}, set[int]()) for n in (1, 2, 3)]
    assert after(Steps(), *windows) == (30, 24, 24)


def test_graphs_without_collectives_in_them_are_not() -> None:
    """Every communicator was seen from its creation, and none of its operations was captured."""
    assert after(Steps(), (use(10, 8), {PID: False}, set())) == (10, 0, 0)


def test_a_communicator_older_than_the_agent_may_have_been_captured() -> None:
    assert after(Steps(), (use(10, 8), {PID: True}, set())) == (10, 8, 8)


def test_it_stays_a_holder_when_its_communicator_is_destroyed() -> None:
    steps = Steps()
    found = after(steps, (use(10, 8, 1), {PID: False}, set()), (use(15, 12, 1), {}, set()))
    assert found == (15, 12, 12)
    assert steps.of(PID) == (15, 12)


@pytest.mark.parametrize("told_in", [1, 2, 3])
def test_what_the_plugin_tells_is_not_blind(told_in: int) -> None:
    """In the window before the step's, in its own, or in the one after."""
    windows = [
        (use(0, 0, 4), {PID: False}, {PID} if told_in == 1 else set[int]()),
        (use(6, 6, 4), {PID: False}, {PID} if told_in == 2 else set[int]()),
        (use(6, 6, 4), {PID: False}, {PID} if told_in == 3 else set[int]()),
    ]
    assert after(Steps(), *windows) == (6, 0, 0)


def test_the_word_of_another_process_does_not_count() -> None:
    assert after(Steps(), (use(6, 6, 4), {PID: False}, {PID + 1})) == (6, 6, 6)


def test_when_the_plugin_falls_silent_steps_are_blind_again() -> None:
    windows = [(use(n, n, 1), {PID: False}, {PID} if n == 1 else set[int]()) for n in range(1, 7)]
    # Window 2 still counts as told: the plugin may have been early.
    assert after(Steps(), *windows) == (6, 4, 4)


def test_the_last_word_of_a_process_that_has_ended() -> None:
    steps = Steps()
    steps.update({PID: use(4, 4, 1)}, {}, {PID: False}, ())
    steps.update({}, {PID: use(9, 9, 1)}, {}, ())
    assert (steps.steps, steps.blind_steps) == (9, 9)
    assert steps.of(PID) == (0, 0)


def test_a_number_that_is_used_again_begins_anew() -> None:
    steps = Steps()
    steps.update({PID: use(4, 4, 1)}, {}, {PID: False}, ())
    steps.update({PID: use(2, 2)}, {PID: use(5, 5, 1)}, {}, ())
    steps.update({PID: use(3, 3)}, {}, {}, ())
    assert (steps.steps, steps.blind_steps) == (5, 5)
    missed = Steps()
    missed.update({PID: use(4, 4, 1)}, {}, {PID: False}, ())
    missed.update({PID: use(2, 2, 1)}, {}, {PID: False}, ())  # its end was not seen
    missed.finish()
    assert (missed.steps, missed.blind_steps) == (6, 6)
