"""The step of `diagnose` that asks where the time of a job's steps goes, and who is waited for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from lanterne.collector.diagnose_findings import Finding, Json, Looked, share, where
from lanterne.collector.report import count
from lanterne.collector.view import spans

WAIT_CRITICAL = 0.10  # share of a job's time
WAIT_WARNING = 0.02
COMM_OVER_COMPUTE = 1.0
BUBBLE = 0.3  # of a GPU's time
UNLIKE = 1.5  # dispatch over combine, or the reverse


def stages(snapshot: Json) -> Looked:
    """Where the time of a step goes, and who is waited for."""
    looked = Looked("stages")
    comms = [c for c in snapshot["communicators"] if c["n_ranks"] > 1]
    timed = [c for c in comms if c["evidence"] != "none"]
    if not timed:
        looked.unknown = "no communicator whose waits are known" if comms else "no communicator"
    for number, comm in enumerate(snapshot["communicators"]):
        if comm["n_ranks"] < 2:
            continue
        looked.findings += _hang(comm)
        looked.findings += _waited_for(snapshot, number, comm)
        looked.findings += _halves(comm)
        looked.findings += _comm_over_compute(snapshot, number, comm)
    parts = [f"{c['name']} waits {share(c['wait_share'])}" for c in timed if c["wait_share"]]
    for job, busy, bubble in _gpu_time(snapshot):
        told = ", ".join(f"{stage.replace('_', ' ')} {share(part)}" for stage, part in busy)
        parts.append(f"GPUs of {job or 'a job'}: {told}")
        if bubble >= BUBBLE:
            looked.findings.append(_idle(job, busy, bubble))
    looked.seen = count(len(timed), "communicator") + (f": {', '.join(parts[:8])}" if parts else "")
    if timed or parts:
        looked.unknown = ""
    return looked


def _gpu_time(snapshot: Json) -> Iterator[tuple[str, list[tuple[str, float]], float]]:
    """(job, (stage, share of the time) largest first, mean idle share) where kernels are told."""
    jobs: dict[str, list[Json]] = {}
    for view in snapshot.get("stages", ()):
        if view["span_seconds"]:
            jobs.setdefault(view["workload"], []).append(view)
    for job, views in sorted(jobs.items()):
        span = sum(v["span_seconds"] for v in views)
        names = sorted({stage for v in views for stage in v["busy_seconds"]})
        busy = [(n, sum(v["busy_seconds"].get(n, 0.0) for v in views) / span) for n in names]
        bubbles = [v["bubble"] for v in views if v["bubble"] is not None]
        mean = sum(bubbles) / len(bubbles) if bubbles else 0.0
        yield job, sorted(busy, key=lambda part: (-part[1], part[0])), mean


def _idle(job: str, busy: list[tuple[str, float]], bubble: float) -> Finding:
    return Finding(
        "stages",
        "warning",
        f"{job or 'A job'}: its GPUs do nothing for {share(bubble)} of the time, waits excluded",
        tuple(f"{stage.replace('_', ' ')} {share(part)} of the time" for stage, part in busy[:4]),
        ("Larger batches, CUDA graphs, or a faster host: the GPUs are not given enough to do.",),
        bubble,
    )


def _rows(snapshot: Json, comm: int) -> Iterator[dict[str, Any]]:
    ranks = snapshot["ranks"]
    for row in range(bisect_left(ranks["comm"], comm), bisect_right(ranks["comm"], comm)):
        yield {name: column[row] for name, column in ranks.items() if len(column) > row}


_ADVICE = {
    "slow_compute": "Compare this GPU's clock, ECC errors and neighbours with its peers'; swap it.",
    "hot_expert": "Replicate or move the hot experts that live on this rank.",
    "slow_host": "Look at this process's CPU: pinning, throttled cgroup, data loading, GC pauses.",
    "slow_sender": "Check this rank's outgoing link: NIC, PCIe width and speed, congestion.",
    "slow_receiver": "Check this rank's incoming link, and incast towards it.",
    "slow_path": "Check the one path between these two: cable, switch port, routing.",
    "throttled": "Check cooling, power limit and power supply of this GPU.",
    "hang": "Look at the stack of the rank that has not arrived (py-spy, gdb); then restart it.",
    "unknown": "Device evidence (the NCCL profiler plugin) tells computing from sending.",
}


_UNSTUCK = {
    "gone": "Look into the log of the process that has ended; then restart the job.",
    "stopped": "Its process may not run: TracerPid and State in /proc/PID/status and its cgroup's "
    "cgroup.events say why. kill -CONT, the debugger's end or a thaw lets it go on.",
    "not_arrived": "Look at the stack of the rank that has not come (py-spy, gdb).",
    "not_arrived_host_running": "Look at the stack of the host that has not come (py-spy, gdb): "
    "a checkpoint, a data loader, a lock, another branch of the program.",
    "not_arrived_host_synchronising": "Its GPU does not end what it was given before: look at its "
    "kernels and at Xid errors (dmesg), and at its other communicators.",
    "arrived_device_not_started": "Its GPU does not end what it was given before: look at its "
    "kernels and at Xid errors (dmesg), and at its other communicators.",
}
_TRANSPORT = "All are in it: look at the network, NVLink and NCCL's log of these ranks."


def _hang(comm: Json) -> Iterator[Finding]:
    hang = comm.get("hang")
    if not hang:
        return
    late = set(hang["missing"])
    told = [s for s in hang.get("states", ()) if s["text"]]
    culprits = [s["state"] for s in told if late.intersection(s["ranks"])]
    advice = [_UNSTUCK[s] for s in culprits if s in _UNSTUCK]
    yield Finding(
        "stages",
        "critical",
        f"{comm['name']}: nothing has happened for {hang['seconds']:.0f} s, its ranks stand in "
        f"{hang['op']} {hang['seq']}",
        tuple(f"{_ranks(s['ranks'])}: {s['text']}" for s in told),
        tuple(dict.fromkeys(advice)) if late else (_TRANSPORT,),
        1.0,
    )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) != 1)} {spans(np.array(numbers, dtype=np.int64))}"


def _waited_for(snapshot: Json, number: int, comm: Json) -> Iterator[Finding]:
    named = [r for r in _rows(snapshot, number) if r["straggler"]]
    for row in named:
        blame = row["blame_share"] or 0.0
        ratio = f"{row['straggler_ratio']:.2f}" if row["straggler_ratio"] else "unknown"
        yield Finding(
            "stages",
            "critical" if blame >= WAIT_CRITICAL or row["class"] == "hang" else "warning",
            f"{comm['name']}: the others wait for rank {row['rank']}{where(snapshot, row)} "
            f"({row['class'].replace('_', ' ')})",
            (
                f"{share(blame)} of the time would come back",
                f"own time over its peers' {ratio}, confidence {row['confidence']:.2f}, evidence "
                f"{row['evidence']}, {row['samples']} operations",
                *([row["why"]] if row.get("why") else []),
            ),
            (_ADVICE.get(row["class"], _ADVICE["unknown"]),),
            blame,
        )
    lost = comm["wait_share"] or 0.0
    if not named and lost >= WAIT_WARNING:
        yield Finding(
            "stages",
            "warning" if lost >= WAIT_CRITICAL else "notice",
            f"{comm['name']}: ranks wait {share(lost)} of the time, for no one in particular",
            (f"mean over {comm['n_ranks']} ranks, evidence {comm['evidence']}",),
            (
                "The last to arrive changes from operation to operation: look at assignment skew, "
                "unequal sequences, or noise on the hosts.",
            ),
            lost,
        )


def _halves(comm: Json) -> Iterator[Finding]:
    """Dispatch and combine move the same tokens: where their times differ much, one is late."""
    dispatch, combine = _mean(comm["dispatch"].values()), _mean(comm["combine"].values())
    if not dispatch or not combine or max(dispatch, combine) < UNLIKE * min(dispatch, combine):
        return
    slower = "dispatch" if dispatch > combine else "combine"
    yield Finding(
        "stages",
        "notice",
        f"{comm['name']}: {slower} takes {max(dispatch, combine) / min(dispatch, combine):.1f} "
        "times as long as the other half",
        (f"dispatch {_ms(dispatch)}, combine {_ms(combine)}, waiting included",),
        (
            "Late at dispatch is attention or the host: batch composition, CPU launches."
            if slower == "dispatch"
            else "Late at combine is the expert side: hot experts, or a slow GPU.",
        ),
    )


def _comm_over_compute(snapshot: Json, number: int, comm: Json) -> Iterator[Finding]:
    rows = list(_rows(snapshot, number))
    transfer = sum(r["comm_seconds"] or 0.0 for r in rows)
    compute = sum(r["compute_seconds"] or 0.0 for r in rows)
    if compute <= 0 or transfer / compute < COMM_OVER_COMPUTE:
        return
    yield Finding(
        "stages",
        "warning",
        f"{comm['name']}: transfers take {transfer / compute:.1f} times as long as computing",
        (
            f"{transfer:.1f} rank-seconds in transfers, {compute:.1f} between them; waiting is in "
            "neither",
        ),
        (
            "Overlap communication with computing, or fewer tokens a step: beyond this batch size "
            "tokens/s may no longer rise.",
            "Send fewer bytes: a smaller type on the wire, or experts nearer to their tokens.",
        ),
        transfer / (transfer + compute),
    )


def _mean(histograms: Any) -> float:
    found = list(histograms)
    count = sum(h["count"] for h in found)
    return float(sum(h["sum_seconds"] for h in found) / count) if count else 0.0


def _ms(value: float) -> str:
    return f"{1e3 * value:.3g} ms"
