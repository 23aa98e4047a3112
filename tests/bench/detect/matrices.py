"""Wait matrices with slow senders, receivers and paths: who finds exactly these.

A matrix is one window's mean wait of receiver i for sender j, as an expert-parallel library that
counts it tells (no event on the wire does). Units do not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector import analyse
from tests.bench.detect import baselines
from tests.bench.detect.cases import PATH_KINDS, SEEDS, SLOWDOWNS
from tests.bench.detect.scoring import Score

F64 = npt.NDArray[np.float64]
Found = tuple[set[int], set[int], set[tuple[int, int]]]  # senders, receivers, paths

SIZES = (4, 8, 16, 64, 256)
LAYOUTS = ("flat", "nodes", "skewed")
COUNTS = ("one", "several")
BASE_MS, SIGMA = 1.0, 0.3
STEP_MS = 40.0  # own time that a slowdown is a share of
CROSS_NODE = 2.0  # wait for a sender on another node over that for one on the same
PER_NODE = 8


@dataclass(frozen=True)
class MatrixCase:
    """kind: of PATH_KINDS, or "none"."""

    kind: str
    size: int
    slowdown: float
    layout: str
    count: str
    repeat: int
    seeds: str = "report"


def cases(seeds: str, repeats: int, sizes: tuple[int, ...] = SIZES) -> Iterator[MatrixCase]:
    """All of them: thousands, of microseconds each."""
    for size, layout, repeat in itertools.product(sizes, LAYOUTS, range(repeats)):
        yield MatrixCase("none", size, 1.0, layout, "one", repeat, seeds)
        for kind, slowdown, count in itertools.product(PATH_KINDS, SLOWDOWNS, COUNTS):
            if count == "one" or size >= 8:
                yield MatrixCase(kind, size, slowdown, layout, count, repeat, seeds)


def node_map(case: MatrixCase) -> npt.NDArray[np.int64] | None:
    """[rank] node, where the layout has several."""
    if case.layout != "nodes":
        return None
    return np.arange(case.size) // min(PER_NODE, case.size // 2)


def build(case: MatrixCase) -> tuple[F64, Found]:
    """-> [receiver, sender] waits, and the truth."""
    rng = np.random.default_rng(
        [
            SEEDS[case.seeds],
            99,
            (*PATH_KINDS, "none").index(case.kind),
            case.size,
            round(100 * case.slowdown),
            LAYOUTS.index(case.layout),
            COUNTS.index(case.count),
            case.repeat,
        ]
    )
    n = case.size
    wait = BASE_MS * np.exp(rng.normal(0, SIGMA, (n, n)))
    if (node := node_map(case)) is not None:
        wait[node[:, None] != node] *= CROSS_NODE
    elif case.layout == "skewed":  # some receive more than others, within what is normal
        wait *= rng.uniform(0.7, 1.4, (n, 1)) * rng.uniform(0.7, 1.4, (1, n))
    count = 1 if case.count == "one" else max(2, n // 8)
    late = STEP_MS * (case.slowdown - 1) * np.exp(rng.normal(0, 0.1, (n, n)))
    chosen = rng.choice(n, count, replace=False).tolist()
    truth: Found = (set(), set(), set())
    if case.kind == "slow_sender":
        wait[:, chosen] += late[:, chosen]
        truth[0].update(chosen)
    elif case.kind == "slow_receiver":
        wait[chosen] += late[chosen]
        truth[1].update(chosen)
    elif case.kind == "slow_path":
        for i in chosen:
            j = int((i + rng.integers(1, n)) % n)
            wait[i, j] += late[i, j]
            truth[2].add((i, j))
    np.fill_diagonal(wait, 0.1 * BASE_MS)  # nobody waits for itself
    return wait, truth


def ours(wait: F64, node: npt.NDArray[np.int64] | None) -> Found:
    """The library's diagnosis. It is told the nodes, which an operator knows."""
    result = analyse.diagnose_wait_matrix(wait, node)
    return set(result.slow_senders), set(result.slow_receivers), set(result.slow_paths)


def measure(case: MatrixCase) -> dict[str, Score]:
    """Entities of any kind that are named, against those that are slow."""
    wait, truth = build(case)
    said = {"ours": ours(wait, node_map(case)), "deepxtrace": baselines.diagnose(wait)}
    scores = {}
    wanted = _entities(truth)
    for name, found in said.items():
        named = _entities(found)
        scores[name] = Score(
            found=len(named & wanted), missed=len(wanted - named), false=len(named - wanted)
        )
    return scores


def _entities(found: Found) -> set[tuple[str, int, int]]:
    senders, receivers, paths = found
    return (
        {("sender", r, r) for r in senders}
        | {("receiver", r, r) for r in receivers}
        | {("path", i, j) for i, j in paths}
    )
