"""Where each rank of a communicator that stands still is, in words for whoever is woken by it.

Four things tell: whether the rank has come to the operation, what its GPU does with it (where a
profiler plugin tells), of a rank that has not come whether its host waits for its GPU in a
synchronise call, and whether its process may run at all. What none of them tells is not known, and
said so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.registry import Registry
from lanterne.collector.readings import process_of
from lanterne.collector.snapshot import HANG_STATES, HangState

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

CUDA_CALLS = ("syncs", "launches", "graph_launches")  # seen: synchronise calls would be, too
(GONE, NOT_ARRIVED, RUNNING, SYNCHRONISING, NOT_STARTED, STARTED, IN_CALL, ARRIVED, UNKNOWN,
 STOPPED, IN_EARLIER) = range(len(HANG_STATES))  # fmt: skip

# Of one rank, of several; {for}, {ago}: how long, where it is known.
_WORDS = {
    GONE: ("its process has ended", "their processes have ended"),
    NOT_ARRIVED: (
        "it has not come, and what its host does is not known",
        "they have not come, and what their hosts do is not known",
    ),
    RUNNING: (
        "it has not come, and its host is not waiting for its GPU: it does something else",
        "they have not come, and their hosts do not wait for their GPUs: they do something else",
    ),
    SYNCHRONISING: (
        "it has not come: its host has been waiting for its GPU in a synchronise call{for}",
        "they have not come: their hosts have waited for their GPUs in synchronise calls{for}",
    ),
    NOT_STARTED: (
        "it has come, but its GPU has not started the operation it was given{ago}",
        "they have come, but their GPUs have not started the operation they were given{ago}",
    ),
    STARTED: (
        "its GPU has been in the operation{for}",
        "their GPUs have been in the operation{for}",
    ),
    IN_CALL: ("it has come, and is in the call{for}", "they have come, and are in the call{for}"),
    ARRIVED: (
        "it has come; what its GPU does is not known",
        "they have come; what their GPUs do is not known",
    ),
    UNKNOWN: ("nothing is known of it now", "nothing is known of them now"),
    STOPPED: (
        "its process is stopped: a signal, a debugger or a frozen cgroup holds it",
        "their processes are stopped: signals, debuggers or frozen cgroups hold them",
    ),
    IN_EARLIER: (
        "it has been in the call of an earlier operation{for}, which has ended for others",
        "they have been in the call of an earlier operation{for}, which has ended for others",
    ),
}


@dataclass(frozen=True)
class Hosts:
    """[rank] what the readings of its process tell."""

    synchronising: F64  # seconds in a synchronise call; NaN: in none, or that is not known
    visible: Bool  # whether that would be seen
    stopped: Bool  # it may not run


@dataclass(frozen=True)
class Facts:
    """[rank] what the operations tell; since_ns on the collector's clock, 0 unknown."""

    known: Bool
    alive: Bool
    arrived: Bool
    in_call: Bool
    on_device: Bool  # its GPU was given the operation and has not left it
    started: Bool  # and has started it
    since_ns: I64  # the call began, the GPU was given it, or has started it


def states(facts: Facts, host: Hosts, now_ns: int) -> tuple[HangState, ...]:
    """The ranks by state."""
    state = np.where(facts.arrived, ARRIVED, NOT_ARRIVED)
    seconds = np.where(facts.since_ns > 0, (now_ns - facts.since_ns) / 1e9, np.nan)
    late = state == NOT_ARRIVED
    waits = late & np.isfinite(host.synchronising)
    state[late & host.visible] = RUNNING
    state[waits] = SYNCHRONISING
    seconds = np.where(waits, host.synchronising, np.where(late & ~facts.in_call, np.nan, seconds))
    state[facts.in_call] = np.where(facts.arrived, IN_CALL, IN_EARLIER)[facts.in_call]
    state[facts.on_device] = np.where(facts.started, STARTED, NOT_STARTED)[facts.on_device]
    state[host.stopped] = STOPPED
    seconds[host.stopped] = np.nan  # how long that has been is not known
    state[~facts.alive] = GONE
    state[~facts.known] = UNKNOWN
    found = []
    for number in np.unique(state).tolist():
        ranks = np.flatnonzero(state == number)
        longest = float(np.fmax.reduce(seconds[ranks]))
        found.append(
            HangState(
                state=HANG_STATES[number],
                ranks=tuple(ranks.tolist()),
                seconds=longest,
                text=_words(number, longest, len(ranks)),
            )
        )
    return tuple(found)


def of_one(state: HangState) -> str:
    """The text for a single one of its ranks."""
    return _words(HANG_STATES.index(state.state), state.seconds, 1)


def _words(state: int, seconds: float, ranks: int) -> str:
    known = "" if math.isnan(seconds) else f"{seconds:.0f} s"
    text = _WORDS[state][int(ranks != 1)]
    since = f" for {known}" if known else ""
    return text.replace("{for}", since).replace("{ago}", f" {known} ago" if known else "")


def hosts(registry: Registry, members: I64) -> Hosts:
    """Of the newest readings."""
    inside, visible = np.full(len(members), np.nan), np.zeros(len(members), bool)
    stopped = np.zeros(len(members), bool)
    process = registry.process[members]
    numbers, count = np.unique(process[process >= 0], return_counts=True)
    alone = set(numbers[count == 1].tolist())
    readings: dict[int, dict[int, bytes]] = {}
    for rank, (number, node) in enumerate(
        zip(process.tolist(), registry.node[members].tolist(), strict=True)
    ):
        if number < 0 or node < 0:
            continue
        head = registry.nodes[node].head
        if node not in readings:
            keys = (pid for pid, _ in head.process_keys)
            readings[node] = dict(zip(keys, head.encoded_processes, strict=True))
        encoded = readings[node].get(int(registry.process_pid[number]))
        if encoded is None:
            continue
        told = process_of(encoded, head.node)
        stopped[rank] = bool(told.get("stopped"))
        if number not in alone:  # nobody can say whose host a thread is
            continue
        visible[rank] = any(told[name] for name in CUDA_CALLS)
        seconds = told.get("synchronising_seconds")
        if isinstance(seconds, float):
            inside[rank] = seconds
    return Hosts(inside, visible, stopped)
