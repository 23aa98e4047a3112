"""Balance of expert load. Pure numpy, any number of layers at once; NaN: a figure is undefined.

Every function takes `load`, numbers of shape [..., n]: assignments (tokens times experts chosen,
fractional where the routing is soft), or bytes, of n experts or ranks, one row a layer. It gives
one value a row, shape [...], a plain number for a single row. Load that is negative, NaN or
infinite is refused with a ValueError.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Figure = Any  # float of one row, F64 of several

LOW_CONFIDENCE_TOKENS = 30.0  # per expert; below, chance alone gives large skews
CAPACITY_FACTOR = 1.25


def checked(load: npt.ArrayLike, name: str = "load") -> F64:
    """`load` as float64 [..., n]. Raises ValueError where a value cannot be a load."""
    values = np.asarray(load, dtype=np.float64)
    if values.ndim == 0:
        raise ValueError(
            f"{name} is one number; it must be an array, [experts] or [layers, experts]"
        )
    if values.size:
        low, high = values.min(), values.max()  # NaN if any is
        if not (np.isfinite(low) and np.isfinite(high)):
            bad = values[~np.isfinite(values)][0]
            raise ValueError(f"{name} holds {bad}; every value must be a finite number")
        if low < 0:
            raise ValueError(
                f"{name} holds {low:g}; no expert can have less than nothing: "
                "it must be not negative"
            )
    return values


def checked_layers(load: npt.ArrayLike, name: str = "load") -> F64:
    """The same, [layers, experts] with at least one expert."""
    values = np.asarray(load, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(f"{name} {values.shape} must be [layers, experts]")
    return checked(values, name)


def skew(load: npt.ArrayLike) -> Figure:
    """max / mean, the headline; 1 is even. All zero: NaN."""
    values = checked(load)
    return _over(_top(values), _mean(values))


def skew_range(load: npt.ArrayLike) -> tuple[Figure, Figure]:
    """-> (max / min over the experts with load, share of experts with none).

    With no load at all both are NaN. Where the share is not 0 the true max / min is infinite: the
    two belong together.
    """
    values = checked(load)
    some = values > 0
    least = np.where(some, values, np.inf).min(axis=-1, initial=np.inf)
    known = np.isfinite(least)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.where(known, _top(values) / least, np.nan)
        empty = np.where(known, 1 - some.sum(axis=-1) / max(values.shape[-1], 1), np.nan)
    return _plain(spread), _plain(empty)


def gini(load: npt.ArrayLike) -> Figure:
    """2 sum(i x_(i)) / (n sum x) - (n + 1) / n, with i from 1 over ascending x.

    0 is even; routing each token to k distinct of E experts cannot exceed 1 - k/E. All zero: NaN.
    """
    values = checked(load)
    n = values.shape[-1]
    if n == 0:
        return _plain(np.full(values.shape[:-1], np.nan))
    weighted = np.sort(values, axis=-1) @ np.arange(1, n + 1, dtype=np.float64)
    value = _over(2 * weighted, n * values.sum(axis=-1)) - (n + 1) / n
    return _plain(np.maximum(value, 0.0))


def excess_gini(load: npt.ArrayLike) -> Figure:
    """Gini - 1 / sqrt(pi mu), at least 0; mu: mean load of an expert, in assignments.

    What is taken off is the Gini coefficient that uniform routing gives by chance (of a Poisson
    distribution, for large mu): 0.20 at 8 tokens per expert.
    """
    values = checked(load)
    mean = _mean(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = 1 / np.sqrt(np.pi * np.where(mean > 0, mean, np.nan))
    return _plain(np.maximum(np.asarray(gini(values)) - chance, 0.0))


def balancedness(load: npt.ArrayLike) -> Figure:
    """mean / max; 1 is even. `load` is that of *ranks* (see `rank_loads`). All zero: NaN."""
    values = checked(load)
    return _over(_mean(values), _top(values))


def overflow(
    load: npt.ArrayLike,
    *,
    tokens: float | None = None,
    top_k: float | None = None,
    capacity_factor: float = CAPACITY_FACTOR,
) -> Figure:
    """Share of assignments above the capacity ceil(CF a / E) of an expert; a: all assignments.

    a is tokens * top_k where both are given, else the sum of the row: that holds for any number
    of experts a token. Overflow is not a drop: what an engine drops it must count itself.
    """
    values = checked(load)
    n = values.shape[-1]
    if not capacity_factor > 0:
        raise ValueError(f"capacity_factor {capacity_factor} must be above 0")
    if tokens is None or top_k is None:
        total = values.sum(axis=-1)
    else:
        total = np.full(values.shape[:-1], float(tokens) * float(top_k))
    # 1.1 * 100 / 10 is 11.000000000000002: not one more than 11.
    capacity = np.ceil(capacity_factor * total / max(n, 1) * (1 - 1e-12))
    above = np.maximum(values - np.expand_dims(capacity, -1), 0).sum(axis=-1)
    return _over(above, total) if n else _plain(np.full(values.shape[:-1], np.nan))


def low_confidence(load: npt.ArrayLike) -> Any:
    """True where there are fewer than 30 assignments an expert: skew is mostly chance then."""
    return _plain(_mean(checked(load)) < LOW_CONFIDENCE_TOKENS)


def hot_set(load: npt.ArrayLike, share: float = 0.1) -> npt.NDArray[np.int64]:
    """[..., m] the ceil(share n) experts with the most load, most first; ties by number."""
    values = checked(load)
    count = min(math.ceil(share * values.shape[-1] - 1e-9), values.shape[-1])
    return top(values, count)


def top(load: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    """[..., count] numbers of the experts with the most load, most first; ties by number."""
    values = checked(load)
    order: npt.NDArray[np.int64] = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    return order


def rank_loads(load: npt.ArrayLike, rank_of_expert: npt.ArrayLike, ranks: int = 0) -> F64:
    """[..., ranks] load of each rank, from that of the (physical) experts on it.

    rank_of_expert: whole numbers, [n], or [..., n] where layers are placed differently.
    ranks: how many there are; 0: one more than the largest number.
    """
    values = checked(load)
    where = np.asarray(rank_of_expert)
    if where.shape not in ((values.shape[-1],), values.shape):
        raise ValueError(
            f"rank_of_expert has shape {where.shape}; it must be ({values.shape[-1]},) or the "
            f"load's own {values.shape}"
        )
    return _gathered(values, where, ranks, "rank_of_expert")


def logical_loads(load: npt.ArrayLike, logical_of_physical: npt.ArrayLike, experts: int = 0) -> F64:
    """[..., experts] load of logical experts, replicas added up; arguments as in `rank_loads`."""
    values = checked(load)
    where = np.asarray(logical_of_physical)
    if where.shape not in ((values.shape[-1],), values.shape):
        raise ValueError(
            f"logical_of_physical has shape {where.shape}; it must be ({values.shape[-1]},) or "
            f"the load's own {values.shape}"
        )
    return _gathered(values, where, experts, "logical_of_physical")


def local_hit(assignments: npt.ArrayLike, rank_of_source: int) -> tuple[Figure, float]:
    """-> (share of assignments that stay on the own rank, the baseline 1 / EP).

    assignments: [..., EP] from one source rank to each rank.
    """
    values = checked(assignments)
    if not 0 <= rank_of_source < values.shape[-1]:
        raise ValueError(f"rank_of_source {rank_of_source} is none of {values.shape[-1]} ranks")
    share = _over(values[..., rank_of_source], values.sum(axis=-1))
    return share, 1 / values.shape[-1]


def local_hits(assignments: npt.ArrayLike) -> tuple[Figure, float]:
    """The same over all sources. assignments: [..., EP, EP], from row to column."""
    values = checked(assignments)
    if values.ndim < 2 or values.shape[-1] != values.shape[-2]:
        raise ValueError(f"assignments have shape {values.shape}; it must be [..., EP, EP]")
    own = np.trace(values, axis1=-2, axis2=-1)
    return _over(own, values.sum(axis=(-2, -1))), 1 / values.shape[-1]


def rank_load(matrix: npt.NDArray[np.int64]) -> F64:
    """Bytes that each rank receives, from a [sender, receiver] traffic matrix."""
    received: F64 = matrix.sum(axis=0).astype(np.float64)
    return received


def _gathered(values: F64, where: npt.NDArray[Any], size: int, name: str) -> F64:
    """values added up by number; one bincount over all rows."""
    if where.dtype.kind not in "iu":
        raise ValueError(f"{name} has type {where.dtype}; it must hold whole numbers")
    if where.size and (where.min() < 0 or (size and where.max() >= size)):
        raise ValueError(f"{name} holds {where.min()} to {where.max()}, not 0 to {size - 1}")
    size = size or (int(where.max()) + 1 if where.size else 0)
    rows = math.prod(values.shape[:-1])
    shift = np.arange(rows, dtype=np.int64)[:, None] * size
    places = np.broadcast_to(where, values.shape).reshape(rows, -1).astype(np.int64) + shift
    added = np.bincount(places.ravel(), values.ravel(), rows * size)
    return added.astype(np.float64, copy=False).reshape(*values.shape[:-1], size)


def _top(values: F64) -> F64:
    found: F64 = values.max(axis=-1, initial=0.0)
    return found


def _mean(values: F64) -> F64:
    found: F64 = values.sum(axis=-1) / max(values.shape[-1], 1)
    return found


def _over(above: npt.ArrayLike, below: npt.ArrayLike) -> Figure:
    """above / below; NaN where below is 0."""
    under = np.asarray(below, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _plain(np.where(under > 0, np.asarray(above, np.float64) / under, np.nan))


def _plain(values: npt.NDArray[Any]) -> Any:
    return values if values.ndim else values.item()
