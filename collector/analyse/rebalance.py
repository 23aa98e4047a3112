"""Would another expert placement have helped, and would it help next time?

A plan is judged on load it was not made from: for every window but the first, the plan that the
windows before it gave is scored on that window. What is promised is what these trials gave, and
where they do not show a gain that is clear of their own spread, the answer is to do nothing.

Time of an expert layer goes with its busiest GPU, so the gain of a placement is the share by which
the sum over layers of the busiest GPU's load falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe, placement
from lanterne.collector.analyse.placement import Placement

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

Maker = Callable[[F64], Placement]  # a load -> the plan of one kind for it

MIN_GAIN = 0.02  # below, moving weights is not worth its risk
TRIALS = 8  # newest windows that are scored
MEMORY = 0.7  # weight of a window in the next plan, per window of age
MIN_TRIALS = 3
WORST = -0.01  # the next window may not be worse than doing nothing by more
# Student's t, one-sided 0.5 %, for trials - 1 = 1, 2, ... degrees of freedom: so sure must be that
# the next window is no worse than WORST, given how the trials scattered.
T_995 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499)


@dataclass(frozen=True)
class Option:
    """One way to go on. Shares are of the time of the busiest GPU, summed over layers.

    name: "nothing", "placement" (same memory), "hot_set" or "replication".
    gain: mean over the trials, each on a window after the one planned from; 0 for "nothing".
    at_least: what the next window may give if it scatters as the trials did; -inf for too few.
    worst: the least of the trials. trials: how many there were.
    planned_gain: what the plan promises on the load it was made from: always the rosier figure.
    added_slots: replicas of a layer beyond what is there now, over all GPUs.
    moved: expert copies to send, over all layers.
    """

    name: str
    gain: float
    at_least: float
    worst: float
    trials: int
    planned_gain: float
    added_slots: int
    moved: int
    plan: Placement | None

    def cost_bytes(self, expert_bytes: float) -> tuple[float, float]:
        """(memory added over all GPUs, bytes to send). expert_bytes: weights of one expert of one
        layer; NaN where not known, and then so are both.
        """
        layers = 0 if self.plan is None else len(self.plan.phy2log)
        return self.added_slots * layers * expert_bytes, self.moved * expert_bytes


NOTHING = Option("nothing", 0.0, 0.0, 0.0, 0, 0.0, 0, 0, None)


@dataclass(frozen=True)
class Verdict:
    """What to do (`best`, perhaps NOTHING), and what else was weighed, the best first."""

    best: Option
    options: tuple[Option, ...]
    reason: str


def busiest(where: Placement, load: F64) -> float:
    """Sum over layers of the busiest GPU's load. load: [layers, experts]."""
    return float(placement.gpu_load(where, load).max(axis=1).sum())


def gain(old: Placement, new: Placement, load: F64) -> float:
    """Share of the busiest GPUs' time that `new` saves on this load; NaN without load."""
    before = busiest(old, load)
    return 1 - busiest(new, load) / before if before > 0 else math.nan


def weigh(
    history: npt.ArrayLike,
    current: Placement,
    *,
    groups: int = 1,
    nodes: int = 1,
    spare_slots: int = 0,
    min_gain: float = MIN_GAIN,
) -> Verdict:
    """Weigh the placements that the load so far suggests.

    history: [windows, layers, experts] assignments, oldest first; a window of zeros was idle.
    current: the placement in force. spare_slots: replicas of a layer that may be added over all
    GPUs; 0: only what needs no memory is weighed.

    Raises ValueError where the shapes do not fit.
    """
    load = np.asarray(history, dtype=np.float64)
    if load.ndim != 3 or load.shape[1:] != current.logcnt.shape:
        raise ValueError(
            f"history {load.shape} must be [windows, layers, experts] of the current placement, "
            f"{current.logcnt.shape}"
        )
    load = moe.checked(load)
    load = load[load.sum(axis=(1, 2)) > 0]
    if len(load) <= MIN_TRIALS:
        return Verdict(
            NOTHING,
            (NOTHING,),
            f"only {len(load)} of more than {MIN_TRIALS} windows with load so far",
        )
    options = [
        _try(name, make, load, current)
        for name, make in _makers(current, groups, nodes, spare_slots).items()
    ]
    options.sort(key=lambda o: -o.gain)
    safe = [o for o in options if _safe(o, min_gain)]
    if not safe:
        best = options[0]
        if best.gain < min_gain:
            why = f"the best plan gained {best.gain:.1%} on the windows after it"
        else:
            why = f"a gain of {best.gain:.1%} on average is not steady: {best.worst:.1%} at worst"
        return Verdict(NOTHING, (*options, NOTHING), why)
    # Less memory and fewer moves for nearly the same gain are the better bargain.
    good = [o for o in safe if o.gain >= safe[0].gain - min_gain]
    chosen = min(good, key=lambda o: (o.added_slots, o.moved))
    return Verdict(chosen, (*options, NOTHING), f"steady over {chosen.trials} trials")


def _makers(current: Placement, groups: int, nodes: int, spare_slots: int) -> dict[str, Maker]:
    slots, gpus = current.phy2log.shape[1], current.gpus
    spare = spare_slots // gpus * gpus  # every GPU holds equally many

    def placed(slots: int) -> Maker:
        return lambda load: placement.place(load, slots, groups=groups, nodes=nodes, gpus=gpus)

    found: dict[str, Maker] = {"placement": placed(slots)}
    if spare:
        found["hot_set"] = lambda load: replicate_hot(current, load, slots + spare)
        found["replication"] = placed(slots + spare)
    return found


def replicate_hot(current: Placement, load: F64, slots: int) -> Placement:
    """Leave every expert where it is and fill the added slots with copies of hot ones.

    A copy goes to the GPU that carries least, of those with room and without that expert. Moves
    nothing but the copies. load: [layers, experts]; slots: of a layer, a multiple of the GPUs.
    """
    layers, old = current.phy2log.shape
    experts, gpus = current.logcnt.shape[1], current.gpus
    used, per_gpu = old // gpus, slots // gpus
    table = np.full((layers, gpus, per_gpu), -1, np.int64)
    table[:, :, :used] = current.phy2log.reshape(layers, gpus, -1)
    resident = np.zeros((layers, gpus, experts), bool)
    np.put_along_axis(resident, table[:, :, :used], True, axis=2)
    count = current.logcnt.copy()
    total = placement.gpu_load(current, load)
    filled = np.full((layers, gpus), used)
    row = np.arange(layers)
    for _ in range(gpus * (per_gpu - used)):
        room = filled < per_gpu
        # The hottest per replica, of those that some GPU with room lacks.
        lacked = (room[:, :, None] & ~resident).any(axis=1)
        expert = np.where(lacked, load / count, -1.0).argmax(axis=1)
        has = resident[row, :, expert]
        takes = room & ~has
        # Every GPU with room has every expert: a second copy does no harm.
        takes[~takes.any(axis=1)] = room[~takes.any(axis=1)]
        hot, copies = load[row, expert], count[row, expert]
        total -= has * (hot / copies - hot / (copies + 1))[:, None]
        gpu = np.where(takes, total, np.inf).argmin(axis=1)
        table[row, gpu, filled[row, gpu]] = expert
        total[row, gpu] += hot / (copies + 1)
        filled[row, gpu] += 1
        resident[row, gpu, expert] = True
        count[row, expert] += 1
    return placement.from_slots(table.reshape(layers, slots), experts, gpus)


def _plan_load(load: F64) -> F64:
    """Windows before a plan -> the load it is made for: the newer the weightier."""
    age = np.arange(len(load))[::-1]
    # Each window counts by its shape, not by how busy it was: a burst must not own the plan.
    shape = load / load.sum(axis=(1, 2), keepdims=True)
    planned: F64 = np.tensordot(MEMORY**age, shape, axes=1)
    return planned


def _try(name: str, make: Maker, load: F64, current: Placement) -> Option:
    gains = _trials(make, load, current)
    plan = make(_plan_load(load))
    return Option(
        name=name,
        gain=float(gains.mean()),
        at_least=_lower_bound(gains),
        worst=float(gains.min()),
        trials=len(gains),
        planned_gain=gain(current, plan, load[-1]),
        added_slots=plan.phy2log.shape[1] - current.phy2log.shape[1],
        moved=placement.moved(current, plan),
        plan=plan,
    )


def _trials(make: Maker, load: F64, current: Placement) -> F64:
    """Gain on each of the newest windows of the plan that the windows before it gave."""
    first = max(1, len(load) - TRIALS)
    return np.array(
        [gain(current, make(_plan_load(load[:t])), load[t]) for t in range(first, len(load))]
    )


def _lower_bound(gains: F64) -> float:
    """Bound of a prediction interval: of one more trial, not of the mean of many."""
    n = len(gains)
    if n < MIN_TRIALS:
        return -math.inf
    return float(gains.mean() - T_995[n - 2] * gains.std(ddof=1) * math.sqrt(1 + 1 / n))


def _safe(option: Option, min_gain: float) -> bool:
    return option.gain >= min_gain and option.at_least >= WORST
