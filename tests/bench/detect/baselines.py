"""What others do with the same windows, each implemented from its published description.

Every rule gets what our detector has of a window: own times and waits of the communicator of all
ranks, of the operations that were delivered. It gets them from the simulation, without the error of
the clocks. None of the originals asks for two windows; each also runs so (`_twice`), which can only
help its precision. A rule returns [window, rank] whether it names a rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.bench.detect.feed import WINDOW_SECONDS, window_ends
from tests.bench.detect.job import Job

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

NORMAL = 1.4826  # MAD to standard deviation
HISTORY, HISTORY_LEAST = 20, 5  # windows


@dataclass(frozen=True)
class Windows:
    """[window, rank] median and mean own time before an operation and mean wait in it, ns; and
    [window, waiting rank, late rank] mean wait of one for the other. NaN unknown.
    """

    median: F64
    mean: F64
    wait: F64
    matrix: F64


def windows(job: Job) -> Windows:
    """What happened in each window of the engine."""
    ends = window_ends(job.seconds)
    stages = [s for s in job.stages if s.group == 0]
    shape = (len(ends), job.ranks)
    median, mean, wait = np.full((3, len(stages), *shape), np.nan)
    matrix = np.zeros((len(ends), job.ranks, job.ranks))
    for number, stage in enumerate(stages):
        own = np.where(stage.sees, stage.own, np.nan)
        arrival = np.where(stage.sees, stage.arrival, -np.inf)
        late = arrival.max(axis=1, keepdims=True)
        waits = np.where(stage.sees, late - stage.arrival, np.nan)
        waits[np.isinf(waits)] = np.nan  # an operation of which nothing was seen
        last = arrival.argmax(axis=1)
        when = stage.end.min(axis=1) / 1e9
        for w, end in enumerate(ends.tolist()):
            rows = np.flatnonzero((when < end) & (when >= end - WINDOW_SECONDS))
            if len(rows) < 3:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a rank without a single event
                median[number, w] = np.nanmedian(own[rows], axis=0)
                mean[number, w] = np.nanmean(own[rows], axis=0)
                wait[number, w] = np.nanmean(waits[rows], axis=0)
            charged = np.zeros((len(rows), job.ranks))
            charged[np.arange(len(rows)), last[rows]] = 1
            matrix[w] += np.nan_to_num(waits[rows]).T @ charged / len(rows)
    return Windows(median.mean(axis=0), mean.mean(axis=0), wait.mean(axis=0), matrix)


def nvrx_relative(w: Windows) -> Bool:
    """nvidia-resiliency-ext, relative score: the fastest rank's median time over a rank's own,
    a straggler below 0.75.
    """
    fastest = _least(w.median)
    return fastest / w.median < 0.75


def nvrx_individual(w: Windows) -> Bool:
    """nvidia-resiliency-ext, individual score: a rank's best median so far over its present one,
    a straggler below 0.75.
    """
    best = np.fmin.accumulate(w.median, axis=0)
    return best / w.median < 0.75


def z_score(w: Windows) -> Bool:
    """Mean own time more than three standard deviations above the mean of all ranks."""
    center, spread = _moments(w.mean)
    return (w.mean - center) / spread > 3


def mad_z(w: Windows) -> Bool:
    """Modified z-score of the mean own time, 0.6745 (x - median) / MAD over all ranks, over 3.5."""
    center, mad = _robust(w.mean)
    return 0.6745 * (w.mean - center) / mad > 3.5


def short_wait(w: Windows) -> Bool:
    """Wait below median - 2 * 1.4826 * MAD of all ranks' waits: the late rank waits least."""
    center, mad = _robust(w.wait)
    return w.wait < center - 2 * NORMAL * mad


def deepxtrace(w: Windows) -> Bool:
    """Column of the wait matrix (who is waited for) at least three times the mean column."""
    found = [columns(m) for m in w.matrix]
    return np.array(found).reshape(w.median.shape)


def own_history(w: Windows) -> Bool:
    """Control chart: mean own time over three standard deviations above the mean of the rank's own
    last 20 windows that were not above it themselves, at least 5 of them.
    """
    found = np.zeros(w.mean.shape, bool)
    for rank in range(w.mean.shape[1]):
        past: list[float] = []
        for at, value in enumerate(w.mean[:, rank].tolist()):
            if np.isnan(value):
                continue
            recent = past[-HISTORY:]
            if len(recent) >= HISTORY_LEAST:
                found[at, rank] = value > np.mean(recent) + 3 * np.std(recent, ddof=1)
            if not found[at, rank]:
                past.append(value)
    return found


RULES: dict[str, Callable[[Windows], Bool]] = {
    "nvrx_relative": nvrx_relative,
    "nvrx_individual": nvrx_individual,
    "z_score": z_score,
    "mad_z": mad_z,
    "short_wait": short_wait,
    "deepxtrace": deepxtrace,
    "own_history": own_history,
}
NAMES = tuple(name + suffix for name in RULES for suffix in ("", "_twice"))


def columns(matrix: F64, threshold: float = 3.0) -> Bool:
    """[late rank] DeepXTrace: a column's mean over the mean of all columns' means."""
    means = matrix.mean(axis=0)
    whole = means.mean()
    return means >= threshold * whole if whole > 0 else np.zeros(len(means), bool)


def diagnose(wait: F64) -> tuple[set[int], set[int], set[tuple[int, int]]]:
    """DeepXTrace on a wait matrix [receiver, sender] -> slow senders, slow receivers, slow paths.

    Columns and rows at 3 times the mean of their kind, single cells at 5 times the mean of all,
    those of a column or row that is named already left out.
    """
    senders = set(np.flatnonzero(columns(wait)).tolist())
    receivers = set(np.flatnonzero(columns(wait.T)).tolist())
    cells = np.argwhere(wait >= 5 * wait.mean())
    paths = {(int(i), int(j)) for i, j in cells if i not in receivers and j not in senders}
    return senders, receivers, paths


def by_second(job: Job) -> dict[str, Bool]:
    """[second, rank] who each rule names: from a window's end until the next one's."""
    seen = windows(job)
    ends = window_ends(job.seconds)
    window_of = np.searchsorted(ends, np.arange(1, job.seconds + 1), side="right") - 1
    found = {}
    for name, rule in RULES.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            once = rule(seen)
        twice = once.copy()
        twice[1:] &= once[:-1]
        twice[:1] = False
        for label, said in ((name, once), (f"{name}_twice", twice)):
            found[label] = said[np.maximum(window_of, 0)] & (window_of >= 0)[:, None]
    return found


def _least(x: F64) -> F64:
    """[window, 1] of all ranks, NaN ignored."""
    least: F64 = np.fmin.reduce(x, axis=1)[:, None]
    return least


def _moments(x: F64) -> tuple[F64, F64]:
    count = np.maximum((~np.isnan(x)).sum(axis=1, keepdims=True), 1)
    center = np.nansum(x, axis=1, keepdims=True) / count
    return center, np.sqrt(np.nansum((x - center) ** 2, axis=1, keepdims=True) / count)


def _robust(x: F64) -> tuple[F64, F64]:
    """-> median and MAD of all ranks, [window, 1]; NaN where all are."""

    def middle(values: F64) -> F64:
        ordered = np.sort(values, axis=1)  # NaN last
        count = np.maximum((~np.isnan(values)).sum(axis=1, keepdims=True), 1)
        low = np.take_along_axis(ordered, (count - 1) // 2, axis=1)
        return (low + np.take_along_axis(ordered, count // 2, axis=1)) / 2

    center = middle(x)
    return center, middle(np.abs(x - center))
