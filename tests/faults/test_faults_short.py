"""A few of the faults of `make test-faults`, short: for every run of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import kills

pytestmark = [pytest.mark.kernel, pytest.mark.faults, pytest.mark.timeout(400)]


def test_two_kills(tmp_path: Path, figures: Callable[..., None]) -> None:
    kills.run(tmp_path, 2, 1, figures)
