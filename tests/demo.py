"""`make demo`: the whole path on this machine, from real uprobes to a named straggler.

Starts a collector, an agent and a job with one slow rank; shows, live, which rank the others wait
for and what that costs. With --for it runs unattended, writes what was injected and what was named,
and exits 1 if the two differ. Ctrl-C stops everything that was started here, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tests import torch_job
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import SCRIPTS, Stack, wait_for

RANKS = 8
SLOW_CLASS = "slow_compute"
TORCH_RANKS = 4
# 4 layers a step.
RIG = JobConfig(
    ranks=RANKS, ranks_per_node=RANKS, tokens=128, hidden=256, zipf=0.4, layers=4, attn_us=4000,
    expert_us=1000, mode="eager", name="demo",
)  # fmt: skip
SLOW_FACTOR = 1.8  # the slow GPU needs so much longer for everything


class Running(Protocol):
    """What the demo needs of a job."""

    @property
    def pids(self) -> list[int]: ...


@dataclass
class Scenario:
    title: str
    ranks: int
    rank: int
    include: list[str]
    # The stand-in libnvidia-ml, so that GPUs have numbers as on a real host.
    nvml: Path | None = None
    klass: str = SLOW_CLASS

    def agent_env(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.nvml.parent)} if self.nvml else {}


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


@contextmanager
def rig_job(folder: Path, slow: int) -> Iterator[Running]:
    config = replace(RIG, faults=(f"slow-rank:{slow}:{SLOW_FACTOR}",))
    with Job(
        config, paths=RigPaths(folder / "lib"), env={"LANTERNE_WORKLOAD": "demo"}, hold="start"
    ) as job:
        yield job


@contextmanager
def pytorch_job(folder: Path, slow: int) -> Iterator[Running]:
    (folder / "torch").mkdir()
    with torch_job.TorchJob(
        TORCH_RANKS, folder / "torch", steps=0, slow_rank=slow, workload="demo"
    ) as job:
        say(f"starting {TORCH_RANKS} PyTorch processes")
        job.wait_ready()
        yield job


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--for", dest="seconds", type=float, default=0.0, help="unattended, so many seconds"
    )
    parser.add_argument("--json", type=Path, help="write injected and named here")
    parser.add_argument("--torch", default="", help="interpreter with PyTorch: Gloo, not the rig")
    parser.add_argument("--rank", type=int, help="the rank that is made slow")
    parser.add_argument("--keep", type=Path, help="folder for logs, kept")
    args = parser.parse_args()
    ranks = TORCH_RANKS if args.torch else RANKS
    if args.rank is not None and not 0 <= args.rank < ranks:
        parser.error(f"--rank {args.rank}: the job has ranks 0 to {ranks - 1}")
    return args


def watch(stack: Stack, started: float, done: Callable[[], bool], *, log: bool) -> dict[str, Any]:
    """Polls what is named until `done()`; the last word counts, and who was ever named is kept."""
    first_named: dict[int, float] = {}
    last: list[dict[str, Any]] = []
    shown: set[int] = set()
    while not done():
        time.sleep(0.5)
        try:
            last = list(stack.named())
        except (OSError, ValueError):
            continue
        for row in last:
            first_named.setdefault(row["rank"], time.monotonic() - started)
        now = {row["rank"] for row in last}
        if log and now != shown:
            for row in last:
                say(describe(row, first_named[row["rank"]]))
            shown = now
    return {"rows": last, "first_named": first_named}


def describe(row: dict[str, Any], after: float) -> str:
    seconds = row["recoverable_seconds_per_hour"]
    cost = f"; fixing it returns {seconds:.0f} s per hour" if seconds is not None else ""
    return (
        f"after {after:.1f} s: rank {row['rank']} is the straggler ({row['klass']}); "
        f"{row['waiting']} of {row['peers']} ranks wait for it, so far "
        f"{row['others_wait_seconds'] or 0:.1f} rank-seconds, evidence {row['evidence']}{cost}"
    )


def result(scenario: Scenario, seen: dict[str, Any], stack: Stack) -> dict[str, Any]:
    named = [
        {
            "rank": row["rank"],
            "class": row["klass"],
            # Where every rank waits a little, nobody clearly waits for this one: what fixing it
            # would return then.
            "wait_seconds": row["others_wait_seconds"] or row["blame_seconds"],
            "evidence": row["evidence"],
            "seconds_until_named": round(seen["first_named"][row["rank"]], 2),
        }
        for row in seen["rows"]
    ]
    # The same rank may be named in several communicators of the job; the costliest stands.
    by_rank: dict[int, dict[str, Any]] = {}
    for row in named:
        kept = by_rank.get(row["rank"])
        if kept is None or (row["wait_seconds"] or 0) > (kept["wait_seconds"] or 0):
            by_rank[row["rank"]] = row
    only = next(iter(by_rank.values())) if len(by_rank) == 1 else None
    lost = stack.agent_metrics().total("lanterne_agent_events_lost_total")
    return {
        "injected": {"rank": scenario.rank, "class": scenario.klass},
        "named": only if len(by_rank) <= 1 else list(by_rank.values()),
        "ever_named": sorted(seen["first_named"]),
        "lost_events": int(lost),
    }


def agrees(outcome: dict[str, Any]) -> bool:
    """The injected rank and class were named at the end, and no other rank at any time."""
    named, injected = outcome["named"], outcome["injected"]
    return (
        isinstance(named, dict)
        and (named["rank"], named["class"]) == (injected["rank"], injected["class"])
        and outcome["ever_named"] == [injected["rank"]]
    )


def run(args: argparse.Namespace, folder: Path) -> int:
    if args.torch:
        torch_job.PYTHON = Path(args.torch)
        rank = TORCH_RANKS // 2 if args.rank is None else args.rank
        # Without a GPU the rank itself computes, and this one sleeps instead: its host is slow.
        scenario = Scenario(
            "PyTorch + Gloo", TORCH_RANKS, rank, ["*/libtorch_cpu.so"], klass="slow_host"
        )
        make_job = pytorch_job
    else:
        say("building the stand-in libraries")
        nvml = build(dest=folder / "lib").nvml
        rank = RANKS // 2 + 1 if args.rank is None else args.rank
        scenario = Scenario("expert-parallel inference", RANKS, rank, [f"{folder}/lib/*"], nvml)
        make_job = rig_job
    say("starting collector and agent")
    with Stack(folder, scenario.include, env=scenario.agent_env()) as stack:
        stack.start()
        say(f"collector: {stack.collector_url}/   agent: {stack.agent_url}/metrics")
        with make_job(folder, scenario.rank) as job:
            wait_attached(stack)
            release(job)
            started = time.monotonic()
            say(f"job: {scenario.title}, {scenario.ranks} ranks, rank {scenario.rank} made slow")
            if args.seconds:
                end = started + args.seconds
                seen = watch(stack, started, lambda: time.monotonic() >= end, log=True)
            else:
                seen = show(stack, started)
            outcome = result(scenario, seen, stack)
    return report(args, outcome)


def wait_attached(stack: Stack) -> None:
    wait_for(
        lambda: stack.agent_metrics().total("lanterne_agent_libraries", state="attached"),
        60,
        f"a library with probes; see `lanterne-agent doctor`\n{stack.logs()}",
    )


def release(job: Running) -> None:
    if isinstance(job, Job):
        job.release()
        job.wait_ready()
    elif isinstance(job, torch_job.TorchJob):
        job.go()


def show(stack: Stack, started: float) -> dict[str, Any]:
    """The live table until Ctrl-C; it gets the Ctrl-C too, and ends by itself."""
    command = [str(SCRIPTS / "lanterne-collector"), "top", "--address", stack.collector_url]
    stopped = False

    def stop(_signum: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    previous = signal.signal(signal.SIGINT, stop)
    try:
        with subprocess.Popen(command) as top:
            seen = watch(stack, started, lambda: stopped or top.poll() is not None, log=False)
            if top.poll() is None:
                top.terminate()
    finally:
        signal.signal(signal.SIGINT, previous)
    say(f"metrics were at {stack.collector_url}/metrics and {stack.agent_url}/metrics")
    return seen


def report(args: argparse.Namespace, outcome: dict[str, Any]) -> int:
    if args.json:
        args.json.write_text(json.dumps(outcome, indent=2) + "\n")
    good = agrees(outcome)
    injected, named = outcome["injected"], outcome["named"]
    say(f"injected: rank {injected['rank']} {injected['class']}; named: {json.dumps(named)}")
    say(f"events lost: {outcome['lost_events']}")
    if args.seconds:
        say("what was named is what was injected" if good else "named and injected DIFFER")
        return 0 if good else 1
    return 0


def interrupt(_signum: int, _frame: object) -> None:
    """A terminated demo cleans up as an interrupted one does."""
    raise KeyboardInterrupt


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            return run(args, args.keep.resolve())
        with tempfile.TemporaryDirectory(prefix="lanterne-demo-") as folder:
            return run(args, Path(folder).resolve())
    except KeyboardInterrupt:
        say("stopped")
        return 130
    except (RuntimeError, TimeoutError) as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
