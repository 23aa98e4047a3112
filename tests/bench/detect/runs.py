"""One case -> the scores of our detector and of every baseline; many cases on all workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import TypeVar

from lanterne.collector.snapshot import CLASSES
from tests.bench.detect import baselines, feed, job, receives
from tests.bench.detect.cases import PATH_KINDS, Case
from tests.bench.detect.scoring import Score, score, spans
from tests.bench.detect.wire import Wire

OURS = "ours"
A = TypeVar("A")
B = TypeVar("B")


def class_known(case: Case) -> bool:
    """Whether the evidence on the wire can tell the class. A GPU's own times alone do not say
    whether it was slow or its host late; those of a host that waits for its GPU do, as do clocks,
    tokens and the time that a process waited for a CPU.
    """
    return not (
        case.evidence == "device"
        and case.kind in ("slow_compute", "intermittent", "drift", "several")
    )


def measure(case: Case) -> dict[str, Score]:
    """Runs the case -> score by detector."""
    simulated = job.simulate(case)
    said = feed.run(Wire(case, simulated), simulated)
    truth = spans(simulated)
    scores = {OURS: score(said.named, truth, said.klass, CLASSES)}
    for name, named in baselines.by_second(simulated).items():
        scores[name] = score(named, truth)
    own = scores[OURS]
    if truth and class_known(case):
        own.class_known = own.found
        own.class_right = own.classes.get(truth[0].klass, 0)
    if case.kind in PATH_KINDS and not receives.told(case):
        # Nobody's own time grows and nothing tells who waited for whom: there is nothing to find,
        # only somebody to blame wrongly.
        for one in scores.values():
            one.found = one.missed = one.class_known = one.class_right = 0
            one.delays, one.stays = [], []
    return scores


def each(function: Callable[[A], B], items: Sequence[A], workers: int) -> list[B]:
    """function of every item, in the order of the items; more than one worker: in processes."""
    if workers <= 1:
        return [function(item) for item in items]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return pool.map(function, items, chunksize=max(1, min(8, len(items) // (8 * workers))))
