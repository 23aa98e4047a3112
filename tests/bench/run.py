"""`make bench`: costs and rates against the budgets of the design, as one JSON object.

Each part compares within its own run, so that the numbers mean something on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.bench import agent_pipeline, collector_live, collector_pipeline, moe, plugin, probe
from tests.rig.rig import build, start_calls
from tests.stack import Stack, wait_for

# What the design promises: path -> (limit, "most" or "least").
BUDGETS: dict[str, tuple[float, str]] = {
    "probe.entry_over_empty": (1.15, "most"),
    "plugin.ratio": (1.02, "most"),
    "agent.events_per_s": (3e6, "least"),
    "agent.cpu_share_at_20k": (0.02, "most"),
    "agent.rss_mb": (80, "most"),
    "collector.events_per_s": (2e6, "least"),
    "collector.ranks": (16_384, "least"),
    "collector.event_to_metric_p99_s": (3, "most"),
    "collector.detect_window_ms_16384": (300, "most"),
    "moe.window_ms": (50, "most"),
}


def bench_agent(seconds: float = 20.0, rate: int = 20_000) -> dict[str, Any]:
    """The pipeline on one core, then the whole agent beside a job that makes `rate` calls/s."""
    pipeline = {
        f"{'groups' if grouped else 'collectives'}_{ranks}": agent_pipeline.measure(
            ranks=ranks, grouped=grouped
        )["events_per_s"]
        for grouped in (True, False)
        for ranks in (8, 64)
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = build(dest=folder / "lib")
        with Stack(folder, [f"{paths.root}/*"]) as stack:
            stack.start()
            calls = start_calls(f"--rate={rate}", f"--seconds={seconds + 15:.0f}", paths=paths)
            try:
                wait_for(lambda: _read(stack) > rate, 30, "events at the agent")
                live = _watch(stack, seconds)
            finally:
                calls.kill()
                calls.communicate()
    return {"events_per_s": min(pipeline.values()), **live, "pipeline": pipeline}


def _read(stack: Stack) -> float:
    return stack.agent_metrics().total("lanterne_agent_events_read_total")


def _watch(stack: Stack, seconds: float) -> dict[str, Any]:
    assert stack.agent is not None
    process = psutil.Process(stack.agent.pid)
    cpu, read, start = sum(process.cpu_times()[:2]), _read(stack), time.monotonic()
    time.sleep(seconds)
    spent = sum(process.cpu_times()[:2]) - cpu
    elapsed = time.monotonic() - start
    memory = process.memory_full_info()
    rings = sum(m.rss for m in process.memory_maps() if m.path.startswith("anon_inode:bpf-map"))
    return {
        "cpu_share_at_20k": round(spent / elapsed, 4),
        "measured_events_per_s": round((_read(stack) - read) / elapsed),
        # A ring's pages are mapped twice, so that a wrap is no seam; they are there once.
        "rss_mb": round((memory.rss - rings / 2) / 1e6, 1),
        "rss_as_shown_mb": round(memory.rss / 1e6, 1),
        "private_mb": round(memory.uss / 1e6, 1),
        "lost": stack.agent_metrics().total("lanterne_agent_events_lost_total"),
    }


def bench_collector(seconds: int = 3) -> dict[str, Any]:
    """Decode to scored in one process; and live, over gRPC, as many ranks as it keeps up with."""
    large = [
        collector_pipeline.measure(ranks=16_384, size=size, rate=100, seconds=seconds)
        for size in (16_384, 8)
    ]
    # Batches are as full at both ends (8 ranks, 100 operations), so the costs compare.
    small = collector_pipeline.measure(ranks=64, size=64, rate=100, seconds=seconds)
    live = _live()
    kept = [run["ranks"] for run in live if run["keeps_up"]]
    ranks = max(kept, default=0)
    shown = next(run for run in live if run["ranks"] == (ranks or 16_384))
    return {
        "events_per_s": round(min(run["events_per_s"] for run in large)),
        "ranks": ranks,
        "event_to_metric_p99_s": shown["event_to_metric_p99_s"],
        "detect_window_ms_16384": round(collector_pipeline.detect(ranks=16_384, size=16_384)),
        "us_per_rank_event": {
            str(run["ranks"]): round(run["us_per_rank_event"], 3) for run in [small, large[0]]
        },
        "runs": large,
        "live": live,
    }


def _live() -> list[dict[str, Any]]:
    """The largest of 1,024, 4,096, 8,192 and 16,384 ranks with three runs at most."""
    runs = []

    def keeps_up(ranks: int) -> bool:
        runs.append(collector_live.measure(ranks=ranks, size=ranks, rate=20, seconds=15))
        return bool(runs[-1]["keeps_up"])

    if not keeps_up(16_384):
        keeps_up(8192 if keeps_up(4096) else 1024)
    return runs


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "probe": probe.measure,
    "ring": probe.measure_ring,
    "plugin": plugin.measure,
    "agent": bench_agent,
    "collector": bench_collector,
    "moe": moe.measure,
}


def verdicts(result: dict[str, Any]) -> list[str]:
    """One line a budget that was measured."""
    lines = []
    for path, (limit, sense) in BUDGETS.items():
        part, key = path.split(".")
        if part not in result:
            continue
        value = result[part][key]
        good = value <= limit if sense == "most" else value >= limit
        lines.append(f"{'ok  ' if good else 'MISS'} {path} = {value:g} (at {sense} {limit:g})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=sorted(PARTS))
    args = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {
            "kernel": platform.release(), "arch": platform.machine(), "cpus": os.cpu_count()
        }
    }  # fmt: skip
    for name in [args.only] if args.only else PARTS:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        result[name] = PARTS[name]()
    print(json.dumps(result, indent=2))
    for line in verdicts(result):
        print(line, file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
