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
    seen = np.isfinite(usual)
    if not seen.any():
        return 0.0
    roles = np.zeros(len(own), np.int64) if role is None else np.asarray(role)
    factor = np.ones(len(own))
    for one in np.unique(roles[seen]):
        mine = seen & (roles == one)
        # Of its peers, so that the slow one of a pair is compared with the other.
        center = loo_median(np.where(mine, usual, np.nan)[None, :])[0]
        with np.errstate(invalid="ignore"):
            slower = mine & (usual > center)
        factor[slower] = center[slower] / usual[slower]
    now = np.fmax.reduce(own, axis=0)
    then = np.fmax.reduce(own * factor[:, None].astype(np.float32), axis=0)
    some = np.isfinite(now)
    return float((now - then)[some].mean()) if some.any() else 0.0


def shares(
    owns: Sequence[F32],
    medians: Sequence[F64],
    instances: Sequence[int],
    suspects: I64,
    rows: int,
    span_ns: float,
) -> tuple[F64, float]:
    """-> [suspect] share of the time that comes back with this rank fixed, and with all ranks.

    owns, medians, instances: of each kind of operation [rank, sampled instance] own times in ns,
    [rank] their medians, and how often it was seen; rows, span_ns: timed operations of all kinds,
    and the time they took.
    """
    if not owns or span_ns <= 0:
        return np.zeros(len(suspects)), 0.0
    weight = np.array(instances, dtype=np.float64)
    weight *= rows / weight.sum() / span_ns
    each = np.zeros(len(suspects))
    if len(suspects):
        each = weight @ np.array([gain(own, suspects) for own in owns])
    every = float(
        weight @ np.array([recoverable(own, usual=m) for own, m in zip(owns, medians, strict=True)])
    )
    return np.clip(each, 0.0, 1.0), min(max(every, 0.0), 1.0)
