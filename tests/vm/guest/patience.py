"""Limits of time, many times longer: an emulated machine, on a host that does other things too.

A pytest plugin (`-p patience`), and what `doctor` and attempt.py ask for. How long something takes
is no part of what is tested here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from lanterne.agent import compiler

FACTOR = 20
TEST_SECONDS = 2400


def loader() -> None:
    """Of the process that compiles and loads the programs."""
    compiler._LOAD_TIMEOUT_S *= FACTOR


def _longer(function: Callable[..., Any], position: int, default: float | None) -> Any:
    """The same function, with `timeout` (by name, or at that position) many times longer."""

    def patient(*arguments: Any, **named: Any) -> Any:
        values = list(arguments)
        if len(values) > position:
            values[position] = values[position] and values[position] * FACTOR
        else:
            limit = named.pop("timeout", default)
            named["timeout"] = limit and limit * FACTOR
        return function(*values, **named)

    return patient


def pytest_configure() -> None:
    from tests import stack
    from tests.rig.job import Job

    loader()
    popen: Any = subprocess.Popen
    popen.wait = _longer(popen.wait, 1, None)
    popen.communicate = _longer(popen.communicate, 2, None)
    job: Any = Job
    job.wait = _longer(job.wait, 1, 60.0)
    job.wait_ready = _longer(job.wait_ready, 1, 30.0)
    stack.wait_for = _longer(stack.wait_for, 1, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(TEST_SECONDS), append=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Says at once why a test failed: the rest may take an hour."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        print(f"\nlanterne-vm: {crash.message[:600]}", flush=True)
