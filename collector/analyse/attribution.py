"""Why a rank is late: from where its time went, the host's and the GPU's readings, and its load.

Late means that its own time, between two operations, is above that of its peers. That time was
spent by the GPU (slow compute, a throttled clock, more tokens than the others: a hot expert), or
the GPU had nothing to do because the host came late with its launches. Which of both, the
synchronise calls tell: where a GPU is slow all ranks are blocked in them equally long, its own,
too; a host that is late is blocked by so much less. Where nothing tells, the class is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops
from lanterne.collector.snapshot import CLASSES

F64 = npt.NDArray[np.float64]

NONE, UNKNOWN, SLOW_COMPUTE, SLOW_HOST, HOT_EXPERT = map(
    CLASSES.index, ("none", "unknown", "slow_compute", "slow_host", "hot_expert")
)
THROTTLED = CLASSES.index("throttled")

MORE = 1.08  # load above the peers' by less is no reason
HALF = 0.5  # of the excess must be missing in synchronise calls, or be found on the CPU
LEAST_SYNCED = 0.05  # of the time: whose peers are blocked for less tells nothing by being blocked


@dataclass(frozen=True)
class Kind:
    """One kind of operation of a communicator in a window: what preceded it on each rank."""

    op: int
    role: int
    evidence: int
    instances: int
    own: F64  # [rank] median or mean own time before it, ns: in which the rank was found slow
    mean: F64  # [rank] mean own time before it, ns: what the host's times are held against
    blocked: F64  # [rank] mean time blocked in synchronise before it, wait taken off, ns
    size: F64  # [rank] mean bytes it sends


@dataclass(frozen=True)
class Witness:
    """What the readings of processes and GPUs say of a communicator's ranks; NaN unknown.

    Shares are of the window: blocked in synchronise calls, waiting for a CPU, and CPUs used.
    """

    synced: F64  # [rank]
    starved: F64
    cpu: F64
    span_ns: float = math.nan  # of the kinds' instances
    has_gpu: bool = True
    throttle: Sequence[str] = ()  # [rank] why its GPU's clock is low, "" where it is not
    load: F64 | None = None  # [rank] bytes that stand for the tokens of each rank


class Cause(NamedTuple):
    klass: int  # index into snapshot.CLASSES
    why: str = ""


@dataclass(frozen=True)
class _Late:
    """The kind of operation that the rank delays most, and by how much."""

    kind: Kind
    center: float  # peers' own time before it
    excess: float  # ns an instance, in the mean
    share: float  # of the time, over all kinds, in the mean; NaN unknown
    by_history: bool = False  # center is what the rank itself used to need


def classify(
    kinds: Sequence[Kind], rank: int, witness: Witness | None = None, risen: float = math.nan
) -> Cause:
    """Class of a slow rank, from the kind of operation that it delays most.

    risen: its own time over what it used to be, where that and not its peers says that it is slow.
    """
    late = _latest(kinds, rank, witness, risen)
    if late is None:
        return Cause(UNKNOWN, "its own time is not above its peers'")
    host = _host(late, kinds, rank, witness)
    if host is True:
        return Cause(SLOW_HOST, _host_reason(late, rank, witness))
    more = _more_tokens(late, kinds, rank, witness)
    if more:
        return Cause(HOT_EXPERT, more)
    if witness is not None and rank < len(witness.throttle) and witness.throttle[rank]:
        return Cause(THROTTLED, witness.throttle[rank])
    if host is None:
        return Cause(
            UNKNOWN, "nothing tells a late host from a slow GPU: no synchronise calls seen"
        )
    return Cause(SLOW_COMPUTE, "")


def _latest(
    kinds: Sequence[Kind], rank: int, witness: Witness | None, risen: float
) -> _Late | None:
    worst, most, total = None, 0.0, 0.0
    for kind in kinds:
        excess = float(kind.own[rank]) - _usual(kind.own, rank, risen)
        total += max(_lost(kind, rank, risen), 0.0) * kind.instances
        if excess * kind.instances > most:
            worst, most = kind, excess * kind.instances
    if worst is None:
        return None
    span = witness.span_ns if witness is not None else math.nan
    return _Late(
        kind=worst,
        center=_usual(worst.own, rank, risen),
        excess=_lost(worst, rank, risen),
        share=total / span if span > 0 else math.nan,
        by_history=risen > 1,
    )


def _usual(own: F64, rank: int, risen: float) -> float:
    """What the rank's own time should be: its peers', or what it used to be."""
    return float(own[rank]) / risen if risen > 1 else peers(own, rank)


def _lost(kind: Kind, rank: int, risen: float) -> float:
    """Time that an instance is late by, in the mean. The median of a rank that is slow every other
    time is one of its two times, whichever: it tells who is slow, but not how much time went where.
    """
    mean = float(kind.mean[rank]) - _usual(kind.mean, rank, risen)
    return mean if mean > 0 else float(kind.own[rank]) - _usual(kind.own, rank, risen)


def _host(late: _Late, kinds: Sequence[Kind], rank: int, witness: Witness | None) -> bool | None:
    """Whether the host came late; None: it cannot be told from a slow GPU."""
    kind = late.kind
    if kind.evidence != ops.DEVICE and bool((kind.blocked > 0).any()):
        # The lateness was spent waiting for the own GPU, or it was not.
        own, blocked = float(kind.mean[rank]), float(kind.blocked[rank])
        if late.by_history:  # its peers may do something else, but wait for their GPUs as much
            share = peers(kind.blocked / np.maximum(kind.mean, 1.0), rank)
            return share * own - blocked > HALF * share * late.excess
        return blocked - peers(kind.blocked, rank) < HALF * late.excess
    if kind.evidence == ops.BLOCKING:
        return _starved(late, rank, witness) or _off_cpu(late, rank, witness)
    told = None if kind.evidence == ops.ENQUEUE else _launches_late(late, rank, witness)
    return True if told is None and _starved(late, rank, witness) else told


def _starved(late: _Late, rank: int, witness: Witness | None) -> bool:
    """Whether its process waited for a CPU for most of the time that it is late by."""
    if witness is None or math.isnan(late.share):
        return False
    return float(witness.starved[rank]) - peers(witness.starved, rank) > HALF * late.share


def _launches_late(late: _Late, rank: int, witness: Witness | None) -> bool | None:
    """GPU times: was the GPU busy, or had it nothing to do? By the host's synchronise calls."""
    if witness is None or math.isnan(late.share):
        return None
    usual = peers(witness.synced, rank)
    least = max(LEAST_SYNCED, HALF * late.share)
    if not usual >= least or math.isnan(float(witness.synced[rank])):
        return None
    return usual - float(witness.synced[rank]) > HALF * late.share


def _off_cpu(late: _Late, rank: int, witness: Witness | None) -> bool:
    """Calls that block a host that computes itself: was it not on a CPU?"""
    if witness is None or witness.has_gpu or math.isnan(late.share):
        return False
    more = float(witness.cpu[rank]) - peers(witness.cpu, rank)
    return more < (1 - HALF) / 2 * late.share


def _host_reason(late: _Late, rank: int, witness: Witness | None) -> str:
    if witness is None or math.isnan(late.share):
        return "its host was not blocked in synchronise calls meanwhile"
    busy = float(witness.cpu[rank]) - peers(witness.cpu, rank)
    if _starved(late, rank, witness):
        return f"CPU starved: {100 * float(witness.starved[rank]):.0f} % of the time on a run queue"
    if busy > HALF * late.share:
        return "its host was busy on the CPU before launching (Python, GC, data loading)"
    return "its host launched late, and was not on the CPU (sleep, I/O, data loading)"


def _more_tokens(late: _Late, kinds: Sequence[Kind], rank: int, witness: Witness | None) -> str:
    """Late with the expert layer's work, and its tokens explain it: normal time per token."""
    kind = late.kind
    if kind.role == ops.COMBINE:
        usual, mine = peers(kind.size, rank), float(kind.size[rank])
        if not (usual > 0 and late.center > 0):
            return ""
        more, slower = mine / usual, float(kind.own[rank]) / late.center
        explained = more >= MORE and slower <= more * MORE
    else:
        # Only where the time before the combine is not known by itself, and so is within this.
        if kind.evidence != ops.ENQUEUE or witness is None or witness.load is None:
            return ""
        if any(k.role == ops.COMBINE for k in kinds):
            return ""
        usual, mine = peers(witness.load, rank), float(witness.load[rank])
        if not usual > 0:
            return ""
        more = mine / usual
        explained = more >= MORE and _by_load(kind.own, witness.load, rank)
    return f"{more:.2f} times its peers' tokens at the usual time per token" if explained else ""


def _by_load(own: F64, load: F64, rank: int) -> bool:
    """Does the line that the peers' own times follow over their load also hold for the rank?

    Slope by Theil and Sen: the median of those between all pairs of peers.
    """
    known = np.isfinite(own) & np.isfinite(load)
    known[rank] = False
    x, y = load[known], own[known]
    if len(x) < 3:
        return False
    i, j = np.triu_indices(len(x), 1)
    apart = x[i] != x[j]
    if not apart.any():
        return False
    slope = float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart]))
    middle = float(np.median(y - slope * x))
    explained = slope * (float(load[rank]) - float(np.median(x)))
    excess = float(own[rank]) - float(np.median(y))
    return middle > 0 and slope > 0 and excess <= explained / HALF


def peers(values: F64, rank: int) -> float:
    """Median of the other ranks; NaN where there are none."""
    others = np.delete(values, rank)
    others = others[~np.isnan(others)]
    return float(np.median(others)) if len(others) else math.nan
