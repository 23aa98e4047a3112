"""libcuda: counts and times in maps, steps, and what they add to the records of the same thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lanterne.agent.cuda import UNKNOWN_DEVICE, Use
from lanterne.probes import catalog
from lanterne.probes.layout import Flag, Stream
from tests.kernel.stub import Caller

pytestmark = pytest.mark.kernel

SYMBOLS = {
    program: [row.symbol for row in catalog.ROWS if row.program is program]
    for program in catalog.Program
}


LEGACY, PER_THREAD, NAMED = 1, 2, 0x7F0000001000  # streams


def use_of(scene: Any) -> Use:
    use: Use = scene.loaded.programs.cuda()[scene.caller.pid]
    return use


def launch(scene: Any, symbol: str, stream: int = NAMED, **options: int) -> None:
    """With the stream where the call has it."""
    if "Ex" in symbol:
        config = scene.caller.memory(bytes(32) + stream.to_bytes(8, "little") + bytes(16))
        scene.caller.call(symbol, config, 1, 0, 0, **options)
    elif "Graph" in symbol:
        scene.caller.call(symbol, 1, stream, **options)
    elif "Cooperative" in symbol:
        scene.caller.call(symbol, 1, 1, 1, 1, 32, 1, 1, 0, stream, 0, **options)
    else:
        scene.caller.call(symbol, 1, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0, **options)


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
    use = use_of(cuda)
    assert len(launches) == 6
    assert use.launches == 10 * len(launches)
    assert use.graph_launches == 3 * len(graphs)
    assert use.syncs == 0


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
    assert use_of(cuda).launches == 2
    ended = programs.cuda_ended()
    assert ended[cuda.caller.pid].launches == 3
    assert not programs.cuda_ended()


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
    use = use_of(cuda)
    count = len(SYMBOLS[catalog.Program.SYNC])
    assert use.syncs == count == use.sync_bins.sum()
    assert use.sync_ns > 0
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
    assert use_of(cuda).captured_ops == 4


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_calls_by_kind_of_stream(cuda: Any) -> None:
    """Stream 0 is the legacy one at the plain entry and the thread's own at its twin."""
    names = SYMBOLS[catalog.Program.LAUNCH] + SYMBOLS[catalog.Program.GRAPH_LAUNCH]
    wanted: dict[tuple[Stream, str], int] = {}
    for number, symbol in enumerate(names, 1):
        own = symbol.endswith("_ptsz")
        which = "graph_launches" if "Graph" in symbol else "launches"
        for stream, kind in (
            (0, Stream.PER_THREAD if own else Stream.LEGACY),
            (LEGACY, Stream.LEGACY),
            (PER_THREAD, Stream.PER_THREAD),
            (NAMED, Stream.NAMED),
        ):
            launch(cuda, symbol, stream, times=number)
            wanted[kind, which] = wanted.get((kind, which), 0) + number
    found = {
        (Stream(one.stream), which): getattr(one, which)
        for one in use_of(cuda).bins
        for which in ("launches", "graph_launches")
    }
    assert found == wanted
    assert {one.device for one in use_of(cuda).bins} == {UNKNOWN_DEVICE}
    cuda.caller.call("cuLaunchKernelEx", 8, 1, 0, 0)  # no configuration can be read there
    assert [one.launches for one in use_of(cuda).bins if one.stream == Stream.UNREAD] == [1]


def test_synchronise_by_kind_of_stream(cuda: Any) -> None:
    call = cuda.caller.call
    call("cuStreamSynchronize", 0, times=2)
    call("cuStreamSynchronize", NAMED, times=3)
    call("cuStreamSynchronize_ptsz", 0, times=4)
    call("cuEventSynchronize", NAMED, times=5)
    call("cuCtxSynchronize", times=6)
    call("cuMemcpyDtoH_v2", 0x1000, 0x2000, 4, times=7)
    call("cuMemcpyDtoH_v2_ptds", 0x1000, 0x2000, 4, times=8)
    found = {Stream(one.stream): one.syncs for one in use_of(cuda).bins}
    assert found == {
        Stream.LEGACY: 2 + 7, Stream.NAMED: 3, Stream.PER_THREAD: 4 + 8, Stream.NONE: 5 + 6,
    }  # fmt: skip


def test_calls_by_device(cuda: Any) -> None:
    """Known from where a thread's current context was made; else unknown, never another one."""
    call, slots = cuda.caller.call, cuda.caller.memory

    def launches(symbol: str = "cuLaunchKernel", **options: int) -> dict[int, int]:
        launch(cuda, symbol, **options)
        return {one.device: one.launches for one in use_of(cuda).bins}

    assert launches() == {-1: 1}
    first, second, third = 0x5550001000, 0x5550002000, 0x5550003000
    for context, device in ((first, 0), (second, 3)):
        slot = slots(context.to_bytes(8, "little"))  # the stub stores nothing: it is there already
        call("cuDevicePrimaryCtxRetain", slot, device)
    assert launches() == {-1: 2}  # made, and not current
    call("cuCtxSetCurrent", second)
    assert launches(times=4) == {-1: 2, 3: 4}
    call("cuCtxSetCurrent", first, thread=1)
    assert launches(thread=1) == {-1: 2, 3: 4, 0: 1}
    assert launches() == {-1: 2, 3: 5, 0: 1}
    call("cuCtxPushCurrent_v2", first)
    assert launches() == {-1: 2, 3: 5, 0: 2}
    call("cuCtxPopCurrent_v2", slots(bytes(8)))
    assert launches() == {-1: 2, 3: 6, 0: 2}
    call("cuCtxSetCurrent", third)  # made before the probes came
    assert launches() == {-1: 3, 3: 6, 0: 2}
    call("cuCtxGetDevice", slots((5).to_bytes(4, "little")))
    assert launches() == {-1: 3, 3: 6, 0: 2, 5: 1}
    cuda.caller.set("stub_rc", 201)
    call("cuCtxSetCurrent", first)  # failed: nothing has changed
    cuda.caller.set("stub_rc", 0)
    assert launches() == {-1: 3, 3: 6, 0: 2, 5: 2}
    call("cuCtxDestroy_v2", first)
    call("cuCtxSetCurrent", first)  # whatever has this address now
    assert launches() == {-1: 4, 3: 6, 0: 2, 5: 2}
    for symbol, arguments in (
        ("cuCtxCreate_v2", (0, 6)), ("cuCtxCreate_v3", (0, 0, 0, 6)), ("cuCtxCreate_v4", (0, 0, 6)),
    ):  # fmt: skip
        call("cuCtxSetCurrent", third)
        call(symbol, slots(first.to_bytes(8, "little")), *arguments)
        before = {one.device: one.launches for one in use_of(cuda).bins}.get(6, 0)
        assert launches()[6] == before + 1, symbol
    assert cuda.loaded.programs.counters()["orphan_return"] == 0


def test_two_processes_have_contexts_of_their_own(cuda: Any) -> None:
    """One context's address in two processes is two devices."""
    context = 0x5550001000
    with type(cuda.caller)(*cuda.libraries) as other:
        for caller, device in ((cuda.caller, 1), (other, 2)):
            slot = caller.memory(context.to_bytes(8, "little"))
            caller.call("cuDevicePrimaryCtxRetain", slot, device)
            caller.call("cuCtxSetCurrent", context)
            caller.call("cuLaunchKernel", times=10 * device)
        found = cuda.loaded.programs.cuda()
        for pid, device in ((cuda.caller.pid, 1), (other.pid, 2)):
            assert [(b.device, b.launches) for b in found[pid].bins] == [(device, 10 * device)]


def steps_of(scene: Any) -> tuple[int, int, int]:
    """(steps, without a collective that was seen, of these with the launch of a graph)."""
    use = use_of(scene)
    return use.steps, use.silent_steps, use.replay_steps


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_steps_end_at_synchronise_calls(cuda: Any) -> None:
    call = cuda.caller.call
    for _ in range(3):  # launches and a collective
        launch(cuda, "cuLaunchKernel", times=5)
        gather(cuda)
        call("cuStreamSynchronize", NAMED)
    assert steps_of(cuda) == (3, 0, 0)
    for _ in range(4):  # launches alone
        launch(cuda, "cuLaunchKernel")
        call("cuEventSynchronize", 1)
    assert steps_of(cuda) == (7, 4, 0)
    call("cuStreamSynchronize", NAMED, times=10)  # nothing was launched
    assert steps_of(cuda) == (7, 4, 0)
    launch(cuda, "cuLaunchKernel")
    cuda.caller.set("stub_rc", 700)
    call("cuStreamSynchronize", NAMED)  # failed
    cuda.caller.set("stub_rc", 0)
    assert steps_of(cuda) == (7, 4, 0)


def test_steps_end_at_graph_launches(cuda: Any) -> None:
    call = cuda.caller.call
    launch(cuda, "cuLaunchKernel", times=2)  # what goes before the first graph is of its step
    launch(cuda, "cuGraphLaunch", times=5)
    assert steps_of(cuda) == (4, 4, 4)  # the fifth is open
    gather(cuda)
    call("cuStreamSynchronize", NAMED)
    assert steps_of(cuda) == (5, 4, 4)
    launch(cuda, "cuGraphLaunch_ptsz")
    call("cuStreamSynchronize_ptsz", 0)
    assert steps_of(cuda) == (6, 5, 5)


def test_what_is_captured_belongs_to_no_step(cuda: Any) -> None:
    call = cuda.caller.call
    call("cuStreamBeginCapture_v2", NAMED, 0)
    launch(cuda, "cuLaunchKernel", times=3)
    gather(cuda)
    call("cuStreamEndCapture", NAMED, 0)
    call("cuStreamSynchronize", NAMED)
    assert steps_of(cuda) == (0, 0, 0)
    assert use_of(cuda).captured_ops == 1
    launch(cuda, "cuGraphLaunch")
    call("cuStreamSynchronize", NAMED)
    assert steps_of(cuda) == (1, 1, 1)


def test_a_thread_that_launches_nothing_ends_no_step(cuda: Any) -> None:
    """Loaders of data synchronise with their own copies all the time."""
    launch(cuda, "cuLaunchKernel")
    cuda.caller.call("cuStreamSynchronize", NAMED, thread=1, times=5)
    assert steps_of(cuda) == (0, 0, 0)
    gather(cuda, thread=2)  # backward's collectives come from another thread
    cuda.caller.call("cuStreamSynchronize", NAMED)
    assert steps_of(cuda) == (1, 0, 0)


def test_processes_that_no_scan_has_seen_are_forgotten(cuda: Any) -> None:
    """Each leaves its threads and contexts behind, and the maps have room for some thousands."""
    programs = cuda.loaded.programs

    def held() -> set[int]:
        return {tgid for _, _, tgid in programs._entries()}

    def context_of(caller: Caller) -> None:
        slot = caller.memory((0x5550001000).to_bytes(8, "little"))
        caller.call("cuDevicePrimaryCtxRetain", slot, 1)

    context_of(cuda.caller)
    unseen = []
    for _ in range(3):
        with Caller(*cuda.libraries) as caller:
            context_of(caller)
            unseen.append(caller.pid)
    assert held() >= {cuda.caller.pid, *unseen}
    for _ in range(10):
        assert not set(cuda.attacher.scan().gone_pids) & set(unseen)
    assert cuda.caller.pid in held()
    assert not held() & set(unseen)
    assert programs.sweep_processes() == 0
    launch(cuda, "cuLaunchKernel")
    assert use_of(cuda).launches == 1
