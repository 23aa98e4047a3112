"""Figures of the faults, kept for docs/faults.md: FAULTS_JSON names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FIGURES: dict[str, dict[str, Any]] = {}


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """figures(key=value, ...): of the test that calls it."""

    def put(**values: Any) -> None:
        name = request.node.name.removeprefix("test_")
        FIGURES.setdefault(name, {}).update(values)
        print(name, values)

    return put


@pytest.fixture(scope="session", autouse=True)
def _written() -> Iterator[None]:
    yield
    path = os.environ.get("FAULTS_JSON")
    if path and FIGURES:
        Path(path).write_text(json.dumps(FIGURES, indent=2, sort_keys=True) + "\n")
