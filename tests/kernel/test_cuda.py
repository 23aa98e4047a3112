"""libcuda: counts and times in maps, and what they add to the records of the same thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lanterne.probes import catalog
from lanterne.probes.layout import Flag

pytestmark = pytest.mark.kernel

SYMBOLS = {
    program: [row.symbol for row in catalog.ROWS if row.program is program]
    for program in catalog.Program
}


def gather(scene: Any, **options: int) -> Any:
    scene.caller.call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0, **options)
    (record,) = scene.records()
    return record


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_launches_are_counted_and_not_recorded(cuda: Any) -> None:
    launches, graphs = SYMBOLS[catalog.Program.LAUNCH], SYMBOLS[catalog.Program.GRAPH_LAUNCH]
    for symbol in launches:
        cuda.caller.call(symbol, times=10)
    for symbol in graphs:
        cuda.caller.call(symbol, times=3)
    assert not len(cuda.records())
    row = cuda.loaded.programs.cuda()[cuda.caller.pid]
    assert row["launches"] == 10 * len(launches)
    assert row["graph_launches"] == 3 * len(graphs)
    assert row["syncs"] == 0


def test_rows_of_processes_that_have_ended_are_dropped(cuda: Any, tmp_path: Path) -> None:
    """Ended is what has no folder in the /proc that the agent looks at."""
    cuda.caller.call("cuLaunchKernel", times=3)
    proc = tmp_path / "proc"
    (proc / str(cuda.caller.pid)).mkdir(parents=True)
    programs = cuda.loaded.programs
    assert set(programs.cuda(proc)) == {cuda.caller.pid}
    (proc / str(cuda.caller.pid)).rmdir()
    assert not programs.cuda(proc)
    assert cuda.caller.pid not in programs.cuda()
    cuda.caller.call("cuLaunchKernel", times=2)
    assert programs.cuda()[cuda.caller.pid]["launches"] == 2


def test_synchronise(cuda: Any) -> None:
    call = cuda.caller.call
    call("cuLaunchKernel", times=4)
    record = gather(cuda)
    assert not record["flags"] & Flag.SYNCED
    assert record["launches"] == 4
    for symbol in SYMBOLS[catalog.Program.SYNC]:
        call(symbol)
        record = gather(cuda)
        assert record["flags"] & Flag.SYNCED, symbol
        assert record["launches"] == 0
    call("cuLaunchKernel", times=3)
    record = gather(cuda)
    assert record["launches"] == 4  # three kernels and the operation before
    row = cuda.loaded.programs.cuda()[cuda.caller.pid]
    count = len(SYMBOLS[catalog.Program.SYNC])
    assert row["syncs"] == count == row["sync_bins"].sum()
    assert row["sync_ns"] > 0
    assert record["sync_blocked_us"] == 0  # was told with the record before


def test_failed_synchronise_is_none(cuda: Any) -> None:
    cuda.caller.set("stub_rc", 700)
    cuda.caller.call("cuStreamSynchronize", 0)
    cuda.caller.set("stub_rc", 0)
    assert not gather(cuda)["flags"] & Flag.SYNCED


def test_synchronise_belongs_to_its_thread(cuda: Any) -> None:
    cuda.caller.call("cuStreamSynchronize", 0, thread=1)
    assert not gather(cuda)["flags"] & Flag.SYNCED
    assert gather(cuda, thread=1)["flags"] & Flag.SYNCED


def test_capture(cuda: Any) -> None:
    call = cuda.caller.call
    call("cuLaunchKernel")
    for begin, end in zip(
        SYMBOLS[catalog.Program.CAPTURE_BEGIN],
        SYMBOLS[catalog.Program.CAPTURE_END] * 2,
        strict=True,
    ):
        call(begin)
        assert gather(cuda)["flags"] & Flag.CAPTURE, begin
        call(end)
        assert not gather(cuda)["flags"] & Flag.CAPTURE, end
    cuda.caller.set("stub_rc", 900)
    call("cuStreamBeginCapture_v2")  # did not begin
    cuda.caller.set("stub_rc", 0)
    assert not gather(cuda)["flags"] & Flag.CAPTURE
    assert cuda.loaded.programs.cuda()[cuda.caller.pid]["captured_ops"] == 4
