"""What the agent's own page says of communicators that fail, and of a collector that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.stub import Caller
from tests.rig.build import build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


def test_lost_creations_and_connections(tmp_path: Path) -> None:
    paths = build(dest=tmp_path / "lib")
    window = {"window": {"seconds": 1.0, "scan_seconds": 0.5}}
    with Stack(tmp_path, [f"{paths.root}/*"], agent=window) as stack, Caller(paths.nccl) as caller:
        stack.start()

        def page(name: str, **labels: str) -> float:
            return stack.agent_metrics().total(f"lanterne_agent_{name}", **labels)

        def until(name: str, value: float, **labels: str) -> None:
            what = f"{name} {labels} is {value}"
            wait_for(lambda: page(name, **labels) == value, 60, f"{what}\n{stack.logs()}")

        until("libraries", 1, kind="nccl", state="attached")
        assert page("comm_creations_lost_total") == 0
        place, slot = caller.memory(bytes(128)), caller.memory(bytes(8))
        assert caller.call("ncclGetUniqueId", place) == 0
        unique_id = caller.peek(place, 128).hex()
        assert caller.call("ncclCommInitRank", slot, 1, unique_id, 0) == 0
        until("comms", 1)
        assert caller.call("ncclCommInitRank", slot, 2, unique_id, 5) != 0
        until("comm_creations_lost_total", 1, reason="failed")
        caller.call("ncclGroupStart")
        comm = int.from_bytes(caller.peek(slot, 8), "little")
        assert caller.call("ncclCommSplit", comm, 0, 0, caller.memory(bytes(8)), 0) == 0
        until("comms_unresolved", 1)
        assert page("comm_events_total") == 3
        caller.close()
        until("comm_creations_lost_total", 1, reason="process_ended")
        until("comms", 0)
        assert page("comm_creations_lost_total") == 2
        stack.kill("collector")
        wait_for(lambda: page("collector_failures_total") > 0, 60, "a connection that failed")
