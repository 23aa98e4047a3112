"""Counting at libcuda: every launch, graph launch and synchronise call, exactly once."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tests.gpu.context import Context
from tests.gpu.process import Asked, wait_for
from tests.gpu.result import Result, judged, skipped
from tests.gpu.watch import COUNTERS

LAUNCHES, REPLAYS, SYNCS, NODES = 1000, 300, 100, 3
# (command, API, times, which counter it moves)
PHASES = (
    ("launch", "cuLaunchKernel", LAUNCHES, "launches"),
    ("launch", "cuLaunchKernel_ptsz", LAUNCHES + 1, "launches"),
    ("launch", "cuLaunchKernelEx", LAUNCHES + 2, "launches"),
    ("launch", "cuLaunchKernelEx_ptsz", LAUNCHES + 3, "launches"),
    ("replay", "cuGraphLaunch", REPLAYS, "graph_launches"),
    ("replay", "cuGraphLaunch_ptsz", REPLAYS + 1, "graph_launches"),
    ("sync", "cuStreamSynchronize", SYNCS, "syncs"),
    ("sync", "cuStreamSynchronize_ptsz", SYNCS + 1, "syncs"),
    ("sync", "cuEventSynchronize", SYNCS + 2, "syncs"),
    ("sync", "cuCtxSynchronize", SYNCS + 3, "syncs"),
)

Counts = Callable[[int], "dict[str, int]"]


def doctor(context: Context) -> Result:
    """With a process that uses the libraries, so that their probe sites are in the report."""
    with context.driver("doctor-driver") as driver:
        if driver.hello["nccl"]:
            driver.ask("create")
        code, report = context.watch.doctor()
    bad = [f"{row['check']}: {row['detail']}" for row in report["rows"] if row["status"] == "fail"]
    sites = {one["path"]: one["sites"] for one in report["libraries"]}
    problems = [*bad, *([] if code == 0 else [f"exit status {code}"])]
    if not any(sites.values()):
        problems.append("no library with a place for a probe was found")
    costly = sorted({site["symbol"] for found in sites.values() for site in found
                     if site["cheap"] is False})  # fmt: skip
    return judged(
        problems,
        f"works; {sum(map(len, sites.values()))} probes in {len(sites)} libraries",
        report=report,
        costly=costly,
    )


def probed(numbers: Mapping[str, Any]) -> set[str]:
    """The symbols of libcuda that doctor would probe. `numbers`: of its check."""
    return {
        site["symbol"]
        for library in numbers.get("report", {}).get("libraries", ())
        if "libcuda" in library["path"]
        for site in library["sites"]
    }


def addresses(context: Context, symbols: set[str]) -> Result:
    """What the runtime gets from cuGetProcAddress must be where the probes are."""
    if not symbols:
        return skipped("the check doctor named no probe in libcuda")
    with context.driver("addresses", nccl=False) as driver:
        found: dict[str, str] = driver.ask("addresses")["found"]
    hidden = sorted(asked for asked, export in found.items() if not export)
    unprobed = sorted(f"{a} -> {e}" for a, e in found.items() if e and e not in symbols)
    problems = []
    if hidden:
        problems.append(f"not an exported address: {', '.join(hidden)}")
    if unprobed:
        problems.append(f"exported, but without a probe: {', '.join(unprobed)}")
    if not found:
        problems.append("cuGetProcAddress gave nothing")
    detail = f"{len(found)} pointers, each the address of a probed export"
    return judged(problems, detail, pointers=found)


def counts(context: Context) -> Result:
    """By the agent's reports of a process that holds no communicator."""
    context.watch.start_agent()
    with context.driver("counts", nccl=False) as driver:
        context.watch.wait_attached("cuda")
        driver.ask("launch", api="cuLaunchKernel", times=1)
        context.watch.wait_seen(driver.pid)
        driver.ask("current")  # with the probes in place: now they know the device
        return _counted(context, driver)


def attacher(context: Context) -> Asked:
    return Asked("attacher", [context.runtime.bcc, *context.host.include],
                 context.folder / "attacher.log", python=context.runtime.python,
                 env=context.runtime.env)  # fmt: skip


def _by_agent(context: Context, process: Asked) -> Counts:
    def read(at_ns: int) -> dict[str, int]:
        def reported() -> dict[str, int] | None:
            return context.watch.counters(process.pid, at_ns)

        found: dict[str, int] = wait_for(reported, 10.0, "the process's counters are reported")
        return found

    return read


def _counted(context: Context, driver: Asked) -> Result:
    read = _by_agent(context, driver)
    driver.ask("launch", api="cuLaunchKernel", times=10)
    driver.ask("capture", nodes=NODES)
    began = int(driver.ask("sync", api="cuStreamSynchronize", times=1)["end_ns"])
    before, bins = read(began), context.watch.bins(driver.pid, began)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    absent: list[str] = []
    for do, api, times, moves in PHASES:
        answer = driver.ask(do, api=api, times=times)
        if not answer["there"]:
            absent.append(api)
            continue
        after = read(int(answer["end_ns"]))
        seen = {name: after[name] - before[name] for name in COUNTERS}
        wanted = {name: times if name == moves else 0 for name in COUNTERS}
        rows.append({"api": api, "made": times, **seen})
        if seen != wanted:
            problems.append(f"{times} times {api} moved {seen}")
        before = after
    moved = context.watch.bins(driver.pid, time.monotonic_ns()) - bins
    if moved != _expected_bins(rows):
        problems.append(f"by device, stream and counter {dict(moved)}")
    total = sum(row["made"] for row in rows)
    detail = f"{total} calls through {len(rows)} functions, each counted once"
    return judged(problems, detail, phases=rows, absent=absent,
                  bins={"/".join(key): number for key, number in moved.items()})  # fmt: skip


def _expected_bins(rows: list[dict[str, Any]]) -> Counter[tuple[str, str, str]]:
    """The driver has one device and one stream; events and contexts name no stream."""
    expected: Counter[tuple[str, str, str]] = Counter()
    moves = {api: counter for _, api, _, counter in PHASES}
    for row in rows:
        stream = "none" if row["api"].startswith(("cuEvent", "cuCtx")) else "named"
        expected["0", stream, moves[row["api"]]] += row["made"]
    return expected


TORCH_PHASES = (
    ("add", LAUNCHES, {"launches": LAUNCHES}),
    ("replay", REPLAYS, {"graph_launches": REPLAYS}),
    ("device_sync", SYNCS, {"syncs": SYNCS}),
    ("stream_sync", SYNCS, {"syncs": SYNCS}),
    ("event_sync", SYNCS, {"syncs": SYNCS}),
)


def torch_counts(context: Context) -> Result:
    """The same through PyTorch: its runtime gets at libcuda by cuGetProcAddress."""
    if not context.host.torch:
        return skipped("this Python has no torch")
    context.watch.start_agent()
    log = context.folder / "torch.log"
    with Asked("driver_torch", [], log, python=sys.executable, timeout=90.0) as driver:
        if not driver.hello["cuda"]:
            return skipped(f"torch {driver.hello['torch']} sees no GPU")
        context.watch.wait_attached("cuda")
        driver.ask("add", times=1)
        context.watch.wait_seen(driver.pid)
        return _torch_counted(driver, _by_agent(context, driver))


def _torch_counted(driver: Asked, read: Counts) -> Result:
    before = read(int(driver.ask("device_sync", times=1)["end_ns"]))
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for do, times, moves in TORCH_PHASES:
        after = read(int(driver.ask(do, times=times)["end_ns"]))
        seen = {name: after[name] - before[name] for name in COUNTERS}
        rows.append({"did": do, "times": times, **seen})
        if seen != {name: moves.get(name, 0) for name in COUNTERS}:
            problems.append(f"{times} times {do} moved {seen}")
        before = after
    # Last, because the profiler stays in the process: is one add one launch, by CUPTI's account?
    traced = driver.ask("profile", times=LAUNCHES, within=90.0)
    if traced["launches"] is not None and traced["launches"] != LAUNCHES:
        problems.append(f"the profiler saw {traced['launches']} launches for {LAUNCHES} adds")
    return judged(problems, f"torch {driver.hello['torch']}: every phase exact", phases=rows,
                  profiler_launches=traced["launches"], torch=driver.hello)  # fmt: skip
