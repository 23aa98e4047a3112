"""Advice that follows from a few figures: routing bias, batch size, dropped tokens, shared experts.

Each function takes plain arrays and answers with the figures that a piece of advice rests on, or
with None where there is nothing to advise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe

F64 = npt.NDArray[np.float64]

GAMMA = 0.001  # step of the routing bias
CHANCE = 2.0  # standard deviations of a count that are no reason to move a bias
STILL_RISING = 0.05  # tokens/s that a doubling of the batch must add to be worth it


def bias_steps(counts: npt.ArrayLike, *, gamma: float = GAMMA, band: float = 0.05) -> F64:
    """Steps for the routing bias of every expert: gamma sign(mean - count), or 0 in the dead-band.

    counts: [layers, experts] assignments of a training step or window. The dead-band is the larger
    of `band` of the mean and what chance gives (CHANCE square roots of the mean): inside it a step
    would only chase noise. The bias is for selecting experts only, with a sigmoid affinity; the
    gate's weights stay without it. At inference it changes what the model answers.

    -> float64[layers, experts]. Raises ValueError for counts that are no counts.
    """
    load = moe.checked_layers(counts, "counts")
    mean = load.mean(axis=1, keepdims=True)
    quiet = np.maximum(band * mean, CHANCE * np.sqrt(mean))
    away = mean - load
    steps: F64 = np.where(np.abs(away) > quiet, gamma * np.sign(away), 0.0)
    return steps


@dataclass(frozen=True)
class BatchLimit:
    """Where larger batches stop paying. Batch sizes in the unit given; None: not seen.

    communication_above: the smallest batch from which on communication takes longer than compute
    at every larger one seen. always: it does so at every batch seen, so the batch is not the cause.
    saturated_above: the smallest batch from which on a doubling adds less than STILL_RISING of
    tokens/s. best: the batch with the most tokens/s.
    """

    communication_above: float | None
    always: bool
    saturated_above: float | None
    best: float | None


def batch_limit(
    batch: npt.ArrayLike,
    compute: npt.ArrayLike,
    communication: npt.ArrayLike,
    tokens_per_second: npt.ArrayLike | None = None,
) -> BatchLimit:
    """Find both limits in measurements of any order; several of one batch count by their median.

    All arrays are of one length. compute, communication: seconds of an expert layer, or of a step;
    points that are not finite or have no compute are left out. A ratio that is above 1 at the
    smallest batch, below in the middle and above again at the end crosses where it last rises
    above.
    """
    b, comp, comm = (
        np.asarray(x, dtype=np.float64).ravel() for x in (batch, compute, communication)
    )
    rate = np.full(len(b), np.nan)
    if tokens_per_second is not None:
        rate = np.asarray(tokens_per_second, dtype=np.float64).ravel()
    if not len(b) == len(comp) == len(comm) == len(rate):
        raise ValueError("batch, compute, communication and tokens_per_second differ in length")
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(comp > 0, comm / comp, np.nan)
    size, over = _medians(b, ratio)
    above = over > 1
    crossing = None
    if len(size) and above[-1] and not above.all():
        crossing = float(size[np.flatnonzero(~above)[-1] + 1])
    rated, speed = _medians(b, rate)
    return BatchLimit(
        communication_above=crossing,
        always=bool(len(size) and above.all()),
        saturated_above=_saturation(rated, speed),
        best=float(rated[speed.argmax()]) if len(rated) else None,
    )


def _medians(batch: F64, value: F64) -> tuple[F64, F64]:
    fine = np.isfinite(batch) & np.isfinite(value) & (batch > 0)
    sizes = np.unique(batch[fine])
    return sizes, np.array([np.median(value[fine & (batch == s)]) for s in sizes])


def _saturation(batch: F64, rate: F64) -> float | None:
    if len(batch) < 3:
        return None
    doublings = np.diff(np.log2(batch))
    gained = (rate[1:] / rate[:-1]) ** (1 / doublings) - 1
    flat = gained < STILL_RISING
    if not flat[-1]:
        return None
    rising = np.flatnonzero(~flat)
    return float(batch[rising[-1] + 1] if len(rising) else batch[0])


@dataclass(frozen=True)
class Dropping:
    """Assignments that were really dropped, and the capacity factor that would drop none."""

    dropped_share: float
    capacity_factor_needed: float


def dropping(counts: npt.ArrayLike, dropped: float) -> Dropping | None:
    """None where nothing was dropped. Overflow against a capacity is no drop: pass real drops.

    counts: [layers, experts] assignments wanted. dropped: of them, over all layers.
    """
    load = moe.checked_layers(counts, "counts")
    if not dropped > 0 or load.sum() <= 0:
        return None
    busy = load[load.sum(axis=1) > 0]
    needed = float((busy.max(axis=1) / busy.mean(axis=1)).max())
    return Dropping(min(dropped / float(load.sum()), 1.0), needed)


@dataclass(frozen=True)
class SharedExpert:
    """A shared expert on a GPU that routed experts make the busiest, and where it were better."""

    layer: int
    gpu: int
    better_gpu: int
    gain: float  # share of the layer's busiest GPU


def shared_with_hot(
    routed: npt.ArrayLike,
    shared_gpu: npt.ArrayLike,
    shared_load: npt.ArrayLike,
    *,
    least: float = 0.02,
) -> list[SharedExpert]:
    """Layers whose shared expert makes the busiest GPU busier, the largest gain first.

    routed: [layers, gpus] load of routed experts. shared_gpu: int[layers], the GPU that holds the
    shared expert, -1 where every GPU does or nobody knows. shared_load: [layers], in the same unit.
    least: gain below which a move is not worth it.
    """
    load = np.asarray(routed, dtype=np.float64)
    where = np.asarray(shared_gpu, dtype=np.int64)
    extra = np.asarray(shared_load, dtype=np.float64)
    if load.ndim != 2 or where.shape != load.shape[:1] or extra.shape != load.shape[:1]:
        raise ValueError("routed must be [layers, gpus], shared_gpu and shared_load [layers]")
    if (where >= load.shape[1]).any():
        raise ValueError(f"shared_gpu names a GPU beyond {load.shape[1] - 1}")
    layers = np.flatnonzero((where >= 0) & np.isfinite(extra) & (extra > 0))
    now = load[layers].copy()
    now[np.arange(len(layers)), where[layers]] += extra[layers]
    better = load[layers].argmin(axis=1)
    then = load[layers].copy()
    then[np.arange(len(layers)), better] += extra[layers]
    gain = 1 - then.max(axis=1) / now.max(axis=1) if len(layers) else np.zeros(0)
    found = [
        SharedExpert(int(layer), int(where[layer]), int(better[i]), float(gain[i]))
        for i, layer in enumerate(layers)
        if gain[i] >= least and not math.isnan(gain[i])
    ]
    return sorted(found, key=lambda s: -s.gain)
