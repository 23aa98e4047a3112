"""Measures of one window of expert load: 256 experts, 61 layers, 72 ranks, on one core.

    python -m tests.bench.moe

Two figures: the measures alone, from what each of the ranks told; and a window in the collector,
from the encoded loads of all ranks to the view that the pages render, the hour included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lanterne.collector.analyse import layers, routing
from lanterne.collector.analyse.experts import Experts
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.decode import decode
from lanterne.proto import telemetry_pb2 as pb

EXPERTS, LAYERS, RANKS = 256, 61, 72
TOKENS, TOP_K = 32, 8  # of a rank and window
ROUNDS = 9


def loads() -> np.ndarray[Any, np.dtype[np.float64]]:
    """[RANKS, LAYERS, EXPERTS] with a few hot experts."""
    rng = np.random.default_rng(1)
    chance = rng.pareto(2.0, EXPERTS) + 0.2
    scores = np.log(chance) + rng.gumbel(size=(RANKS, TOKENS * LAYERS, EXPERTS))
    return np.stack(
        [
            routing.counts(routing.top_k(one, TOP_K).reshape(LAYERS, TOKENS, TOP_K), EXPERTS)
            for one in scores
        ]
    )


def _median_ms(work: Callable[[], object]) -> float:
    work()
    spent = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return 1e3 * float(np.median(spent))


def _batches(by_source: np.ndarray[Any, np.dtype[np.float64]], places: Any) -> list[DecodedBatch]:
    found = []
    for rank, counts in enumerate(by_source):
        load = pb.ExpertLoad(
            workload="chat", engine="own", source="intake", unit=pb.UNIT_LOGICAL, rows=LAYERS,
            experts=EXPERTS, layer=np.arange(LAYERS, dtype="<u4").tobytes(),
            counts=counts.astype("<f8").tobytes(), source_rank=rank,
            rank_of_expert=places.astype("<u4").tobytes(),
        )  # fmt: skip
        batch = pb.Batch(schema=1, node=f"n{rank}", epoch=1, sequence=1, stride=1,
                         expert_loads=[load])  # fmt: skip
        found.append(decode(batch.SerializeToString()))
    return found


def measure() -> dict[str, Any]:
    by_source = loads()
    places = np.arange(EXPERTS) * RANKS // EXPERTS
    batches = _batches(by_source, places)
    experts = Experts()
    clock = [1.7e9]

    def window() -> None:
        for batch in batches:
            experts.add(batch)
        clock[0] += 5.0
        experts.close(clock[0], 1)

    result = {
        "window_ms": _median_ms(
            lambda: layers.measure(
                by_source.sum(axis=0), rank_of_expert=places, ranks=RANKS, by_source=by_source
            )
        ),
        "collector_window_ms": _median_ms(window),
        "experts": EXPERTS,
        "layers": LAYERS,
        "ranks": RANKS,
    }
    (view,) = experts.views(1, 1)
    if view.load.sum() != RANKS * TOKENS * TOP_K * LAYERS:
        raise SystemExit("the collector's load is not what was told")
    return result


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
