"""What a running collector says of itself: to /readyz, and to the service manager. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lanterne.collector.snapshot import Snapshot


def ready(
    *, serving: bool, analysing: bool, any_figures: bool, age: float, limit: float
) -> Mapping[str, str]:
    """What is wrong with each part, "" where nothing is. `age`, `limit`: seconds."""
    old = f"{age:.0f} s old, the limit is {limit:g} s" if any_figures else "none yet"
    return {
        "grpc": "" if serving else "not listening for agents",
        "engine": "" if analysing else "the analysis has ended: see the log",
        "snapshot": "" if age <= limit else old,
    }


def status(snapshot: Snapshot) -> str:
    """One line for `systemctl status`."""
    return f"{len(snapshot.nodes)} nodes, {len(snapshot.communicators)} communicators"
