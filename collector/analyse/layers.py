"""All measures of one window of an expert-parallel model, every layer at once. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerMeasures:
    """One value a layer, all [layers]; NaN where a measure is undefined or not known."""

    assignments: F64  # sum of the load; fractional where the routing is
    skew: F64  # max / mean over logical experts
    spread: F64  # max / min over those with load
    zero_share: F64  # of experts without load
    gini: F64
    excess_gini: F64
    overflow: F64  # share of assignments above capacity
    low_confidence: npt.NDArray[np.bool_]  # below 30 assignments an expert
    balancedness: F64  # mean / max over ranks; NaN without placement
    local_hit: F64  # share of assignments that stay on their rank; NaN without sources

    def summary(self) -> dict[str, float]:
        """Over layers: balancedness least, median and mean, the worst and median of the others.

        What is undefined in every layer is absent.
        """
        found: dict[str, float] = {}
        balanced = self.balancedness[~np.isnan(self.balancedness)]
        if len(balanced):
            found["balancedness_min"] = float(balanced.min())
            found["balancedness_p50"] = float(np.median(balanced))
            found["balancedness_mean"] = float(balanced.mean())
        for name in ("skew", "gini", "excess_gini", "overflow", "zero_share"):
            values: F64 = getattr(self, name)
            values = values[~np.isnan(values)]
            if len(values):
                found[f"{name}_p50"] = float(np.median(values))
                found[f"{name}_max"] = float(values.max())
        local = self.local_hit[~np.isnan(self.local_hit)]
        if len(local):
            found["local_hit_mean"] = float(local.mean())
        return found


def measure(
    load: npt.ArrayLike,
    *,
    rank_of_expert: npt.ArrayLike | None = None,
    ranks: int = 0,
    logical_of_physical: npt.ArrayLike | None = None,
    local: npt.ArrayLike | None = None,
    by_source: npt.ArrayLike | None = None,
    capacity_factor: float = moe.CAPACITY_FACTOR,
) -> LayerMeasures:
    """Measures of every layer.

    load: [layers, experts] assignments. rank_of_expert, ranks: where they are (see
    `moe.rank_loads`). logical_of_physical: where `load` is that of physical experts, whose they
    are; replicas of one are then added up for all but the balancedness. by_source:
    [EP, layers, experts] the same load by the rank that the tokens came from; or `local`: [layers]
    share that stayed. Raises ValueError.
    """
    values = moe.checked(load)
    if values.ndim != 2:
        raise ValueError(f"load has shape {values.shape}; it must be [layers, experts]")
    unknown = np.full(len(values), np.nan)
    balanced = unknown
    if rank_of_expert is not None:
        balanced = np.asarray(moe.balancedness(moe.rank_loads(values, rank_of_expert, ranks)))
    stayed = unknown if local is None else np.asarray(local, np.float64)
    if by_source is not None:
        stayed = _stayed(moe.checked(by_source), values, rank_of_expert)
    if logical_of_physical is not None:
        values = moe.logical_loads(values, logical_of_physical)
    spread, empty = moe.skew_range(values)
    return LayerMeasures(
        assignments=values.sum(axis=1),
        skew=moe.skew(values),
        spread=spread,
        zero_share=empty,
        gini=moe.gini(values),
        excess_gini=moe.excess_gini(values),
        overflow=moe.overflow(values, capacity_factor=capacity_factor),
        low_confidence=moe.low_confidence(values),
        balancedness=balanced,
        local_hit=stayed,
    )


def _stayed(by_source: F64, load: F64, rank_of_expert: Any) -> F64:
    if rank_of_expert is None:
        raise ValueError("by_source needs rank_of_expert: which experts are on a source's rank?")
    if by_source.ndim != 3 or by_source.shape[1:] != load.shape:
        raise ValueError(f"by_source has shape {by_source.shape}; it must be (EP, *{load.shape})")
    where = np.broadcast_to(np.asarray(rank_of_expert), load.shape)
    own = np.zeros(len(load))
    for rank, part in enumerate(by_source):
        own += np.where(where == rank, part, 0.0).sum(axis=1)
    total = by_source.sum(axis=(0, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, own / total, np.nan)
