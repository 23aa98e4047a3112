"""Who is slow, from own times alone; why, `attribution` says.

Detector: ratio m_r / med >= 1.08 and (m_r - med) / max(1.4826 MAD, 1 % of med) >= 3.5, where med
and MAD are those of the same-role peers without r, in two consecutive windows. Leaving r out keeps
it working for three ranks and for several stragglers, where a z-score over all is capped below its
threshold; the floor keeps a MAD near zero from inflating it. The MAD of a few peers is often small
by chance, so the excess must also stand out of the noise by which a rank's figure changes from
window to window (`past`). docs/detection.md has all of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

RATIO, SCORE = 1.08, 3.5
RATIO_LONG = 1.04  # where it has lasted for LONG windows
RATIO_CLEAR = 1.04
FLOOR = 0.01  # of the median
LIMIT = 5.3  # standard deviations of the noise; 3.75 in each of two independent windows
MIN_SAMPLES, MIN_SAMPLES_MEAN = 10, 20
MIN_GAIN = 0.02  # of the time: less than this is not worth naming anyone for
NAME_AFTER, CLEAR_AFTER = 2, 2  # consecutive windows
EXACT_RANKS = 16


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


def _peers(m: F64) -> I64:
    valid = ~np.isnan(m)
    number: I64 = valid.sum(axis=1, keepdims=True) - valid
    return number


def center(m: F64) -> tuple[F64, I64]:
    """[C, n] own times -> (median, number) of each rank's peers."""
    return loo_median(m), _peers(m)


def spread(m: F64) -> tuple[F64, I64]:
    """[C, n] own times -> (MAD, number) of each rank's peers.

    Above EXACT_RANKS the deviations are taken from the median of all, which differs from that of
    the peers by at most one place in the order.
    """
    peers = _peers(m)
    if m.shape[1] > EXACT_RANKS:
        return loo_median(np.abs(m - middle(m)[:, None])), peers
    deviation = np.abs(m[:, None, :] - loo_median(m)[:, :, None])  # [C, rank, peer]
    diagonal = np.arange(m.shape[1])
    deviation[:, diagonal, diagonal] = np.nan
    ordered = np.sort(deviation, axis=2)
    some = np.maximum(peers, 1)
    low = np.take_along_axis(ordered, ((some - 1) // 2)[..., None], axis=2)[..., 0]
    high = np.take_along_axis(ordered, (some // 2)[..., None], axis=2)[..., 0]
    mad = (low + high) / 2
    mad[peers < 1] = np.nan
    return mad, peers


def middle(x: npt.NDArray[np.floating]) -> F64:
    """Median over the last axis, NaN ignored; NaN where all are."""
    ordered = np.sort(x, axis=-1)
    count = np.maximum(x.shape[-1] - np.isnan(ordered).sum(axis=-1), 1)[..., None]
    low = np.take_along_axis(ordered, (count - 1) // 2, axis=-1).astype(np.float64)
    high = np.take_along_axis(ordered, count // 2, axis=-1).astype(np.float64)
    value: F64 = ((low + high) / 2)[..., 0]
    return value


def limit(freedom: F64, at: float = LIMIT) -> F64:
    """The threshold for a score whose noise is known from so few values, as Student's t is wider
    than the normal distribution (Wallace's approximation). Infinite for none.
    """
    few = np.maximum(freedom, 0.5)
    wide = at * (8 * few + 3) / (8 * few + 1)
    with np.errstate(over="ignore"):
        found: F64 = np.sqrt(few * np.expm1(np.minimum(wide**2 / few, 100.0)))
    found[freedom <= 0] = np.inf
    return found


def shrink(shared: F64, windows: int) -> F64:
    """Standard deviation of the mean of so many windows over that of one, neighbours having a
    correlation of `shared`, those further apart its powers.
    """
    total = np.ones_like(shared)
    for lag in range(1, windows):
        total += 2 * (1 - lag / windows) * shared**lag
    found: F64 = np.sqrt(total / windows)
    return found


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
