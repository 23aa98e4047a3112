"""The repeating period of a sequence of operations: what a step of a program is. Pure numpy.

The shortest period would be a layer: dispatch, combine, dispatch, combine. What tells a step is the
operation that comes once in it (the logits gathered, the next tokens broadcast), and such an
operation weighs nothing in a plain count of agreements. So agreement is counted for each kind of
operation by itself, and averaged over the kinds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

LEAST = 4  # times that a kind must occur to be regular
AGREE = 0.8  # mean over kinds of the share that recurs one period later
MOST_KINDS = 32
HOPS = 8  # a kind may occur so often in one period and still anchor it
MODES = 3
PLAIN = 128  # longest period that is tried where no kind anchors it


def find_period(symbols: npt.ArrayLike) -> int:
    """Operations in a step, 0 where nothing repeats.

    symbols: [n] a whole number for each kind of operation, in order. Steps may differ now and then
    (a prefill among decodes); kinds that come without any rule are left out of account.
    """
    sequence = np.asarray(symbols)
    if sequence.ndim != 1:
        raise ValueError(f"symbols have shape {sequence.shape}; it must be [n]")
    kinds, code, count = np.unique(sequence, return_inverse=True, return_counts=True)
    if len(sequence) < 2 * LEAST or len(kinds) > MOST_KINDS:
        return 0
    for anchor in np.argsort(count, kind="stable").tolist():  # the rarest first
        if count[anchor] < LEAST:
            continue
        heavy = np.flatnonzero(count >= count[anchor])
        for period in _candidates(np.flatnonzero(code == anchor)):
            if period * LEAST <= len(code) and _agreement(code, heavy, period) >= AGREE:
                return period
    # Every kind comes many times in a step: nothing anchors it.
    heavy = np.flatnonzero(count >= LEAST)
    for period in range(1, min(PLAIN, len(code) // LEAST) + 1):
        if len(heavy) and _agreement(code, heavy, period) >= AGREE:
            return period
    return 0


def _candidates(places: I64) -> list[int]:
    """Distances from one occurrence to a later one that come most often, shortest first."""
    found: set[int] = set()
    for hop in range(1, min(HOPS, len(places) - 1) + 1):
        distance, count = np.unique(places[hop:] - places[:-hop], return_counts=True)
        found.update(distance[np.argsort(-count, kind="stable")[:MODES]].tolist())
    return sorted(found)


def _agreement(code: I64, kinds: I64, period: int) -> float:
    now, later = code[:-period], code[period:]
    same = np.bincount(now[now == later], minlength=int(kinds.max()) + 1)[kinds]
    all_of = np.bincount(now, minlength=int(kinds.max()) + 1)[kinds]
    some = all_of > 0
    return float((same[some] / all_of[some]).mean()) if some.any() else 0.0


def starts(symbols: npt.ArrayLike, period: int, gap: npt.ArrayLike) -> I64:
    """Where steps begin: after the longest pause of a period.

    gap: [n] time before each operation, NaN unknown. The place is counted from the nearest kind of
    operation that comes once in a step, so that steps of another length do not shift those after
    them; where no kind does, it is counted by periods.
    """
    sequence, before = np.asarray(symbols), np.asarray(gap, np.float64)
    if period <= 0 or len(sequence) < period:
        return np.zeros(0, np.int64)
    _, code, count = np.unique(sequence, return_inverse=True, return_counts=True)
    once = np.flatnonzero(np.abs(count * period / len(code) - 1) <= 1 - AGREE)
    low = -((period - 1) // 2)
    offsets = np.arange(low, low + period)
    best: tuple[float, int] | None = None
    chosen = np.zeros(0, np.int64)
    for kind in once.tolist():
        anchors = np.flatnonzero(code == kind)
        pause = _pauses(before, anchors, offsets)
        at = int(pause.argmax())
        rank = (float(pause[at]), -abs(int(offsets[at])))
        if best is None or rank > best:
            best, chosen = rank, anchors + offsets[at]
    if best is None:
        pause = _pauses(before, np.arange(0, len(code), period), np.arange(period))
        chosen = np.arange(int(pause.argmax()), len(code), period)
    return chosen[(chosen >= 0) & (chosen < len(code))]


def _pauses(before: npt.NDArray[np.float64], anchors: I64, offsets: I64) -> npt.NDArray[np.float64]:
    """[offset] median time before the operation there; -inf where it is never known."""
    places = anchors[:, None] + offsets
    inside = (places >= 0) & (places < len(before))
    times = np.where(inside, before[np.clip(places, 0, len(before) - 1)], np.nan)
    found = np.full(len(offsets), -np.inf)
    known = ~np.isnan(times).all(axis=0)
    found[known] = np.nanmedian(times[:, known], axis=0)
    return found
