"""How long the agent holds a group of sends and receives that may not be whole yet."""

from __future__ import annotations

import pytest

from lanterne.agent.comms import QUARANTINE_ROUNDS
from lanterne.agent.config import Window
from lanterne.agent.daemon import _grace_ns


@pytest.mark.parametrize(
    ("window", "grace", "held"),
    [
        (1.0, 1.0, 1.0),  # the defaults
        (1.0, 0.25, 0.25),
        (0.1, 1.0, 0.4),  # four windows at most
        (60.0, 10.0, 10.0),
    ],
)
def test_a_group_is_held_no_longer_than_its_slot_stays_its_own(
    window: float, grace: float, held: float
) -> None:
    settings = Window(seconds=window, group_grace_seconds=grace)
    assert _grace_ns(settings) == int(held * 1e9)
    assert _grace_ns(settings) < QUARANTINE_ROUNDS * window * 1e9
