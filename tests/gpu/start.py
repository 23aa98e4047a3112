"""Starts one module of this folder: `start.py NAME ARGUMENT...`, under any Python of 3.10 or newer.

The package `tests` is made here and not found: site-packages of a GPU host may have another one.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(name: str, arguments: list[str]) -> int:
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests
    # The folder of this script would hide modules of the same names.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    return int(importlib.import_module(f"tests.gpu.{name}").main(arguments))


if __name__ == "__main__":
    sys.exit(start(sys.argv[1], sys.argv[2:]))
