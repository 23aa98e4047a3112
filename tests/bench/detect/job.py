"""A job's steps: own time, then a collective that nobody leaves before the last has come.

All of a run at once, in numpy: every step ends in an operation of all ranks, so that times within a
step are relative to its start, and the starts are a running sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.bench.detect import faults, noise
from tests.bench.detect.cases import PATH_KINDS, Case

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MS = 1e6
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL_V, P2P_GROUP = 2, 3, 4, 32, 34
DISPATCH, COMBINE = 1, 2
OWN_SHARE = 0.9  # of a step; the rest is transfer
GPU_SHARE = 0.9  # of own time that the host spends waiting for its GPU
ROLE_FACTOR = 1.5  # own time of the second role over that of the first
HANG_SECONDS = 90
BYTES = 1 << 20


@dataclass(frozen=True)
class Group:
    """A communicator. ranks: the job's numbers of its ranks, in its own order."""

    name: str
    ranks: I64


@dataclass(frozen=True)
class Stage:
    """One operation that each step has, in one group. Arrays are [step, rank of the group], ns."""

    group: int
    lane: int
    op: int
    role: int
    arrival: F64
    end: F64
    own: F64
    blocked: F64  # of the time before it, in synchronise calls
    size: F64
    sees: Bool  # whether the event reaches the collector


@dataclass(frozen=True)
class Job:
    groups: list[Group]  # the first is of all ranks
    stages: list[Stage]
    faults: faults.Faults
    step_end: F64  # [step] ns
    host_wait: F64  # [step, rank] ns a process waited for a CPU
    seconds: int
    absent: I64
    silent: Bool  # [second, rank]
    own_ns: float  # usual own time of a step
    transfer_ns: float  # usual of an operation
    roles: tuple[str, ...]  # configured role of each rank; "" where not

    @property
    def ranks(self) -> int:
        return len(self.groups[0].ranks)


def step_seconds(size: int) -> float:
    """Slower steps where there are many ranks: the same statistics for less work."""
    return 0.05 if size <= 16 else 0.1


def simulate(case: Case, *, period: float = 0.0, steps: int = 0) -> Job:
    """The run that `case` tells, from its seed alone. period: seconds of a step, 0: as usual at its
    size. steps: of a run without a fault, 0: as long as one with faults.
    """
    rng = np.random.default_rng(case.seed)
    setting = noise.SETTINGS[case.noise]
    moe = case.kind == "hot_expert" or case.kind in PATH_KINDS
    parts = 2 if moe or setting.roles else 1
    period = period or step_seconds(case.size)
    # A step takes as long as its slowest rank: some noise more than its own times say.
    mean = period * (1.2 if setting.roles else 1.1)
    plan = faults.plan(rng, case, parts, mean, steps)
    shape = (plan.steps, parts, case.size)
    own_ns = period * OWN_SHARE * 1e9 / parts
    base = own_ns * _usual(rng, setting, shape, mean)
    host = plan.host * base
    own = base * plan.factor + host
    groups, members = _groups(case.size, setting.roles)
    transfer = period * (1 - OWN_SHARE) * 1e9 / parts
    transfers = np.full((plan.steps, parts), transfer)
    transfers[:, -1] += plan.longer * own_ns * parts
    late = plan.late * own_ns * parts
    away = noise.absent(rng, setting, case.size, plan.busy)
    sees = rng.random(shape) >= setting.lost
    sees[:, :, away] = False
    arrival, end = _timeline(own, members, transfers, late)
    if plan.hang >= 0:
        _hang(case, plan, sees)
    seconds = int(end.max() / 1e9) + 2
    if plan.hang >= 0:
        seconds = int(end[-2].max() / 1e9) + HANG_SECONDS
    size = BYTES * np.ones(shape)
    if moe and parts == 2:
        size[:, 1] *= plan.factor[:, 1]
    columns = _Columns(arrival, end, own, GPU_SHARE * base * plan.factor, size, sees)
    stages = _stages(case, groups, members[:parts], columns)
    named = setting.roles and case.repeat % 2 == 0
    roles = ["prefill" if r < case.size // 2 else "decode" for r in range(case.size)]
    return Job(
        groups=groups,
        stages=stages,
        faults=plan,
        step_end=end[:, -1].max(axis=1),
        host_wait=host.sum(axis=1),
        seconds=seconds,
        absent=away,
        silent=noise.silent(rng, setting, case.size, seconds),
        own_ns=own_ns * parts,
        transfer_ns=transfer,
        roles=tuple(roles) if named else ("",) * case.size,
    )


def _usual(
    rng: np.random.Generator, setting: noise.Noise, shape: tuple[int, int, int], mean: float
) -> F64:
    """[step, part, rank] factors of own time without a fault."""
    steps, _, ranks = shape
    x = noise.factors(rng, setting, shape)
    x *= noise.load(rng, setting, steps, mean)[:, None, None]
    if setting.roles:
        x[:, :, ranks // 2 :] *= ROLE_FACTOR
    return x


@dataclass(frozen=True)
class _Columns:
    """[step, part, rank]"""

    arrival: F64
    end: F64
    own: F64
    gpu: F64  # own time of the GPU
    size: F64
    sees: Bool


def _stages(case: Case, groups: list[Group], members: list[list[int]], c: _Columns) -> list[Stage]:
    found = []
    for part, some in enumerate(members):
        blocked = _blocked_in_operation(c.arrival, c.end, part) + c.gpu[:, part]
        for group in some:
            ranks = groups[group].ranks
            lane, op, role = _operation(case, len(groups) > 1, part, group)
            found.append(
                Stage(
                    group=group,
                    lane=lane,
                    op=op,
                    role=role,
                    arrival=c.arrival[:, part, ranks],
                    end=c.end[:, part, ranks],
                    own=c.own[:, part, ranks],
                    blocked=blocked[:, ranks],
                    size=c.size[:, part, ranks],
                    sees=c.sees[:, part, ranks],
                )
            )
    return found


def _groups(size: int, roles: bool) -> tuple[list[Group], list[list[int]]]:
    """-> groups, and which of them each part of a step ends in."""
    everybody = np.arange(size)
    groups = [Group("world", everybody)]
    if not roles:
        return groups, [[0], [0]]
    groups += [Group("prefill", everybody[: size // 2]), Group("decode", everybody[size // 2 :])]
    return groups, [[1, 2], [0]]


def _operation(case: Case, roles: bool, part: int, group: int) -> tuple[int, int, int]:
    """-> lane, op, role."""
    if case.kind in PATH_KINDS:
        return 1, P2P_GROUP, (DISPATCH, COMBINE)[part]
    if case.kind == "hot_expert":
        return 0, ALL_TO_ALL_V, (DISPATCH, COMBINE)[part]
    return 0, (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)[group if roles else 0], 0


def _timeline(own: F64, members: list[list[int]], transfers: F64, late: F64) -> tuple[F64, F64]:
    """-> arrival and end [step, part, rank], ns from the run's start."""
    steps, parts, ranks = own.shape
    halves = {0: slice(None), 1: slice(0, ranks // 2), 2: slice(ranks // 2, ranks)}
    arrival, end = np.zeros((2, *own.shape))
    at = np.zeros((steps, ranks))
    at[1:] = late[:-1]
    for part in range(parts):
        arrival[:, part] = at + own[:, part]
        for group in members[part]:
            mine = halves[group]
            last = arrival[:, part, mine].max(axis=1) + transfers[:, part]
            end[:, part, mine] = last[:, None]
        at = end[:, part]
    taken = end[:, -1].max(axis=1)
    start = np.concatenate([[0.0], np.cumsum(taken)[:-1]])
    end[:, -1] += late
    return arrival + start[:, None, None], end + start[:, None, None]


def _hang(case: Case, plan: faults.Faults, sees: Bool) -> None:
    """In the last step one rank never comes. No call returns, so only that of enqueues is seen."""
    last = sees[plan.hang]
    if case.evidence != "blocking":
        last[-1, list(plan.episodes[0].ranks)] = False
    else:
        last[-1] = False


def _blocked_in_operation(arrival: F64, end: F64, part: int) -> F64:
    """[step, rank] how long the operation before took, its waiting included."""
    whole = end - arrival
    if part:
        return whole[:, part - 1]
    before = np.zeros_like(whole[:, 0])
    before[1:] = whole[:-1, -1]
    return before
