"""Who is slow, from own times alone; and why, as far as the evidence goes.

Detector: ratio m_r / med >= 1.08 and (m_r - med) / max(1.4826 MAD, 1 % of med, noise) >= 3.5, where
med and MAD are those of the same-role peers without r, in two consecutive windows; with fewer than
two peers, those of r's own history. Leaving r out keeps it working for three ranks and for several
stragglers, where a z-score over all is capped below its threshold; the floor keeps a MAD near zero
from inflating it. The MAD of a few peers is often small by chance; the noise, by which a rank's
figure changes from window to window anyway, is known from all of them. A rank is named only where
fixing it would give time back (`gain`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

RATIO, SCORE = 1.08, 3.5
RATIO_CLEAR = 1.04
MIN_SAMPLES, MIN_SAMPLES_MEAN = 10, 30
MIN_GAIN = 0.02  # of the time: less than this is not worth naming anyone for
NAME_AFTER, CLEAR_AFTER = 2, 2  # consecutive windows
EXACT_RANKS = 64
HISTORY = 8

NONE, UNKNOWN_CLASS, SLOW_COMPUTE, SLOW_HOST, HOT_EXPERT = 0, 1, 2, 3, 4


def loo_median(x: F64) -> F64:
    """[C, n] -> median of each row without the element itself; NaN ignored, NaN below one peer."""
    order = np.argsort(x, axis=1, kind="stable")  # NaN last
    ordered = np.take_along_axis(x, order, axis=1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(x.shape[1]), x.shape), axis=1)
    valid = ~np.isnan(x)
    peers = valid.sum(axis=1, keepdims=True) - valid

    def at(index: I64) -> F64:
        # Element `index` of the row without the one at `place`; a NaN element removes nothing.
        index = np.clip(index + (valid & (index >= place)), 0, x.shape[1] - 1)
        return np.take_along_axis(ordered, index, axis=1)

    result = (at((peers - 1) // 2) + at(peers // 2)) / 2
    result[peers < 1] = np.nan
    return result


def leave_one_out(m: F64) -> tuple[F64, F64, I64]:
    """[C, n] own times -> (median, MAD, number) of each rank's peers.

    Above 64 ranks the deviations are taken from the median of all, which differs from that of the
    peers by at most one place in the order.
    """
    center = loo_median(m)
    valid = ~np.isnan(m)
    peers = valid.sum(axis=1, keepdims=True) - valid
    if m.shape[1] > EXACT_RANKS:
        ordered = np.sort(m, axis=1)
        count = np.maximum(valid.sum(axis=1, keepdims=True), 1)
        low = np.take_along_axis(ordered, (count - 1) // 2, axis=1)
        high = np.take_along_axis(ordered, count // 2, axis=1)
        return center, loo_median(np.abs(m - (low + high) / 2)), peers
    deviation = np.abs(m[:, None, :] - center[:, :, None])  # [C, rank, peer]
    diagonal = np.arange(m.shape[1])
    deviation[:, diagonal, diagonal] = np.nan
    ordered = np.sort(deviation, axis=2)
    some = np.maximum(peers, 1)
    low = np.take_along_axis(ordered, ((some - 1) // 2)[..., None], axis=2)[..., 0]
    high = np.take_along_axis(ordered, (some // 2)[..., None], axis=2)[..., 0]
    mad = (low + high) / 2
    mad[peers < 1] = np.nan
    return center, mad, peers


def from_history(history: F64) -> tuple[F64, F64]:
    """[..., HISTORY] earlier medians of one rank, NaN unused -> (median, MAD); NaN below three."""
    ordered = np.sort(history, axis=-1)
    count = history.shape[-1] - np.isnan(ordered).sum(axis=-1)

    def middle(x: F64) -> F64:
        some = np.maximum(count, 1)
        low = np.take_along_axis(x, ((some - 1) // 2)[..., None], axis=-1)[..., 0]
        high = np.take_along_axis(x, (some // 2)[..., None], axis=-1)[..., 0]
        return (low + high) / 2

    median = middle(ordered)
    mad = middle(np.sort(np.abs(history - median[..., None]), axis=-1))
    few = count < 3
    return np.where(few, np.nan, median), np.where(few, np.nan, mad)


def compare(m: F64, history: F64, noise: F64 | float = 0.0) -> tuple[F64, F64]:
    """[C, n] own times, [C, n, HISTORY], [C, 1] their noise (see `own.noise`) -> (ratio, score)."""
    center, mad, peers = leave_one_out(m)
    alone = peers < 2
    if alone.any():
        past, past_mad = from_history(history)
        center, mad = np.where(alone, past, center), np.where(alone, past_mad, mad)
    center = np.where(center > 0, center, np.nan)
    scale = np.maximum(np.maximum(1.4826 * mad, 0.01 * center), noise)
    return m / center, (m - center) / scale


def candidates(ratio: F64, score: F64, samples: I64, min_samples: int) -> Bool:
    """Ranks over the detector's thresholds."""
    with np.errstate(invalid="ignore"):
        return (ratio >= RATIO) & (score >= SCORE) & (samples >= min_samples)


def gain(own: npt.NDArray[np.float32], suspects: I64) -> F64:
    """[rank, instance] own times -> [suspect] mean time of an instance that fixing it gives back.

    What the operation waits for a suspect beyond the last of the ranks that are not suspected: the
    other suspects count as fixed, or two equally slow ranks would hide each other. A rank whose
    excess drowns in the others' noise gives nothing back.
    """
    others = np.ones(len(own), bool)
    others[suspects] = False
    if not others.any():
        return np.zeros(len(suspects))
    last = np.fmax.reduce(own[others], axis=0)
    beyond = np.fmax(own[suspects] - last, np.float32(0))  # unknown counts as nothing
    mean: F64 = beyond.mean(axis=1, dtype=np.float64)
    return mean


def settle(named: Bool, streak: I64, candidate: Bool, calm: Bool) -> tuple[Bool, I64]:
    """Name after two candidate windows in a row, clear after two calm ones -> (named, streak).

    `streak` counts the windows in a row that speak against the present verdict.
    """
    against = np.where(named, calm, candidate)
    streak = np.where(against, streak + 1, 0)
    flip = streak >= np.where(named, CLEAR_AFTER, NAME_AFTER)
    return named ^ flip, np.where(flip, 0, streak)


@dataclass(frozen=True)
class Kind:
    """One kind of operation of a communicator in a window: what preceded it on each rank."""

    op: int
    role: int
    evidence: int
    instances: int
    own: F64  # [rank] median or mean own time before it, ns
    blocked: F64  # [rank] mean time blocked in synchronise before it, wait taken off, ns
    size: F64  # [rank] mean bytes it sends


def classify(kinds: list[Kind], rank: int) -> int:
    """Class of a slow rank, from the kind of operation that it delays most."""
    worst, most, center = None, 0.0, math.nan
    for kind in kinds:
        middle = _peers(kind.own, rank)
        excess = (float(kind.own[rank]) - middle) * kind.instances
        if excess > most:
            worst, most, center = kind, excess, middle
    if worst is None:
        return UNKNOWN_CLASS
    if worst.evidence == 3 or bool((worst.blocked > 0).any()):
        # The lateness was spent waiting for the own GPU, or it was not.
        if not bool((worst.blocked > 0).any()):
            return UNKNOWN_CLASS
        blocked = float(worst.blocked[rank]) - _peers(worst.blocked, rank)
        if blocked < 0.5 * (float(worst.own[rank]) - center):
            return SLOW_HOST
    elif worst.evidence == 1:
        return UNKNOWN_CLASS  # device times alone do not tell a late host from a slow GPU
    if worst.role == 2 and _hot(worst, rank, center):
        return HOT_EXPERT
    return SLOW_COMPUTE


def _hot(kind: Kind, rank: int, center: float) -> bool:
    """Late at combine, and its tokens are as many more as its time is: normal time per token."""
    usual = _peers(kind.size, rank)
    if not (usual > 0 and center > 0):
        return False
    more = float(kind.size[rank]) / usual
    return more >= RATIO and float(kind.own[rank]) / center <= more * RATIO


def _peers(values: F64, rank: int) -> float:
    others = np.delete(values, rank)
    others = others[~np.isnan(others)]
    return float(np.median(others)) if len(others) else math.nan
