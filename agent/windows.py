"""Operations of one window -> the columns of a batch: instances, summaries, traffic.

No IO, no clock: `close` is told what the time is and what the registry knows. An operation belongs
to the window in which its record was read. Operations of communicators whose identity is not known
yet are kept for `patience` windows, within `max_waiting` rows, then dropped and counted. The last
all-to-all of a communicator may be held back one window for its role (see `roles`). Whatever the
drains were, sums over all windows equal sums over all records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from lanterne.agent import peer_waits
from lanterne.agent.classify import Pairs
from lanterne.agent.device import Device
from lanterne.agent.events import (
    CAPTURED,
    U8,
    U16,
    U64,
    Bool,
    CommTable,
    Operations,
    concatenate,
    empty_operations,
    scaled_bytes,
)
from lanterne.agent.kernel_rows import Facts
from lanterne.agent.kernels import Kernels
from lanterne.agent.origins import Sampling, sampling
from lanterne.agent.roles import UNKNOWN, Roles, classify
from lanterne.agent.splits import Splits
from lanterne.agent.stages import StageColumns, columns
from lanterne.agent.summaries import Summaries, summarize
from lanterne.agent.unique import unique
from lanterne.agent.vectors import (
    PeerBytes,
    empty_peers,
    equal_splits,
    join_peers,
    merge_peers,
    take_peers,
)
from lanterne.probes.layout import Func


@dataclass(frozen=True)
class Instances:
    operations: Operations
    role: U8


@dataclass(frozen=True)
class WindowColumns:
    start_ns: int
    end_ns: int
    sampling: Sampling
    instances: Instances
    summaries: Summaries
    traffic: PeerBytes
    # Of each row of `traffic`: receives that were timed, and their ns from the group's start.
    receives: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    wait_ns: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    stages: StageColumns = field(default_factory=lambda: columns([]))


class Windows:
    """Collects operations between two closes; not thread-safe."""

    def __init__(
        self,
        slots: int,
        start_ns: int,
        *,
        patience: int = 5,
        max_waiting: int = 1 << 18,
        kernel_name: Callable[[int], str | None] = lambda _: None,
    ):
        self._start_ns = start_ns
        self._patience = patience
        self._max_waiting = max_waiting
        self._roles = Roles(slots)
        self._pairs = Pairs(slots)
        self.device = Device(slots)
        self.kernels = Kernels(slots, kernel_name)
        self.splits = Splits()
        self._exchanging = np.zeros(slots, np.bool_)
        self._captured = np.zeros(slots, np.bool_)
        self._parts: list[Operations] = []
        self._peers: list[PeerBytes] = []
        self._waits: list[peer_waits.PeerWaits] = []
        self.waits_left_out = 0  # of communicators and peers that are not known, or nonsense
        self._held = empty_operations()
        self._waiting: list[tuple[Operations, PeerBytes]] = []  # newest first
        self.unresolved = 0  # operations dropped because their communicator stayed unknown

    def add(self, operations: Operations, peers: PeerBytes | None = None) -> None:
        if len(operations):
            self._parts.append(operations)
        if peers is not None and len(peers):
            self._peers.append(peers)

    def add_waits(self, waits: peer_waits.PeerWaits) -> None:
        """How long this node's ranks waited for their peers, as plugins tell it."""
        if len(waits):
            self._waits.append(waits)

    def forget(self, slots: U16) -> None:
        """Before slots are used for other communicators."""
        self._roles.forget(slots)
        self._pairs.forget(slots)
        self.device.forget(slots)
        self.kernels.forget(slots)
        self.splits.forget(slots)
        self._exchanging[slots] = False
        self._captured[slots] = False

    def close(
        self,
        end_ns: int,
        stride: int,
        table: CommTable,
        *,
        final: bool = False,
        facts: Facts | None = None,
        wanted: Sampling | None = None,
    ) -> WindowColumns:
        """Everything added since the last close; `final` also gives out what would be held.
        wanted: where the collector told more of what to sample than the stride.
        """
        wanted = wanted or sampling(stride, len(self._captured))
        self.add(self.device.replays(end_ns, final=final))
        fresh = concatenate([*(part for part, _ in reversed(self._waiting)), *self._parts])
        peers = join_peers([*(part for _, part in self._waiting), *self._peers])
        ages = self._waiting
        self._parts, self._peers = [], []
        fresh, peers = self._set_aside(fresh, peers, table, ages, final=final)
        held_count = len(self._held)
        fresh = scaled_bytes(fresh, table.n_ranks[fresh.slot], table.rank[fresh.slot])
        op, every = classify(fresh, table.n_ranks[fresh.slot], self._exchanging[fresh.slot])
        self._exchanging[fresh.slot[every]] = True
        self._captured[fresh.slot[(fresh.flags & CAPTURED) != 0]] = True
        fresh = self.splits.attach(replace(fresh, op=op))
        # A peer that the communicator does not have is a call that NCCL refuses.
        peers = take_peers(peers, peers.peer < table.n_ranks[peers.slot])
        traffic = merge_peers(join_peers([peers, equal_splits(fresh, table)]))
        operations = concatenate([self._held, fresh])
        before = np.zeros(len(operations), np.bool_)
        before[:held_count] = True
        if len(operations) and (operations.slot[1:] < operations.slot[:-1]).any():
            order = np.argsort(operations.slot, kind="stable")
            operations, before = operations.take(order), before[order]
        role, hold = self._assign(operations, table, before, final=final)
        self._held = operations.take(hold) if hold.any() else empty_operations()
        if hold.any():
            operations, role = operations.take(~hold), role[~hold]
        self.kernels.note_calls(operations)
        told = self.kernels.close(facts or Facts(), self.device.tells(), final=final)
        sent, sent_role, timed, timed_role = self.device.upgrade(
            operations, role, self._start_ns, final=final
        )
        keep = ~self.kernels.replaced(sent)
        sent = concatenate([sent.take(keep), told.replayed, told.called])
        sent_role = np.concatenate([sent_role[keep], told.replayed_role, told.called_role])
        timed = concatenate([timed, told.called])
        timed_role = np.concatenate([timed_role, told.called_role])
        operations = concatenate([operations, told.replayed])
        role = np.concatenate([role, told.replayed_role])
        self.waits_left_out += peer_waits.left_out(self._waits, table)
        traffic, receives, wait_ns = peer_waits.beside(traffic, self._waits, table)
        self._waits = []
        window = WindowColumns(
            start_ns=self._start_ns,
            end_ns=end_ns,
            sampling=wanted,
            instances=_instances(sent, sent_role, wanted),
            summaries=summarize(operations, role, timed, timed_role),
            traffic=traffic,
            receives=receives,
            wait_ns=wait_ns,
            stages=told.stages,
        )
        self._start_ns = end_ns
        return window

    def _assign(
        self, operations: Operations, table: CommTable, before: Bool, *, final: bool
    ) -> tuple[U8, Bool]:
        """Role of each operation, and which to hold back."""
        role, hold = self._pairs.assign(operations, table, before, final=final)
        rest = np.flatnonzero(~hold)
        others = operations.take(rest) if len(rest) < len(operations) else operations
        n_ranks = table.n_ranks[others.slot]
        # Neighbours that exchange equal parts (pipeline stages) look alike again and again, too:
        # only where every rank is reached, this one included, do equal parts tell a role.
        whole = (others.op == Func.ALL_TO_ALL) | (others.lane == 0) | (others.send_peers >= n_ranks)
        found, waits = self._roles.assign(
            others, table.complete[others.slot], before[rest], whole=whole, final=final
        )
        role[rest] = np.where(found != UNKNOWN, found, role[rest])
        hold[rest] = waits
        return role, hold

    def _set_aside(
        self,
        operations: Operations,
        peers: PeerBytes,
        table: CommTable,
        ages: list[tuple[Operations, PeerBytes]],
        *,
        final: bool,
    ) -> tuple[Operations, PeerBytes]:
        """Keep what is not resolved, for a while; return what is."""
        known = table.resolved[operations.slot]
        known_peers = table.resolved[peers.slot]
        if known.all() and known_peers.all():
            self._waiting = []
            return operations, peers
        # Rows of older windows come first in `operations`: cut them back into their windows.
        waiting: list[tuple[Operations, PeerBytes]] = []
        for part, _ in ages:
            still = ~table.resolved[part.slot]
            waiting.append((part.take(still), empty_peers()))
        old = sum(len(part) for part, _ in ages)
        new = operations.take(np.flatnonzero(~known[old:]) + old)
        unknown_peers = take_peers(peers, ~known_peers)
        waiting.insert(0, (new, unknown_peers))
        kept: list[tuple[Operations, PeerBytes]] = []
        rows = 0
        for age, (part, part_peers) in enumerate(waiting):
            if final or age >= self._patience or rows + len(part) > self._max_waiting:
                self.unresolved += len(part)
                continue
            rows += len(part)
            kept.append((part, part_peers))
        if kept:
            slots = unique(np.concatenate([part.slot for part, _ in kept]))
            kept[0] = (kept[0][0], take_peers(kept[0][1], np.isin(kept[0][1].slot, slots)))
        self._waiting = kept
        return operations.take(known), take_peers(peers, known_peers)


def _instances(operations: Operations, role: U8, wanted: Sampling) -> Instances:
    """Rows for the collector to align: no failed calls, and only the numbers it asked for."""
    keep = ~operations.error
    if wanted.stride > 1:
        keep &= wanted.wanted(operations.slot, operations.lane, operations.seq)
    if keep.all():
        return Instances(operations, role)
    return Instances(operations.take(keep), role[keep])
