"""Who is slow, when, and in which way: the ground truth of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.bench.detect.cases import PATH_KINDS, Case

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

BEFORE, DURING, BETWEEN, AFTER = 45.0, 40.0, 30.0, 25.0  # seconds
RAMP = 0.4  # of a drift's time, until it is at its full slowdown
INTERMITTENT = 0.2  # share of the steps that are slow, so much more that the mean is as told
SEVERAL = 8  # one rank in so many, two at least

CLASS = {
    "slow_compute": "slow_compute", "intermittent": "slow_compute", "drift": "slow_compute",
    "several": "slow_compute", "slow_host": "slow_host", "hot_expert": "hot_expert",
    "throttled": "throttled", "hang": "hang", "slow_sender": "slow_sender",
    "slow_receiver": "slow_receiver", "slow_path": "slow_path",
}  # fmt: skip


@dataclass(frozen=True)
class Episode:
    """Steps [first, last) in which `ranks` are slow; at their full slowdown from `full` on.
    also: who sends on a slow path, and may be named with its receiver, or not.
    """

    ranks: tuple[int, ...]
    first: int
    full: int
    last: int
    klass: str
    also: tuple[int, ...] = ()


@dataclass
class Faults:
    """Own time is multiplied by `factor` and then prolonged by `host`, which the GPU has no part
    in. `late`: how much later than the others a rank leaves a step's last operation; `longer`: how
    much longer that takes for all. Times are shares of a step's own time.
    """

    episodes: list[Episode]
    factor: F64  # [step, part, rank]
    host: F64  # [step, part, rank]
    late: F64  # [step, rank]
    longer: F64  # [step]
    steps: int
    hang: int = -1  # step that never ends
    busy: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # every rank with a fault


def plan(
    rng: np.random.Generator, case: Case, parts: int, step_seconds: float, steps: int = 0
) -> Faults:
    """step_seconds: of a step without a fault. steps: of a run without any, 0: as of one with."""
    slow = step_seconds * (1 + 0.9 * (case.slowdown - 1))
    before, between, after = (int(t / step_seconds) for t in (BEFORE, BETWEEN, AFTER))
    # The start falls anywhere in a window, as do all later ones.
    before += int(rng.integers(0, max(1, int(5.0 / step_seconds))))
    during = int(DURING / slow)
    if case.kind == "none":
        steps = steps or before + 2 * during + between + after
        return _empty([], steps, parts, case.size)
    if case.kind == "hang":
        faults = _empty([], before + 1, parts, case.size)
        culprit = int(rng.integers(case.size))
        faults.episodes = [Episode((culprit,), before, before, before + 1, "hang")]
        faults.hang, faults.busy = before, np.array([culprit])
        return faults
    episodes = []
    start = before
    left = rng.permutation(case.size)
    for _ in range(2):
        count = _count(case)
        chosen, left = left[:count], left[count:]
        ramp = int(RAMP * during) if case.kind == "drift" else 0
        ranks = tuple(sorted(chosen.tolist()))
        ranks, also = (ranks[:1], ranks[1:]) if case.kind == "slow_path" else (ranks, ())
        end = start + during
        episodes.append(Episode(ranks, start, start + ramp, end, CLASS[case.kind], also))
        start += during + between
    faults = _empty(episodes, start - between + after, parts, case.size)
    for episode in episodes:
        _apply(rng, case, faults, episode)
    return faults


def _empty(episodes: list[Episode], steps: int, parts: int, ranks: int) -> Faults:
    return Faults(
        episodes=episodes,
        factor=np.ones((steps, parts, ranks)),
        host=np.zeros((steps, parts, ranks)),
        late=np.zeros((steps, ranks)),
        longer=np.zeros(steps),
        steps=steps,
        busy=np.array(sorted({r for e in episodes for r in e.ranks + e.also}), dtype=np.int64),
    )


def _count(case: Case) -> int:
    if case.kind == "several":
        # Two of four would leave the peers of each with one that is slow and two that are not.
        return 2 if case.size < 16 else case.size // SEVERAL
    return 2 if case.kind == "slow_path" else 1


def _apply(rng: np.random.Generator, case: Case, faults: Faults, e: Episode) -> None:
    """Write one episode into the arrays."""
    more = case.slowdown - 1
    steps, ranks = slice(e.first, e.last), list(e.ranks + e.also)
    length = e.last - e.first
    if case.kind == "slow_host":
        faults.host[steps, :, ranks] = more
    elif case.kind == "hot_expert":
        # The expert half alone: so much more that the rank's whole own time is as told.
        faults.factor[steps, 1, ranks] += 2 * more
    elif case.kind == "intermittent":
        slow = rng.random((length, 1, len(ranks))) < INTERMITTENT
        faults.factor[steps, :, ranks] += slow * more / INTERMITTENT
    elif case.kind == "drift":
        ramp = np.minimum(np.arange(length) / max(1, e.full - e.first), 1.0)
        faults.factor[steps, :, ranks] += more * ramp[:, None, None]
    elif case.kind == "slow_path":
        faults.late[steps, ranks] = more
    elif case.kind in PATH_KINDS:
        faults.longer[steps] = more  # whoever sends or receives, all end together
    else:
        faults.factor[steps, :, ranks] += more
