"""Communicators that stand still while some of their ranks are in an operation.

A rank has *reached* an operation when its call has returned, or is in flight (a blocking call that
outlasts a window is told of), or has been enqueued, or when its GPU was given it and has not left
it (where a profiler plugin tells). The ranks that have reached fewer operations than others are
missing; the others wait for them, those too that are still in the call of an earlier operation.
Where all have come, those are missing whose GPU has not started it while others' have, or whose
process is stopped. Nobody is missing where all are in flight and none comes out: then the
communication itself is stuck, and nobody is blamed. A communicator in which all have reached the
same operation and nobody is in flight is idle.

Ranks do not reach operations at one moment, so it counts from the last thing that happened in the
communicator: the newest return or enqueue of any rank, or the entry of the first that waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import ops
from lanterne.collector.analyse.gather import Flow
from lanterne.collector.analyse.hang_states import Facts, Hosts, hosts, of_one, states
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.who import Slot
from lanterne.collector.snapshot import CLASSES, METHODS, HangState, HangView, Ranks

T = TypeVar("T", bound=np.generic)
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

NS = 10**9
STALE_NS = 3 * NS  # a batch older than the node's newest by so much is not of now
SILENT_NS = 10 * NS  # a node that has not reported for so long says nothing
COMMON = 40  # operations of the second lane, before they count as the same on all ranks
UNEVEN = 0.2  # share by which the ranks' numbers may differ there
COLLECTIVE, P2P = 0, 1
IN_CALL, LAUNCHED, STARTED = range(3)  # proto Pending.state
CONFIDENT = 0.95


@dataclass(frozen=True)
class Hang:
    """One communicator that stands still."""

    seconds: float
    lane: int
    op: int  # of the operation that the others are in; -1 unknown
    seq: int
    missing: tuple[int, ...]  # ranks; none: all are in it and none comes out
    gone: tuple[int, ...]  # those of them whose process has ended
    arrived: tuple[int, ...]
    states: tuple[HangState, ...]


@dataclass(frozen=True)
class _Lane:
    """[rank] of one communicator and lane, as of now."""

    reached: I64
    known: Bool
    alive: Bool
    in_call: Bool
    on_device: Bool
    started: Bool
    since_ns: I64  # of what is in flight; 0 else
    far: I64  # number of the last operation that the rank has come to

    @property
    def inside(self) -> Bool:
        return self.in_call | self.on_device


class Hangs:
    """How far each member is, [lane, member]."""

    def __init__(self, slots: int, members: int, seconds: float) -> None:
        self._after_ns = int(seconds * NS)
        # Members are set by `forget` when they are given: until then their memory is not touched.
        self._reached = np.zeros((2, members), np.int64)  # newest sequence number
        self._first = np.zeros((2, members), np.int64)
        self._at = np.zeros((2, members), np.int64)  # when that was told
        self._op = np.zeros((2, members), np.uint8)
        self._inside = np.zeros((2, members), np.int64)  # sequence number in flight
        self._entered = np.zeros((2, members), np.int64)  # on the collector's clock
        self._told = np.zeros((2, members), np.int64)
        self._queued = np.zeros((2, members), np.int64)  # the oldest that its GPU has not left
        self._started = np.zeros((2, members), bool)  # whether it has started that
        self._queued_at = np.zeros((2, members), np.int64)  # given or started; collector's clock
        self._queue_told = np.zeros((2, members), np.int64)
        self._stride = np.zeros(members, np.int64)  # that the newest number was sampled with
        self._moved = np.zeros(slots, np.int64)  # when anything was last told of a communicator
        self.found: dict[int, Hang] = {}

    def forget(self, slot: int, base: int, ranks: int) -> None:
        members = slice(base, base + ranks)
        for array in (self._reached, self._first, self._inside, self._queued):
            array[:, members] = -1
        for array in (self._at, self._told, self._entered, self._queued_at, self._queue_told):
            array[:, members] = 0
        self._started[:, members] = False
        self._stride[base : base + ranks] = 1
        self._moved[slot] = 0
        self.found.pop(slot, None)

    def add(self, flow: Flow, now_ns: int) -> None:
        """Operations that were told, on common sequence numbers."""
        lane = flow.table & 1
        members = self._reached.shape[1]
        cell = lane * members + flow.member
        reached, op = self._reached.reshape(-1), self._op.reshape(-1)
        # Rows of a process come in the order of time: the last of a cell has its newest number.
        cells, last = np.unique(cell[::-1], return_index=True)
        seq = flow.seq[::-1][last]
        fresh = seq > reached[cells]
        cells, seq = cells[fresh], seq[fresh]
        first = self._first.reshape(-1)
        unknown = first[cells] < 0
        first[cells[unknown]] = seq[unknown]
        reached[cells] = seq
        op[cells] = flow.op[::-1][last][fresh]
        stride = flow.stride if isinstance(flow.stride, int) else flow.stride[::-1][last][fresh]
        self._stride[cells % members] = stride
        self._at.reshape(-1)[cells] = now_ns
        self._moved[np.unique(flow.slot)] = now_ns

    def add_pending(
        self,
        members: I64,
        slots: I64,
        lane: U8,
        seq: I64,
        op: U8,
        state: U8,
        entered_ns: I64,
        now_ns: int,
    ) -> None:
        """Calls in flight, and operations on GPUs. entered_ns: on the collector's clock."""
        call, device = state == IN_CALL, state != IN_CALL
        for rows, number, since, told in (
            (call, self._inside, self._entered, self._told),
            (device, self._queued, self._queued_at, self._queue_told),
        ):
            at = lane[rows], members[rows]
            number[at], since[at], told[at] = seq[rows], entered_ns[rows], now_ns
        self._started[lane[device], members[device]] = state[device] == STARTED
        waiting = seq > self._reached[lane, members]
        self._op[lane[waiting], members[waiting]] = op[waiting]
        self._moved[slots[self._moved[slots] == 0]] = now_ns

    def judge(self, registry: Registry, comparable: Bool, now_ns: int) -> None:
        """Renew `found`. comparable: [slot] whether the ranks' numbers mean the same operation."""
        found = {}
        for number, slot in enumerate(registry.slots):
            if slot is None or slot.ranks < 2 or not comparable[number]:
                continue
            moved = int(self._moved[number])
            if moved == 0 or now_ns - moved < self._after_ns:
                continue
            hang = self._judge(registry, slot, now_ns)
            if hang is not None:
                found[number] = hang
        self.found = found

    def _judge(self, registry: Registry, slot: Slot, now_ns: int) -> Hang | None:
        members = np.arange(slot.base, slot.base + slot.ranks)
        known, complete = registry.process[members] >= 0, registry.complete[members]
        alive, reports = _alive(registry, members, known, now_ns)
        for lane in (COLLECTIVE, P2P):
            found = self._of_lane(lane, members, known & reports, complete, alive, now_ns)
            if found.known.sum() < 2 or (lane == P2P and not self._even(members, found)):
                continue
            hang = self._hang(lane, members, found, registry, now_ns)
            if hang is not None:
                return hang
        return None

    def _of_lane(
        self, lane: int, members: I64, known: Bool, complete: Bool, alive: Bool, now_ns: int
    ) -> _Lane:
        reached = self._reached[lane, members]
        stride = self._stride[members]
        if (stride != (most := int(stride.max()))).any():
            # While agents disagree, some tell of operations that others leave out.
            reached = np.where(reached >= 0, reached // most * most, reached)
        calls, queued = self._inside[lane, members], self._queued[lane, members]
        recent = now_ns - STALE_NS
        in_call = (self._told[lane, members] > recent) & (calls > reached) & alive
        on_device = (self._queue_told[lane, members] > recent) & (queued > reached) & alive
        far = np.maximum(np.where(in_call, calls, reached), np.where(on_device, queued, reached))
        since = np.where(in_call, self._entered[lane, members], 0)
        return _Lane(
            reached=reached,
            known=known & ((far >= 0) | complete),
            alive=alive,
            in_call=in_call,
            on_device=on_device,
            started=on_device & self._started[lane, members],
            since_ns=np.where(on_device, self._queued_at[lane, members], since),
            far=far,
        )

    def _hang(
        self, lane: int, members: I64, f: _Lane, registry: Registry, now_ns: int
    ) -> Hang | None:
        least = int(f.far[f.known].min())
        arrived, missing = _who(f, least)
        if not arrived.any():
            return None
        start = int(self._at[lane, members[f.known]].max())
        if (arrived & f.inside).any():
            start = max(start, int(f.since_ns[arrived & f.inside].min()))
        if now_ns - start < self._after_ns:
            return None
        waiting = int(np.flatnonzero(arrived)[0])
        ahead = bool((f.far[arrived] > least).any())
        come = f.far > least if ahead else f.inside
        host = hosts(registry, members)
        arrived, missing = _held_up(f, host, arrived, missing)
        facts = Facts(f.known, f.alive, come, f.in_call, f.on_device, f.started, f.since_ns)
        return Hang(
            seconds=(now_ns - start) / NS,
            lane=lane,
            op=int(self._op[lane, members[waiting]]),
            seq=least + ahead,
            missing=tuple(np.flatnonzero(missing).tolist()),
            gone=tuple(np.flatnonzero(missing & ~f.alive).tolist()),
            arrived=tuple(np.flatnonzero(arrived).tolist()),
            states=states(facts, host, now_ns),
        )

    def _even(self, members: I64, f: _Lane) -> bool:
        """Whether the ranks have all had about as many operations of the lane: the groups of a
        pipeline's stages are not the same operation.
        """
        if f.in_call.any():
            return False
        had = (self._reached - self._first)[P2P, members[f.known]]
        return int(had.min()) >= COMMON and int(had.max() - had.min()) <= UNEVEN * int(had.max())


def _who(f: _Lane, least: int) -> tuple[Bool, Bool]:
    """-> who waits and who is missing, [rank]; nobody waits: it is idle."""
    nobody = np.zeros_like(f.known)
    arrived = f.known & (f.far > least) & f.alive
    # Of a rank whose GPU is in the operation that others were told to have reached is nothing late.
    missing = f.known & (f.far == least) & ~f.started
    if arrived.any():
        return arrived, missing
    lives = f.known & f.alive
    if not (f.inside[lives].all() and f.inside.any()):
        return nobody, nobody
    if f.started.any() and f.on_device[lives].all():  # else it is not known who has not started
        return f.started, lives & ~f.started
    return f.inside, nobody


def _held_up(f: _Lane, host: Hosts, arrived: Bool, missing: Bool) -> tuple[Bool, Bool]:
    """-> the same, of all that is known. A rank in the call of an earlier operation, which some
    have left and it has not, waits as well: for those that are in no call, or may not run.
    """
    causes = missing & (~f.in_call | host.stopped)
    if not missing.any():
        causes = arrived & host.stopped
    if not causes.any():
        return arrived, missing
    return (arrived | missing) & ~causes, causes


def _alive(registry: Registry, members: I64, known: Bool, now_ns: int) -> tuple[Bool, Bool]:
    """-> [rank] whether the process lives and holds the communicator; whether its node reports."""
    node = np.where(known, registry.node[members], -1)
    newest = np.array([n.head.received_ns for n in registry.nodes] + [0])
    lists = np.array([n.lists_processes for n in registry.nodes] + [False])
    reports = newest[node] > now_ns - SILENT_NS
    process = np.where(known, registry.process[members], 0)
    seen = registry.process_seen[process]
    holds = registry.seen_ns[members] >= newest[node] - STALE_NS
    lives = ~lists[node] | (seen >= newest[node] - STALE_NS)
    return known & reports & lives & holds, known & reports


def shown(hang: Hang | None) -> HangView | None:
    """As the snapshot has it."""
    if hang is None:
        return None
    return HangView(
        seconds=hang.seconds,
        op=ops.name(hang.op),
        seq=hang.seq,
        missing=hang.missing,
        gone=hang.gone,
        arrived=hang.arrived,
        states=hang.states,
    )


def overlay(hangs: Hangs, ranks: Ranks, slots: I64) -> Ranks:
    """Name the missing ranks, whatever was known of them before. slots: of each communicator."""
    rows, texts = [], {}
    for comm in np.flatnonzero(np.isin(slots, list(hangs.found))).tolist():
        hang = hangs.found[int(slots[comm])]
        low, high = np.searchsorted(ranks.comm, [comm, comm + 1])
        mine = low + np.flatnonzero(np.isin(ranks.rank[low:high], hang.missing))
        rows.append(mine)
        texts.update({row: _why(hang, int(ranks.rank[row])) for row in mine.tolist()})
    if not texts:
        return ranks
    at = np.concatenate(rows)
    why = list(ranks.why) or [""] * len(ranks.rank)
    for row, text in texts.items():
        why[row] = text

    def changed(values: npt.NDArray[T], value: float) -> npt.NDArray[T]:
        values = values.copy()
        values[at] = value
        return values

    return replace(
        ranks,
        straggler=changed(ranks.straggler, 1),
        klass=changed(ranks.klass, CLASSES.index("hang")),
        confidence=changed(ranks.confidence, CONFIDENT),
        method=changed(ranks.method, METHODS.index("hang")),
        score=changed(ranks.score, np.nan),
        found_ratio=changed(ranks.found_ratio, np.nan),
        windows=changed(ranks.windows, 0),
        why=tuple(why),
    )


def _why(hang: Hang, rank: int) -> str:
    what = next(of_one(state) for state in hang.states if rank in state.ranks)
    count = len(hang.arrived)
    waits = f"{count} rank{'s' * (count != 1)} in {ops.name(hang.op)} {hang.seq}"
    return f"{what}; {waits} for {hang.seconds:.0f} s"
