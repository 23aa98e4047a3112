"""kill -9 of collector and agents at random; FAULT_KILLS says how often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import kills
from tests.faults.fleet import scale

KILLS = int(scale("FAULT_KILLS", 20))
# A start takes seconds, and on a busy machine half a minute.
pytestmark = [pytest.mark.kernel, pytest.mark.faults, pytest.mark.timeout(900 + 90 * KILLS)]


def test_random_kills(tmp_path: Path, figures: Callable[..., None]) -> None:
    kills.run(tmp_path, KILLS, 7, figures)
