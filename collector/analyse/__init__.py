"""The collector's analysis; its pure functions on numpy arrays are of use elsewhere, too.

What is named here is documented in docs/library.md and stays.
"""

from lanterne.collector.analyse.layers import (
    LayerMeasures,
    measure,
)
from lanterne.collector.analyse.moe import (
    balancedness,
    excess_gini,
    gini,
    hot_set,
    local_hit,
    local_hits,
    logical_loads,
    low_confidence,
    overflow,
    rank_loads,
    skew,
    skew_range,
    top,
)
from lanterne.collector.analyse.placement import Placement, gpu_load, place
from lanterne.collector.analyse.rebalance import Verdict, weigh
from lanterne.collector.analyse.routing import (
    counts,
    expert_choice,
    increase,
    per_token,
    soft_counts,
    softmax,
    top_k,
    top_p,
)
from lanterne.collector.analyse.rules import (
    BatchLimit,
    batch_limit,
    bias_steps,
    dropping,
    shared_with_hot,
)
from lanterne.collector.analyse.wait_matrix import WaitDiagnosis, diagnose_wait_matrix

__all__ = [
    "BatchLimit",
    "LayerMeasures",
    "Placement",
    "Verdict",
    "WaitDiagnosis",
    "balancedness",
    "batch_limit",
    "bias_steps",
    "counts",
    "diagnose_wait_matrix",
    "dropping",
    "excess_gini",
    "expert_choice",
    "gini",
    "gpu_load",
    "hot_set",
    "increase",
    "local_hit",
    "local_hits",
    "logical_loads",
    "low_confidence",
    "measure",
    "overflow",
    "per_token",
    "place",
    "rank_loads",
    "shared_with_hot",
    "skew",
    "skew_range",
    "soft_counts",
    "softmax",
    "top",
    "top_k",
    "top_p",
    "weigh",
]
