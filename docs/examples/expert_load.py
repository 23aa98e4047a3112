"""Measures of expert load in a notebook, and what older formulas make of the same numbers.

    pip install lanterne && python docs/examples/expert_load.py

Everything is synthetic and seeded; nothing needs a GPU, an agent or a collector.
"""

from __future__ import annotations

import numpy as np

from lanterne.collector.analyse import (
    balancedness,
    counts,
    excess_gini,
    gini,
    low_confidence,
    measure,
    overflow,
    rank_loads,
    skew,
    skew_range,
    top_k,
)

EXPERTS, TOP_K, RANKS = 256, 8, 8


def routed(tokens: int, hot: float = 0.0) -> np.ndarray:
    """[experts] assignments of `tokens`; `hot` > 0 favours the first sixteen experts."""
    rng = np.random.default_rng(tokens)
    logits = rng.normal(size=(tokens, EXPERTS))
    logits[:, :16] += hot
    return counts(top_k(logits, TOP_K), EXPERTS)


# -- The older formulas --------------------------------------------------------------------------


def old_ratio(load: np.ndarray) -> float:
    return load.max() / (load.min() + 1e-5)


def old_drops(load: np.ndarray, tokens: int) -> float:
    capacity = int(1.25 * tokens * TOP_K / EXPERTS)
    return np.maximum(load - capacity, 0).sum() / load.sum()


def show(what: str, *values: object) -> None:
    print(f"{what:<44}" + "".join(f"{value:>14}" for value in values))


def main() -> None:
    print("1. Perfectly uniform routing, nothing is wrong; few tokens and many\n")
    few, many = routed(16), routed(4096)
    show("", "16 tokens", "4096 tokens")
    show("old: max / (min + 1e-5)", f"{old_ratio(few):.3g}", f"{old_ratio(many):.3g}")
    show("max / mean", f"{skew(few):.2f}", f"{skew(many):.2f}")
    show("max / min of those with load", *(f"{skew_range(x)[0]:.2f}" for x in (few, many)))
    show("share of experts without load", *(f"{skew_range(x)[1]:.0%}" for x in (few, many)))
    show(
        "mostly chance (below 30 an expert)",
        *("yes" if low_confidence(x) else "no" for x in (few, many)),
    )
    show(
        "old: 'dropped', int() capacity",
        f"{old_drops(few, 16):.0%}",
        f"{old_drops(many, 4096):.0%}",
    )
    show("overflow, ceil capacity (no drop)", f"{overflow(few):.0%}", f"{overflow(many):.0%}")

    print("\n2. A Gini coefficient of 0.15 is not imbalance\n")
    even, skewed = routed(256), routed(256, hot=1.0)
    show("256 tokens", "uniform", "16 hot experts")
    show("Gini", f"{gini(even):.3f}", f"{gini(skewed):.3f}")
    show("excess Gini", f"{excess_gini(even):.3f}", f"{excess_gini(skewed):.3f}")

    print("\n3. Replicas change the load of ranks, not of experts\n")
    load = routed(4096, hot=1.0)
    place = np.arange(EXPERTS) // (EXPERTS // RANKS)
    # One copy of each of the sixteen hot experts, two on each rank; the load is shared evenly.
    copied = np.concatenate([load, load[:16] / 2])
    copied[:16] /= 2
    where = np.concatenate([place, np.arange(16) // 2])
    logical = np.concatenate([np.arange(EXPERTS), np.arange(16)])
    before = measure(load[None], rank_of_expert=place)
    after = measure(copied[None], rank_of_expert=where, logical_of_physical=logical)
    show("", "before", "after")
    show("hottest / coldest expert", f"{before.spread[0]:.2f}", f"{after.spread[0]:.2f}")
    show("busiest rank / mean", *(
        f"{1 / balancedness(rank_loads(x, p)):.2f}" for x, p in ((load, place), (copied, where))
    ))  # fmt: skip
    show("balancedness", f"{before.balancedness[0]:.2f}", f"{after.balancedness[0]:.2f}")

    print("\n4. The published batch sizes again\n")
    batch = np.array([1, 16, 32, 64, 128])
    ffn = np.array([0.28, 0.45, 0.78, 1.42, 2.80])
    exchange = np.array([0.35, 0.42, 0.72, 1.85, 4.92])
    token_ms = np.array([18.5, 21.2, 28.6, 45.2, 89.5])
    show("batch", *batch)
    show("all-to-all / FFN: does not cross 1 at 64", *(f"{r:.2f}" for r in exchange / ffn))
    show("tokens per second: still rising", *(f"{n:.0f}" for n in batch / token_ms * 1e3))

    print("\n5. Bytes and operations of one layer, 128 tokens, H = 7168, D = 2048, 2 bytes\n")
    hidden, inner, tokens = 7168, 2048, 128
    once = tokens * TOP_K * hidden * 2
    show("bytes dispatched and combined (factor 2)", f"{2 * once:.3g}")
    show("old: the factor 2 for each of the two", f"{4 * once:.3g}")
    show("SwiGLU, 6 H D an assignment", f"{6 * hidden * inner * tokens * TOP_K:.3g}")
    show("old: 4 H D, two matrices instead of three", f"{4 * hidden * inner * tokens * TOP_K:.3g}")


if __name__ == "__main__":
    main()
