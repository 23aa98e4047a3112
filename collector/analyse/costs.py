"""What would come back: the time of an operation now, and with ranks at their peers' pace.

A collective ends when its last rank has come, so an instance costs the largest own time. With a
rank fixed it costs the largest of the others'; with every rank at its role's median each rank keeps
its ups and downs, scaled to that median: what all have in common, and chance, do not come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.straggler import gain, loo_median, middle

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def recoverable(own: F32, role: npt.ArrayLike | None = None, *, usual: F64 | None = None) -> float:
    """Mean time of an instance that comes back with every rank at its role's median.

    own: [rank, instance] own times, NaN unknown, in any unit. role: [rank], None: all the same.
    usual: [rank] their medians, where they are known already.
    """
    if own.ndim != 2 or len(own) < 2 or not own.shape[1]:
        return 0.0
    if usual is None:
        usual = middle(own)
    roles = np.zeros(len(own), np.int64) if role is None else np.asarray(role)
    factor = np.ones((1, len(own)))
    for one in np.unique(roles):
        # Of its role, so that the slow one of a pair is compared with the other.
        mine = roles == one
        factor[:, mine] = _pace(usual[None, mine])
    return float(_gained(own[:, None, :], factor.T)[0])


def recoverables(own: F32, usual: F64) -> F64:
    """[group] as `recoverable`, of many groups of ranks of one role.

    own: [rank, group, instance], NaN unknown; usual: [rank, group] medians.
    """
    if len(own) < 2:
        return np.zeros(own.shape[1])
    return _gained(own, _pace(usual.T).T)


def _pace(usual: F64) -> F64:
    """[group, rank] medians -> factor of each rank's own times at its peers' pace."""
    center = loo_median(usual)
    with np.errstate(invalid="ignore", divide="ignore"):
        slower = usual > center
        factor: F64 = np.where(slower, center / usual, 1.0)
    return factor


def _gained(own: F32, factor: F64) -> F64:
    """[rank, group, instance], [rank, group] -> [group] mean time that comes back."""
    now = np.fmax.reduce(own, axis=0)
    then = np.fmax.reduce(own * factor[:, :, None].astype(np.float32), axis=0)
    some = np.isfinite(now)
    count = np.maximum(some.sum(axis=-1), 1)
    mean: F64 = np.where(some, now - then, 0.0).sum(axis=-1, dtype=np.float64) / count
    return mean


def share(
    recoverable_ns: Sequence[float], instances: Sequence[int], rows: int, span_ns: float
) -> float:
    """Share of the time that comes back with every rank at its peers' pace, 0..1.

    recoverable_ns, instances: of each kind of operation what `recoverables` says, and how often it
    was seen; rows, span_ns: timed operations of all kinds, and the time they took.
    """
    total = sum(instances)
    if not total or span_ns <= 0:
        return 0.0
    each = sum(ns * count for ns, count in zip(recoverable_ns, instances, strict=True))
    return min(max(each * rows / total / span_ns, 0.0), 1.0)


def gains(
    owns: Sequence[F32], instances: Sequence[int], suspects: I64, rows: int, span_ns: float
) -> F64:
    """[suspect] share of the time that comes back with this rank fixed.

    owns: of each kind of operation [rank, sampled instance] own times in ns; the rest as `share`.
    """
    found = np.zeros(len(suspects))
    total = sum(instances)
    if not len(suspects) or not total or span_ns <= 0:
        return found
    for own, count in zip(owns, instances, strict=True):
        found += gain(own, suspects) * (count * rows / total / span_ns)
    return np.clip(found, 0.0, 1.0)
