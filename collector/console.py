"""`lanterne-collector`: where only the agent's half is installed, it says so; else `main`."""

from __future__ import annotations

import sys


def run() -> None:
    """The console script."""
    try:
        from lanterne.collector import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lanterne"):
            raise
        sys.exit(
            f"lanterne-collector: the Python package {error.name} is missing; install the extra "
            "`collector`, as in: pip install 'lanterne[collector]'"
        )
    main.run()
