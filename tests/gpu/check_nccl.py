"""A real communicator of one rank: who it is, and every operation on it, exactly once."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.context import Context
from tests.gpu.host import ask_smi, bus_id
from tests.gpu.process import Asked
from tests.gpu.result import Result, judged, skipped

TIMES, SPLIT_TIMES = 50, 20
IDENTIFY_SECONDS = 15.0
# What the agent calls one round of nccl.everything(); a send and a receive in a group are one.
EXPECTED = {
    "ALL_REDUCE": TIMES, "ALL_GATHER": TIMES, "REDUCE_SCATTER": TIMES, "BROADCAST": TIMES,
    "REDUCE": TIMES, "P2P_GROUP": TIMES,
}  # fmt: skip
# NCCL INFO: "ncclCommInitRank comm 0x55d0 rank 0 nranks 1 ... commId 0x8a1c... - Init START"
LINE = re.compile(r"\bcomm (0x[0-9a-f]+) rank \d+ n[rR]anks \d+\b.*?\bcommId (0x[0-9a-f]+)")


def printed_hashes(text: str) -> dict[int, int]:
    """Pointer of a communicator -> the commId NCCL prints for it, the newest."""
    return {int(pointer, 16): int(found, 16) for pointer, found in LINE.findall(text)}


def _logging(context: Context, name: str) -> tuple[Path, dict[str, str]]:
    log = context.folder / f"{name}-nccl.log"
    return log, {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}


def early(context: Context) -> Result:
    """The agent is there before the job."""
    return _run(context, "nccl_early", late=False)


def late(context: Context) -> Result:
    """The job has a communicator and has used it before the agent starts."""
    return _run(context, "nccl_late", late=True)


def plugin(context: Context) -> Result:
    """The profiler plugin is in the job: NCCL loads it, and nothing else changes."""
    if context.runtime.plugin is None:
        return skipped("the bundle has no profiler plugin")
    return _run(context, "nccl_plugin", late=False, plugin=context.runtime.plugin)


def device_times(numbers: Mapping[str, Any]) -> Result:
    """Are the plugin's times plausible? `numbers`: of the check before.

    NCCL copies a collective of one rank without a kernel; only the sends and receives have times.
    """
    if not numbers.get("plugin_mapped"):
        return skipped("the plugin was not loaded")
    told = numbers.get("device_ns")
    if told is None:
        return skipped("this agent reports no evidence 'device'")
    host = numbers["host_ns"]
    problems = []
    if told["shortest"] <= 0:
        problems.append("a duration of zero")
    if told["sum"] >= host:
        problems.append(f"together {told['sum']} ns, in {host} ns of the host's time")
    detail = f"{told['operations']} operations, {told['shortest']} to {told['longest']} ns"
    return judged(problems, detail, host_ns=host, **told)


def _run(context: Context, name: str, *, late: bool, plugin: Path | None = None) -> Result:
    if not context.host.libnccl:
        return skipped("no libnccl found (LANTERNE_GPU_NCCL=PATH names one)")
    log, env = _logging(context, name)
    if plugin is not None:
        env["NCCL_PROFILER_PLUGIN"] = str(plugin)
    if late:
        context.watch.stop_agent()
    else:
        context.watch.start_agent()  # unless it runs: then this is one more process on the library
    with context.driver(name, env) as driver:
        if not late:
            context.watch.wait_attached("cuda", "nccl")
        first = driver.ask("create")
        driver.ask("everything", times=3)
        if late:
            context.watch.start_agent()
            context.watch.wait_attached("cuda", "nccl")
        identified = _identified(context, driver)
        result = _judge(context, driver, first, log, plugin)
        return replace(result, numbers={**result.numbers, "identified_s": identified})


def _identified(context: Context, driver: Asked) -> float | None:
    """Seconds until the agent tells the GPU of the first communicator; None: not within 15 s.

    It learns of a communicator older than itself by an operation on it, and the GPU when it has
    read the process's maps: a process that was there before it loaded NCCL is looked at again
    some seconds later.
    """
    began = time.monotonic()
    while (spent := time.monotonic() - began) < IDENTIFY_SECONDS:
        at = int(driver.ask("all_reduce", on=0, times=1)["end_ns"])
        told = context.watch.communicators(driver.pid, at).values()
        if any(comm.get("gpu_bus_id") for comm in told):
            return round(spent, 2)
    return None


def _judge(context: Context, driver: Asked, first: dict[str, Any], log: Path,
           plugin: Path | None) -> Result:  # fmt: skip
    watch = context.watch
    began = int(driver.ask("all_reduce", on=0, times=0)["end_ns"])
    begin_window = watch.settled(began)["start_ns"]  # operations before `began` are told by now
    phase = driver.ask("everything", times=TIMES)
    child = driver.ask("split", of=0)
    end = int(driver.ask("all_reduce", on=1, times=SPLIT_TIMES)["end_ns"])
    comms = watch.communicators(driver.pid, end)
    text = log.read_text(errors="replace") if log.exists() else ""
    hashes = printed_hashes(text)
    wanted = [int(one["hash"] or hashes.get(one["pointer"], 0)) for one in (first, child)]
    problems: list[str] = []
    numbers: dict[str, Any] = {"nccl": driver.hello["nccl"], "host_ns": phase["host_ns"]}
    numbers["hashes"] = [f"{comm:#x}" for comm in comms]
    if 0 in wanted:
        problems.append(f"the NCCL log does not tell the commId of each: {sorted(hashes)}")
    elif set(comms) != set(wanted):
        problems.append(f"hashes {sorted(map(hex, comms))}, NCCL says {sorted(map(hex, wanted))}")
    else:
        both = (("first", EXPECTED), ("split", {"ALL_REDUCE": SPLIT_TIMES}))
        for (which, expected), comm in zip(both, wanted):  # noqa: B905 (Python 3.10)
            found = watch.operations(driver.pid, comm, begin_window, end)
            numbers[which] = dict(found)
            if found != Counter(expected):
                problems.append(f"{which}: {dict(found)} instead of {expected}")
    problems += _identity(context, driver, comms, numbers)
    if plugin is not None:
        problems += _device(context, driver, plugin, text, begin_window, numbers)
    return judged(problems, _detail(numbers, plugin), **numbers)


def _identity(context: Context, driver: Asked, comms: dict[int, dict[str, Any]],
              numbers: dict[str, Any]) -> list[str]:  # fmt: skip
    """Rank, size and GPU of each communicator; the GPU by three accounts."""
    problems = []
    cuda = bus_id(driver.hello["bus_id"])
    rows = ask_smi(context.host.smi) if context.host.smi else []
    smi = [bus_id(row["pci.bus_id"]) for row in rows]
    numbers["bus_id"] = {"cuda": cuda, "nvidia_smi": smi}
    if smi and cuda not in smi:
        problems.append(f"libcuda's {cuda} is not among nvidia-smi's {smi}")
    for comm in comms.values():
        told = (comm.get("rank", 0), comm.get("n_ranks", 0), bus_id(comm.get("gpu_bus_id", "")))
        if told != (0, 1, cuda):
            problems.append(f"communicator told as rank, size, GPU {told}, is (0, 1, {cuda})")
    numbers["identity"] = sorted({str(comm.get("identity", 0)) for comm in comms.values()})
    return problems


def _device(context: Context, driver: Asked, plugin: Path, text: str, since: int,
            numbers: dict[str, Any]) -> list[str]:  # fmt: skip
    maps = Path(f"/proc/{driver.pid}/maps").read_text(errors="replace")
    numbers["plugin_mapped"] = plugin.name in maps
    numbers["plugin_lines"] = [line[-160:] for line in text.splitlines() if "rofiler" in line][:5]
    rows = [row for _, row in context.watch.rows(driver.pid, since)]
    device = [row for row in rows if row["evidence"] == "device"]
    if device:
        numbers["device_ns"] = {
            "operations": sum(row["count"] for row in device),
            "shortest": min(row["duration_min_ns"] for row in device),
            "longest": max(row["duration_max_ns"] for row in device),
            "sum": sum(row["duration_sum_ns"] for row in device),
        }
    return [] if numbers["plugin_mapped"] else ["NCCL has not loaded the profiler plugin"]


def _detail(numbers: dict[str, Any], plugin: Path | None) -> str:
    detail = f"NCCL {numbers['nccl']}: hash, rank, GPU and {TIMES} of each operation exact"
    return detail if plugin is None else f"{detail}; plugin loaded"
