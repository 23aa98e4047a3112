"""What disturbs a job and its observation, one setting a name of `cases.NOISES`.

Every setting has at least the base noise of own times; the others add to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

BASE_SIGMA = 0.03  # of the logarithm of own times, step by step


@dataclass(frozen=True)
class Noise:
    """sigma, memory: of the logarithm of own times, and its correlation from step to step.
    spikes: share of a rank's steps that take 1.5 to 4 times as long. bursts: a second, the whole
    job takes up to twice as long for a few seconds. lost: share of events. missing: share of
    ranks that never report. drift: of clocks, in parts; rtt_ns: of exchanges, mean of what is added
    to a tenth of a millisecond. roles: two halves with other operations and times.
    """

    sigma: float = BASE_SIGMA
    memory: float = 0.0
    spikes: float = 0.0
    bursts: float = 0.0
    lost: float = 0.0
    missing: float = 0.0
    drift: float = 0.0
    rtt_ns: float = 50_000.0
    roles: bool = False


SETTINGS = {
    "lognormal": Noise(sigma=0.06),
    "spikes": Noise(spikes=0.002),
    "autocorrelated": Noise(sigma=0.04, memory=0.95),
    "clock": Noise(drift=50e-6, rtt_ns=500_000.0),
    "lost": Noise(lost=0.03),
    "missing": Noise(missing=0.1),
    "roles": Noise(roles=True),
    "bursts": Noise(bursts=1 / 15),
}


def factors(rng: np.random.Generator, noise: Noise, shape: tuple[int, int, int]) -> F64:
    """[step, part of the step, rank] factors of own time, median 1."""
    steps = shape[0]
    z = rng.standard_normal(shape)
    if noise.memory:
        z *= np.sqrt(1 - noise.memory**2)
        z[0] /= np.sqrt(1 - noise.memory**2)
        for k in range(1, steps):
            z[k] += noise.memory * z[k - 1]
    x = np.exp(noise.sigma * z)
    if noise.spikes:
        hit = rng.random(shape) < noise.spikes
        x[hit] *= rng.uniform(1.5, 4.0, int(hit.sum()))
    return x


def load(rng: np.random.Generator, noise: Noise, steps: int, step_seconds: float) -> F64:
    """[step] factor of every rank's own time: bursts of load, 1 elsewhere."""
    x = np.ones(steps)
    starts = np.flatnonzero(rng.random(steps) < noise.bursts * step_seconds)
    for start in starts.tolist():
        length = int(rng.uniform(1.0, 5.0) / step_seconds)
        x[start : start + length] = rng.uniform(1.2, 2.0)
    return x


def absent(rng: np.random.Generator, noise: Noise, ranks: int, busy: I64) -> I64:
    """Ranks that never report, none of them `busy`. Below 8 ranks a missing one leaves too few."""
    if not noise.missing or ranks < 8:
        return np.zeros(0, np.int64)
    free = np.setdiff1d(np.arange(ranks), busy)
    count = min(len(free), max(1, int(ranks * noise.missing)))
    chosen: I64 = rng.choice(free, count, replace=False)
    return chosen


def silent(rng: np.random.Generator, noise: Noise, ranks: int, seconds: int) -> Bool:
    """[second, rank] whose batch never arrives, in place of missing ranks below 8."""
    lost = np.zeros((seconds, ranks), bool)
    if noise.missing and ranks < 8:
        lost[rng.random(seconds) < noise.missing, int(rng.integers(ranks))] = True
    return lost
