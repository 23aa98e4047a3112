"""`make soak`: hours of load and of processes that come and go; what grows, grows here.

    .venv/bin/python -m tests.soak --seconds 3600 --json soak.json

A process makes 20,000 calls a second under the probes of a real agent, and every second others
start, call and end. Memory, descriptors and CPU of agent and collector are sampled. Memory counts
as flat where the Theil-Sen slope of its samples is not told from zero, or grows the memory by less
than two per cent in the time that was watched. The exit status is 1 where memory or descriptors
grow, or events were lost. CPU is told, and fails nothing: it depends on who else is running.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from tests.rig.known import start_calls
from tests.rig.rig import RigPaths, build
from tests.stack import Stack, wait_for

F64 = npt.NDArray[np.float64]

RATE = 20_000  # calls a second
CHURN = 5  # processes a second, with a communicator and fifty calls each
WARM_SHARE = 0.25  # of the samples: pools and caches fill
FEWEST = 12  # samples, for a slope
TOLERATED = 0.02  # of the memory, over the time that was watched
AGENT_CPU_BUDGET = 0.02  # of one core, at RATE


def theil_sen(at: F64, values: F64) -> tuple[float, float, float]:
    """(slope, low, high): the median of the slopes between all pairs of samples, and the middle
    95 % of slopes of pairs that are at least a quarter of the time apart."""
    first, second = np.triu_indices(len(at), 1)
    apart = at[second] - at[first]
    slopes = (values[second] - values[first]) / apart
    far = slopes[apart >= (at[-1] - at[0]) / 4]
    low, high = np.quantile(far, (0.025, 0.975))
    return float(np.median(slopes)), float(low), float(high)


def flat(at: F64, values: F64) -> dict[str, Any]:
    """Of samples after the warm-up: `at` in seconds, `values` in MB."""
    slope, low, high = theil_sen(at, values)
    growth = slope * float(at[-1] - at[0])
    within = low <= 0 <= high or growth <= TOLERATED * float(np.median(values))
    return {
        "median_mb": round(float(np.median(values)), 2),
        "slope_mb_per_hour": round(slope * 3600, 3),
        "slope_low": round(low * 3600, 3),
        "slope_high": round(high * 3600, 3),
        "growth_mb": round(growth, 3),
        "flat": bool(within),
    }


class Watched:
    """Samples of one program and its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.rows: list[tuple[float, float, int, int, float]] = []

    def sample(self) -> None:
        every = [self._process, *self._process.children(recursive=True)]
        memory = sum(one.memory_full_info().uss for one in every) / 1e6
        cpu = sum(sum(one.cpu_times()[:2]) for one in every)
        fds, threads = sum(p.num_fds() for p in every), sum(p.num_threads() for p in every)
        self.rows.append((time.monotonic(), memory, fds, threads, cpu))

    def figures(self) -> dict[str, Any]:
        rows = np.array(self.rows[int(len(self.rows) * WARM_SHARE) :])
        fds = rows[:, 2]
        third = max(1, len(fds) // 3)
        return {
            "memory": flat(rows[:, 0], rows[:, 1]),
            "fds_first": int(np.median(fds[:third])),
            "fds_last": int(np.median(fds[-third:])),
            "fds_grow": bool(np.median(fds[-third:]) > np.median(fds[:third]) + 2),
            "threads_last": int(rows[-1, 3]),
            "cpu_share": round(float(np.ptp(rows[:, 4]) / np.ptp(rows[:, 0])), 4),
        }


class Churn:
    """Short-lived processes that map the libraries and call."""

    def __init__(self, paths: RigPaths) -> None:
        self._command = [str(paths.call), "--count=50", "--out-of-place"]
        self._env = dict(os.environ) | paths.env()
        self._running: list[subprocess.Popen[bytes]] = []
        self.started = 0

    def start(self, number: int) -> None:
        for _ in range(number):
            self._running.append(
                subprocess.Popen(self._command, env=self._env, stdout=subprocess.DEVNULL)
            )
        self.started += number
        self.reap()

    def reap(self, *, wait: bool = False) -> None:
        for process in list(self._running):
            if wait:
                process.wait(60)
            if process.poll() is not None:
                self._running.remove(process)


def soak(folder: Path, seconds: float, every: float) -> dict[str, Any]:
    paths = build(dest=folder / "lib")
    state: dict[str, dict[str, object]] = {
        "state": {"path": str(folder / "state")},
        "analysis": {"ended_seconds": 5},
    }
    agent: dict[str, dict[str, object]] = {
        "spool": {"path": str(folder / "spool")},
        "experts": {"socket": ""},
    }
    with Stack(folder, [f"{paths.root}/*"], agent=agent, collector=state) as stack:
        stack.start()
        assert stack.agent is not None
        assert stack.collector is not None
        watched = {"agent": Watched(stack.agent.pid), "collector": Watched(stack.collector.pid)}
        churn = Churn(paths)
        with start_calls(f"--rate={RATE}", f"--seconds={seconds + 60:.0f}", paths=paths) as calls:
            try:
                wait_for(lambda: _read(stack) > RATE, 120, f"events\n{stack.logs()}")
                read, began = _read(stack), time.monotonic()
                _watch(watched, churn, seconds, every)
                rate = (_read(stack) - read) / (time.monotonic() - began)
            finally:
                calls.kill()
                churn.reap(wait=True)
        agent_page, collector_page = stack.agent_metrics(), stack.collector_metrics()
    found: dict[str, Any] = {name: one.figures() for name, one in watched.items()}
    found["agent"]["cpu_budget"] = AGENT_CPU_BUDGET
    found["agent"]["within_budget"] = found["agent"]["cpu_share"] <= AGENT_CPU_BUDGET
    return {
        "seconds": round(time.monotonic() - began, 1),
        "events_per_second": round(rate),
        "processes_started": churn.started,
        "events_lost": int(agent_page.total("lanterne_agent_events_lost_total")),
        "batches_dropped": int(agent_page.total("lanterne_agent_batches_dropped_total")),
        "batches_refused": int(collector_page.total("lanterne_collector_batches_refused_total")),
        **found,
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(),
                    "load": [round(x, 1) for x in os.getloadavg()]},
    }  # fmt: skip


def _watch(watched: dict[str, Watched], churn: Churn, seconds: float, every: float) -> None:
    began = time.monotonic()
    due = sample_due = began
    while time.monotonic() < began + seconds:
        churn.start(CHURN)
        if time.monotonic() >= sample_due:
            sample_due += every
            for one in watched.values():
                one.sample()
        due += 1.0
        time.sleep(max(0.0, due - time.monotonic()))


def _read(stack: Stack) -> float:
    return stack.agent_metrics().total("lanterne_agent_events_read_total")


def good(figures: dict[str, Any]) -> bool:
    programs = (figures["agent"], figures["collector"])
    steady = all(one["memory"]["flat"] and not one["fds_grow"] for one in programs)
    lost = figures["events_lost"] + figures["batches_dropped"] + figures["batches_refused"]
    return steady and lost == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    every = min(10.0, max(1.0, args.seconds * (1 - WARM_SHARE) / (4 * FEWEST)))
    with tempfile.TemporaryDirectory(prefix="lanterne-soak-") as folder:
        figures = soak(Path(folder).resolve(), args.seconds, every)
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 0 if good(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
