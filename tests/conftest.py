"""What every test shares: tests marked `kernel` skip where no probe can run, or fail (CI)."""

from __future__ import annotations

import os
from functools import cache

import pytest


@cache
def kernel_problems() -> tuple[str, ...]:
    from lanterne.agent.kernel import probe_support

    return probe_support().problems


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernel") is None or not kernel_problems():
        return
    reason = f"no probes here: {'; '.join(kernel_problems())}"
    if os.environ.get("LANTERNE_REQUIRE_KERNEL") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
