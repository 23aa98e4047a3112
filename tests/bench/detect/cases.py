"""What is run: fault kinds x sizes x slowdowns x noise x evidence, and on which seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (2, 3, 4, 8, 16, 64, 256)
SLOWDOWNS = (1.05, 1.1, 1.2, 1.5, 2.0)
NOISES = (
    "lognormal", "spikes", "autocorrelated", "clock", "lost", "missing", "roles", "bursts",
)  # fmt: skip
EVIDENCE = ("device", "blocking", "enqueue")
# Of one rank, or several, that are themselves slow.
RANK_KINDS = (
    "slow_compute", "intermittent", "drift", "several", "slow_host", "hot_expert", "throttled",
)  # fmt: skip
# Of the network between ranks that are not: no rank's own time grows.
PATH_KINDS = ("slow_sender", "slow_receiver", "slow_path")
KINDS = (*RANK_KINDS, "hang", *PATH_KINDS, "none")

# Thresholds of the detector may be chosen with an eye on the first; what is reported is the second.
SEEDS = {"tune": 1_000_000, "report": 9_000_000}


@dataclass(frozen=True)
class Case:
    """One run. `repeat` tells runs of one cell apart; it decides the seed with all the rest."""

    kind: str
    size: int
    slowdown: float
    noise: str
    evidence: str
    repeat: int = 0
    seeds: str = "report"

    @property
    def seed(self) -> list[int]:
        """Of numpy's default_rng: different for every case, the same on every machine."""
        return [
            SEEDS[self.seeds],
            KINDS.index(self.kind),
            self.size,
            round(self.slowdown * 100),
            NOISES.index(self.noise),
            EVIDENCE.index(self.evidence),
            self.repeat,
        ]


def possible(kind: str, size: int) -> bool:
    """Whether this kind exists at this size: half of the ranks slow is no fault of some."""
    return size >= 4 if kind in ("several", *PATH_KINDS) else True


def _cells(
    kinds: tuple[str, ...],
    sizes: tuple[int, ...],
    slowdowns: tuple[float, ...],
    evidence: tuple[str, ...],
    repeats: int,
    seeds: str,
) -> Iterator[Case]:
    """Every cell `repeats` times; the noise settings take turns over cells and repeats."""
    turn = 0
    for kind, size, slowdown, by in itertools.product(kinds, sizes, slowdowns, evidence):
        if not possible(kind, size):
            continue
        for repeat in range(repeats):
            # One further in every round, or a column would always meet the same noise.
            noise = NOISES[(turn + turn // len(NOISES)) % len(NOISES)]
            yield Case(kind, size, slowdown, noise, by, repeat, seeds)
            turn += 1


def _calm(
    sizes: tuple[int, ...], evidence: tuple[str, ...], repeats: int, seeds: str
) -> list[Case]:
    grid = itertools.product(sizes, NOISES, evidence, range(repeats))
    return [Case("none", n, 1.0, noise, by, repeat, seeds) for n, noise, by, repeat in grid]


def full(seeds: str) -> list[Case]:
    """About 750 runs. Other kinds than slow compute leave out what takes long and tells little."""
    timed, order, largest = EVIDENCE[:2], EVIDENCE[2:], SIZES[-1:]
    cases = list(_cells(("slow_compute",), SIZES, SLOWDOWNS, timed, 2, seeds))
    cases += _cells(("slow_compute",), SIZES, SLOWDOWNS, order, 1, seeds)
    cases += _cells(RANK_KINDS[1:], SIZES[:-1], SLOWDOWNS[1:], timed, 1, seeds)
    cases += _cells(RANK_KINDS[1:], largest, (1.1, 1.5), timed, 1, seeds)
    cases += _cells(RANK_KINDS[1:], SIZES[:-1], (1.2,), order, 1, seeds)
    cases += _cells(("hang",), SIZES, (1.0,), EVIDENCE, 2, seeds)
    cases += _cells(PATH_KINDS, SIZES, (1.2, 2.0), EVIDENCE, 1, seeds)
    return cases + _calm(SIZES, timed, 1, seeds)  # days without a fault have all evidence


def quick(seeds: str) -> list[Case]:
    """Under a minute on two cores."""
    timed = EVIDENCE[:2]
    cases = list(_cells(("slow_compute",), (2, 3, 4, 8, 16), (1.1, 1.2), timed, 2, seeds))
    cases += _cells(RANK_KINDS[1:], (4, 8), (1.2,), timed, 1, seeds)
    cases += _cells(("slow_compute",), (64,), (1.2,), timed, 1, seeds)
    cases += _cells((*PATH_KINDS, "hang"), (8,), (2.0,), ("device",), 1, seeds)
    return cases + _calm((8,), ("device",), 1, seeds)


def smoke(seeds: str) -> list[Case]:
    """What the regression test runs: seconds."""
    cases = list(_cells(("slow_compute",), (4, 8, 16), (1.1, 1.2), EVIDENCE[:2], 1, seeds))
    cases += _cells(("slow_compute",), (2, 3), (1.5,), ("device",), 1, seeds)
    cases += _cells(("several", "intermittent"), (8,), (1.5,), ("blocking",), 1, seeds)
    return cases + _calm((8,), ("device",), 1, seeds)
