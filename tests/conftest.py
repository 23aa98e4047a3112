"""Kernel tests skip with a reason where uprobes cannot be had, and fail when they are required."""

from __future__ import annotations

import os
from functools import cache

import pytest


@cache
def why_no_kernel_tests() -> str:
    """Empty where real uprobes work here."""
    from lanterne.agent.kernel import probe_support

    if os.geteuid() != 0:
        return "kernel tests need root"
    support = probe_support()
    if not support.bpf or not (support.uprobe_multi or support.perf_uprobe):
        return "; ".join(support.problems) or "no uprobes here"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernel") is None:
        return
    reason = why_no_kernel_tests()
    if not reason:
        return
    if os.environ.get("LANTERNE_REQUIRE_KERNEL") == "1":
        pytest.fail(f"LANTERNE_REQUIRE_KERNEL=1, but {reason}", pytrace=False)
    pytest.skip(reason)
