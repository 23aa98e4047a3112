"""The detector alone, fast: own times straight into the verdicts, no wire and no alignment.

    python tests/bench/detect_sim.py [--seeds 100-102] [--day] [--json FILE]

For choosing the detector's constants (on some seeds) and for checking them (on others). What is
reported to users is measured through the real wire format by `make bench-detect`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import kinds, verdicts
from lanterne.collector.analyse.who import KINDS
from lanterne.collector.analyse.window import OwnBlock
from lanterne.collector.snapshot import METHODS

F64 = npt.NDArray[np.float64]

WINDOW_SECONDS = 5.0
OWN_SECONDS = 0.02
COMPUTE_SHARE = 0.5
WINDOWS_A_DAY = int(86_400 / WINDOW_SECONDS)


@dataclass(frozen=True)
class Noise:
    """Lognormal factors; memory is the correlation time in seconds."""

    sigma: float = 0.05
    memory: float = 0.0
    spike_rate: float = 0.0  # of the operations
    spike_seconds: float = 0.05
    pause_rate: float = 0.0  # of a rank's windows: half a second lost
    burst: float = 1.0  # factor of all ranks' own times, now and then
    lost: float = 0.0  # share of the events
    missing: int = 0  # ranks that never report
    spread: float = 0.0  # by which ranks differ for good
    roles: float = 1.0  # factor of the second half of the ranks, by design


@dataclass(frozen=True)
class Fault:
    ranks: tuple[int, ...]
    factor: float = 1.2
    first: int = 20
    last: int = 60
    share: float = 1.0  # of the steps
    duty: tuple[int, int] = (1, 1)  # slow in the first of so many windows
    slope: bool = False  # grows from 1 to factor over the whole fault


@dataclass
class Run:
    named: list[set[int]] = field(default_factory=list)
    methods: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


class Series:
    """AR(1) lognormal factors [rank, step], continued from window to window."""

    def __init__(self, rng: np.random.Generator, ranks: int, noise: Noise, steps: int) -> None:
        self.rng, self.ranks, self.noise, self.steps = rng, ranks, noise, steps
        period = WINDOW_SECONDS / steps
        self.keep = float(np.exp(-period / noise.memory)) if noise.memory else 0.0
        self.level = rng.normal(0, noise.sigma, ranks)
        step = np.arange(steps)
        self.decay = self.keep ** (step + 1)
        self.response = np.triu(self.keep ** np.maximum(step - step[:, None], 0))
        self.static = np.exp(rng.normal(0, noise.spread, ranks))

    def window(self) -> F64:
        rng, noise, steps = self.rng, self.noise, self.steps
        z = rng.standard_normal((self.ranks, steps))
        if self.keep:
            z *= noise.sigma * np.sqrt(1 - self.keep**2)
            z = z @ self.response + self.level[:, None] * self.decay
            self.level = z[:, -1].copy()
        else:
            z *= noise.sigma
        own = OWN_SECONDS * np.exp(z) * self.static[:, None]
        if noise.spike_rate:
            own[rng.random(own.shape) < noise.spike_rate] += noise.spike_seconds
        if noise.pause_rate:
            hit = np.flatnonzero(rng.random(self.ranks) < noise.pause_rate)
            own[hit, rng.integers(0, steps, len(hit))] += 0.5
        if noise.roles != 1.0:
            own[self.ranks // 2 :] *= noise.roles
        return own


def windows(
    rng: np.random.Generator, ranks: int, count: int, noise: Noise, faults: tuple[Fault, ...]
) -> Iterator[F64]:
    """[rank, step] own times in seconds of each window."""
    steps = int(WINDOW_SECONDS * COMPUTE_SHARE / OWN_SECONDS)
    series = Series(rng, ranks, noise, steps)
    load, left = 1.0, 0
    for w in range(count):
        own = series.window()
        if noise.burst != 1.0:
            if left == 0:
                load, left = (noise.burst if rng.random() < 0.3 else 1.0), int(rng.integers(1, 12))
            left -= 1
            own *= load
        for fault in faults:
            if fault.first <= w < fault.last and w % fault.duty[1] < fault.duty[0]:
                factor = fault.factor
                if fault.slope:
                    factor = 1 + (factor - 1) * (w - fault.first) / (fault.last - fault.first)
                for rank in fault.ranks:
                    slow = rng.random(steps) < fault.share
                    own[rank, slow] *= factor
        if noise.lost:
            own[rng.random(own.shape) < noise.lost] = np.nan
        if noise.missing:
            own[-noise.missing :] = np.nan
        yield own


def follow(
    seed: int,
    ranks: int,
    count: int,
    noise: Noise,
    faults: tuple[Fault, ...] = (),
    silent: range = range(0),
) -> Run:
    """silent: windows without evidence."""
    rng = np.random.default_rng(seed)
    judge = verdicts.Verdicts(ranks)
    judge.forget(0, ranks)
    run = Run()
    for w, own in enumerate(windows(rng, ranks, count, noise, faults)):
        begin = time.perf_counter()
        block = OwnBlock(
            ranks=ranks,
            group=np.zeros(own.shape[1], np.int64),
            own=(own * 1e9).astype(np.float32),
            blocked=np.zeros(own.shape, np.float32),
            size=np.zeros(own.shape, np.float32),
        )
        stats = kinds.kind_stats([block])
        span = float(np.nanmedian(own) * own.shape[1] / COMPUTE_SHARE * 1e9)
        observed = verdicts.Observed(
            slot=0,
            base=0,
            ranks=ranks,
            rows=own.shape[1],
            span_ns=span,
            kinds=dict.fromkeys(range(KINDS), (4, 0, 2)),
        )
        if w in silent:
            judge.silence(0, ranks)
        else:
            judge.update(stats, [observed])
        run.seconds += time.perf_counter() - begin
        named = set(np.flatnonzero(judge.named).tolist())
        run.named.append(named)
        for rank in named:
            run.methods[rank] = METHODS[int(judge.method[rank])]
    return run


@dataclass
class Score:
    """Events: a faulty rank's fault, a healthy rank's being named."""

    found: int = 0
    missed: int = 0
    wrong: int = 0
    delays: list[int] = field(default_factory=list)
    flaps: int = 0

    def add(self, run: Run, faults: tuple[Fault, ...], grace: int = 16) -> None:
        for fault in faults:
            for rank in fault.ranks:
                told = [w for w in range(fault.first, fault.last) if rank in run.named[w]]
                if told:
                    self.found += 1
                    self.delays.append(told[0] - fault.first + 1)
                    self.flaps += sum(
                        rank in run.named[w] and rank not in run.named[w + 1]
                        for w in range(fault.first, fault.last - 1)
                    )
                else:
                    self.missed += 1
        for w, named in enumerate(run.named):
            fresh = named - (run.named[w - 1] if w else set())
            for rank in fresh:
                if not any(rank in f.ranks and f.first <= w < f.last + grace for f in faults):
                    self.wrong += 1

    @property
    def row(self) -> dict[str, float]:
        events = self.found + self.missed
        named = self.found + self.wrong
        return {
            "recall": round(self.found / events, 3) if events else float("nan"),
            "precision": round(self.found / named, 3) if named else float("nan"),
            "delay": float(np.median(self.delays)) if self.delays else float("nan"),
            "flaps": self.flaps,
            "wrong": self.wrong,
        }


NOISES = {
    "quiet": Noise(0.02),
    "lognormal": Noise(0.1),
    "spikes": Noise(0.05, spike_rate=0.01),
    "pauses": Noise(0.05, pause_rate=0.02),
    "lost": Noise(0.05, lost=0.02),
    "memory": Noise(0.05, memory=0.7),
    "long": Noise(0.1, memory=3.0),
    "longest": Noise(0.05, memory=20.0),
    "burst": Noise(0.05, burst=1.6),
    "spread": Noise(0.05, spread=0.02),
    "roles": Noise(0.05, roles=1.5),
}


def table(seeds: range, sizes: tuple[int, ...], factors: tuple[float, ...]) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, noise in NOISES.items():
        for size in sizes:
            for factor in factors:
                score = Score()
                for seed in seeds:
                    rank = seed % size
                    fault = (Fault((rank,), factor),)
                    run = follow(seed * 7919 + size, size, 80, noise, fault)
                    score.add(run, fault)
                out[f"{name}/{size}/{factor}"] = score.row
                print(f"{name:10} {size:4} {factor:5} {score.row}", flush=True)
    return out


def day(seed: int, names: list[str], ranks: int = 64, count: int = WINDOWS_A_DAY) -> dict[str, int]:
    out = {}
    for name in names:
        run = follow(seed, ranks, count, NOISES[name])
        score = Score()
        score.add(run, ())
        out[name] = score.wrong
        print(f"day {name:10} wrong {score.wrong} {run.methods} {run.seconds:.0f} s", flush=True)
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-10")
    parser.add_argument("--sizes", default="2,3,4,8,64")
    parser.add_argument("--factors", default="1.05,1.1,1.2")
    parser.add_argument("--noise", default=",".join(NOISES))
    parser.add_argument("--day", type=int, default=0, help="windows without a fault instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    first, last = map(int, options.seeds.split("-"))
    names = options.noise.split(",")
    for other in set(NOISES) - set(names):
        del NOISES[other]
    if options.day:
        result: dict[str, object] = {
            str(n): day(first, names, n, options.day) for n in map(int, options.sizes.split(","))
        }
    else:
        result = table(
            range(first, last),
            tuple(map(int, options.sizes.split(","))),
            tuple(map(float, options.factors.split(","))),
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
