"""A day of 64 ranks without a fault: every name is a false alarm.

Sixteen jobs side by side in one collector, for an hour and a half each, at few steps a window: as
many verdicts as a day of one job, but the fixed cost of a window is shared. Evidence takes turns.
Of four jobs, two have as many steps as every rule asks for and a few more, two as many as the
median needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.decode import decode
from lanterne.collector.snapshot import Snapshot
from tests.bench.detect.cases import EVIDENCE, Case
from tests.bench.detect.context import NS
from tests.bench.detect.feed import CONFIG, WINDOW_SECONDS
from tests.bench.detect.job import Job, simulate
from tests.bench.detect.scoring import per_hour
from tests.bench.detect.wire import T0, Origin, Wire

JOBS, RANKS = 16, 64
PIECE_WINDOWS = 120  # simulated at a time
# 31 a window; 20 to 29, as few as all rules of the detector look at; 13, which its medians need.
STEP_SECONDS = (0.15, 0.18, 0.35, 0.35)
WINDOW_NS = int(WINDOW_SECONDS * NS)


@dataclass(frozen=True)
class Day:
    """What to run; hours of 64 ranks."""

    noise: str
    seeds: str
    hours: float = 24.0


def run(day: Day) -> dict[str, Any]:
    """-> events, and how many an hour with its interval."""
    engine = Engine(CONFIG, boot_id="collector")
    pieces = round(day.hours * 3600 / JOBS / WINDOW_SECONDS / PIECE_WINDOWS)
    steps = [0] * JOBS
    before: set[tuple[int, int]] = set()
    events = 0
    for piece in range(pieces):
        wires = []
        for number in range(JOBS):
            case = _case(day, number, piece)
            period = STEP_SECONDS[number % len(STEP_SECONDS)]
            enough = round(PIECE_WINDOWS * WINDOW_SECONDS / period)
            job = simulate(case, period=period, steps=enough)
            # Readings of processes and GPUs decide why a rank is slow, never whether it is.
            origin = _cut(job, number, piece, steps)
            wires.append(Wire(case, job, origin, readings=False))
        for window in range(PIECE_WINDOWS):
            now_ns = T0 + (piece * PIECE_WINDOWS + window + 1) * WINDOW_NS
            for wire in wires:
                for exchange in wire.clocks(window):
                    engine.apply(exchange)
                for data in wire.batches(window):
                    engine.apply(decode(data, received_ns=now_ns))
            named = _named(engine.snapshot(now_ns / NS, now_ns=now_ns))
            events += len(named - before)
            before = named
    seconds = pieces * PIECE_WINDOWS * WINDOW_SECONDS * JOBS
    return {
        "noise": day.noise,
        "ranks": RANKS,
        "hours": seconds / 3600,
        "events": events,
        "per_hour": per_hour(events, seconds),
    }


def _case(day: Day, number: int, piece: int) -> Case:
    evidence = EVIDENCE[number % len(EVIDENCE)]
    return Case("none", RANKS, 1.0, day.noise, evidence, number + JOBS * piece, day.seeds)


def _cut(job: Job, number: int, piece: int, steps: list[int]) -> Origin:
    """End the job with its piece, and begin where the piece before has ended."""
    length = PIECE_WINDOWS * WINDOW_NS
    kept = int(np.searchsorted(job.step_end, length))
    for stage in job.stages:
        stage.sees[kept:] = False
    origin = Origin(number, piece * length, steps[number], piece * PIECE_WINDOWS, WINDOW_NS)
    steps[number] += kept
    return origin


def _named(snapshot: Snapshot) -> set[tuple[int, int]]:
    """(communicator, rank)"""
    rows = np.flatnonzero(snapshot.ranks.straggler == 1)
    hashes = [snapshot.communicators[c].comm_hash for c in snapshot.ranks.comm[rows].tolist()]
    return set(zip(hashes, snapshot.ranks.rank[rows].tolist(), strict=True))
