"""From what a router decided to load per expert. Pure numpy.

Every strategy ends in one of two shapes: *assignments*, [tokens, k] expert numbers where -1 is
padding (a token with fewer experts, a dropped one, a padded batch), with or without *weights* of
the same shape; or *shares*, [tokens, experts] fractions (soft routing). `counts` and `soft_counts`
turn them into load, whatever made them: token choice, expert choice, a varying number of experts a
token, balanced assignment, hashing, groups. The functions that choose (`top_k`, `top_p`,
`expert_choice`) are for logits that were recorded without the decision.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def counts(assignments: npt.ArrayLike, experts: int, weights: npt.ArrayLike | None = None) -> F64:
    """Load per expert, [experts], or [layers, experts] for assignments [layers, tokens, k].

    assignments: whole numbers from -1 (nothing) to experts - 1, any k >= 0. weights: of the same
    shape, at least 0 and finite; what is padding counts nothing whatever its weight. Without
    weights every assignment counts 1. Raises ValueError.
    """
    chosen = np.asarray(assignments)
    if chosen.size == 0:
        chosen = chosen.astype(np.int64)
    if chosen.dtype.kind not in "iu":
        raise ValueError(f"assignments have type {chosen.dtype}; they must be whole numbers")
    if chosen.ndim not in (2, 3):
        raise ValueError(
            f"assignments have shape {chosen.shape}; it must be [tokens, k] or [layers, tokens, k]"
        )
    if experts < 1:
        raise ValueError(f"experts is {experts}; there must be one at least")
    flat = chosen.reshape(1 if chosen.ndim == 2 else chosen.shape[0], -1).astype(np.int64)
    if flat.size and not (flat.min() >= -1 and flat.max() < experts):
        raise ValueError(
            f"assignments hold {flat.min()} to {flat.max()}; allowed are -1 (padding) to "
            f"{experts - 1}"
        )
    real = flat >= 0
    share = None if weights is None else _weights(weights, chosen.shape).reshape(flat.shape)
    place = flat + np.arange(len(flat))[:, None] * experts
    load = np.bincount(
        place[real], None if share is None else share[real], len(flat) * experts
    ).astype(np.float64)
    return load.reshape(experts) if chosen.ndim == 2 else load.reshape(len(flat), experts)


def _weights(weights: npt.ArrayLike, shape: tuple[int, ...]) -> F64:
    share = np.asarray(weights, np.float64)
    if share.shape != shape:
        raise ValueError(f"weights have shape {share.shape}, the assignments {shape}")
    if share.size and not (np.isfinite(share).all() and share.min() >= 0):
        raise ValueError("weights must be finite and at least 0")
    return share


def soft_counts(shares: npt.ArrayLike) -> F64:
    """Load per expert of soft routing: [tokens, experts] -> [experts], also with layers in front.

    Raises ValueError where a share is negative, NaN or infinite.
    """
    values = np.asarray(shares, np.float64)
    if values.ndim < 2:
        raise ValueError(f"shares have shape {values.shape}; it must be [tokens, experts]")
    if values.size and not (np.isfinite(values).all() and values.min() >= 0):
        raise ValueError("shares must be finite and at least 0")
    load: F64 = values.sum(axis=-2)
    return load


def per_token(assignments: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[..., tokens] experts that each token really has: k without the padding."""
    found: npt.NDArray[np.int64] = (np.asarray(assignments) >= 0).sum(axis=-1)
    return found


def top_k(
    logits: npt.ArrayLike,
    k: int,
    *,
    bias: npt.ArrayLike | None = None,
    groups: int = 1,
    top_groups: int | None = None,
) -> I64:
    """Token choice: the k experts with the highest logits, [tokens, experts] -> [tokens, k].

    bias: [experts], added for the choice only. groups, top_groups: group-limited choice; experts
    lie in `groups` equal runs, and only the `top_groups` groups whose two best logits add up to
    most may be chosen from. Ties go to the lower number. Raises ValueError.
    """
    scores = _logits(logits)
    tokens, experts = scores.shape
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not divide into {groups} groups")
    allowed = groups if top_groups is None else top_groups
    if not 1 <= allowed <= groups:
        raise ValueError(f"top_groups {top_groups} is not between 1 and {groups}")
    if not 1 <= k <= allowed * (experts // groups):
        raise ValueError(f"k is {k}, not between 1 and {allowed * (experts // groups)} experts")
    if allowed < groups:
        parts = scores.reshape(tokens, groups, -1)
        best = np.sort(parts, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-best, axis=1, kind="stable")[:, :allowed]
        open_ = np.zeros((tokens, groups), bool)
        np.put_along_axis(open_, kept, True, axis=1)
        scores = np.where(np.repeat(open_, experts // groups, axis=1), scores, -np.inf)
    order: I64 = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return order


def top_p(logits: npt.ArrayLike, p: float, *, most: int | None = None) -> I64:
    """Dynamic k: per token the fewest experts whose probabilities reach p; -1 where it has fewer.

    [tokens, experts] -> [tokens, most]; one expert a token at least, `most` at most.
    """
    scores = _logits(logits)
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}, not above 0 and at most 1")
    most = scores.shape[1] if most is None else min(most, scores.shape[1])
    chance = softmax(scores)
    order = np.argsort(-chance, axis=1, kind="stable")
    before = np.cumsum(np.take_along_axis(chance, order, 1), axis=1)
    before = np.concatenate([np.zeros((len(scores), 1)), before[:, :-1]], axis=1)
    # Rounding must not add an expert to those that reach p exactly.
    found: I64 = np.where(before < p - 1e-12, order, -1)[:, :most]
    return found


def expert_choice(logits: npt.ArrayLike, capacity: int) -> I64:
    """Each expert takes the `capacity` tokens that want it most: -> [tokens, k], -1 padded.

    k is the most experts that one token got; tokens that nobody took have none.
    """
    scores = _logits(logits)
    tokens, experts = scores.shape
    if not 0 <= capacity <= tokens:
        raise ValueError(f"capacity {capacity} is not between 0 and {tokens} tokens")
    taken = np.zeros((tokens, experts), bool)
    order = np.argsort(-scores, axis=0, kind="stable")[:capacity]
    np.put_along_axis(taken, order, True, axis=0)
    width = int(taken.sum(axis=1).max(initial=0))
    ranked = np.argsort(~taken, axis=1, kind="stable")[:, :width]
    chosen: I64 = np.where(np.take_along_axis(taken, ranked, 1), ranked, -1)
    return chosen


def softmax(logits: npt.ArrayLike) -> F64:
    """[..., experts] probabilities, as a softmax router gives them."""
    scores = np.asarray(logits, np.float64)
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: F64 = raised / raised.sum(axis=-1, keepdims=True)
    return shares


def increase(previous: npt.ArrayLike, current: npt.ArrayLike) -> F64:
    """What counters that only grow have grown by; one that fell has begun anew: its whole value.

    Of arrays of counters that belong together, one fall means that all began anew.
    """
    old, new = np.asarray(previous, np.float64), np.asarray(current, np.float64)
    if old.shape != new.shape:
        return new.copy()
    grown: F64 = new - old if bool((new >= old).all()) else new.copy()
    return grown


def _logits(logits: npt.ArrayLike) -> F64:
    scores: Any = np.asarray(logits, np.float64)
    if scores.ndim != 2 or scores.shape[1] == 0:
        raise ValueError(f"logits have shape {scores.shape}; it must be [tokens, experts]")
    if scores.size and not math.isfinite(float(scores.max() - scores.min())):
        raise ValueError("logits hold NaN or infinities; every logit must be a finite number")
    found: F64 = scores
    return found
