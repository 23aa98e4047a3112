"""Wiring of the pure stages: drained records in, encoded batches out. No IO but reading /proc.

`main` feeds it from the rings, the benchmark from arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from lanterne.agent import classify, events, peer_waits
from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head, encode
from lanterne.agent.events import NO_SLOT, U16, Records, Rules
from lanterne.agent.groups import Groups
from lanterne.agent.kernel_rows import Facts
from lanterne.agent.origins import UNTOLD, Origins, Sampling, sampling
from lanterne.agent.unique import unique
from lanterne.agent.windows import Windows
from lanterne.probes.layout import RECORD, Func
from lanterne.probes.nccl_profiler.usdt import OpFlag

MAX_WINDOW_ROWS = 1 << 18  # more operations than this end a window early: memory is bounded


class KernelSource(Protocol):
    """agent.uprobes.Uprobes."""

    def kernel_name(self, key: int) -> str | None: ...
    def told(self, tgids: Iterable[int]) -> Mapping[int, np.void]: ...
    def kernels_since(self) -> int: ...


def drained_until(records: Records, most: int, began_ns: int) -> int:
    """Up to when every record is here, after a drain of at most so many that began then. Nothing
    is known of what came while it went on, nor of what waits behind a full one."""
    if len(records) < most:
        return began_ns
    return min(began_ns, int(records["enter_ns"][-1]))


class Pipeline:
    """One per agent run; not thread-safe."""

    def __init__(
        self,
        registry: Registry,
        rules: Rules,
        head: Head,
        start_ns: int,
        *,
        grace_ns: int,
        kernels: KernelSource | None = None,
    ):
        self.registry = registry
        self.groups = Groups(rules, grace_ns=grace_ns)
        self.rooted = Groups(rules, grace_ns=grace_ns, assemble=classify.Rooted(registry.table()))
        self._kernels = kernels
        name = kernels.kernel_name if kernels else lambda _: None
        self.windows = Windows(registry.rows, start_ns, kernel_name=name)
        self._rules = rules
        self._head = head
        self._sequence = 1
        self._rows = 0
        self._drained_ns = start_ns
        self._replaying: set[int] = set()

    def feed_device(self, records: Records) -> None:
        """Drained layout.DEVICE rows. What was drained before they were must be fed before."""
        slots, trusted = self.registry.assign_device(records)
        sums = peer_waits.is_sum(records)
        if sums.any():
            told = sums & (slots != NO_SLOT)
            waits = peer_waits.of_records(records[told], slots[told])
            self.windows.waits_left_out += int(sums.sum()) - len(waits)
            self.windows.add_waits(waits)
            records, slots, trusted = records[~sums], slots[~sums], trusted[~sums]
        placed = slots != NO_SLOT
        self.windows.device.leave_out(int((~placed).sum()))
        self.windows.device.add(records[placed], slots[placed], trusted[placed])
        replayed = (records["flags"] & np.uint8(OpFlag.GRAPH)) != 0
        self._replaying.update(unique(records["tgid"][replayed & placed & trusted]).tolist())

    def take_replaying(self) -> set[int]:
        """Processes of which replays of graphs have been told since this was last asked."""
        told, self._replaying = self._replaying, set()
        return told

    def feed_kernels(self, records: Records, realtime_offset_ns: int) -> None:
        """Drained parcagpu.KERNEL rows."""
        self.windows.kernels.add(records, realtime_offset_ns)

    def _facts(self) -> Facts | None:
        if self._kernels is None or not self.windows.kernels.tgids:
            return None
        return Facts(
            self.registry.alive(),
            self._kernels.told(self.windows.kernels.tgids),
            self._kernels.kernels_since(),
        )

    def feed(self, records: Records, comm_events: Records, now_ns: int) -> None:
        """One drain. The main ring must have been drained before the ring of communicators, so
        that the creation of every communicator in `records` is here or known. now_ns: up to which
        everything has been drained, not a time at which more may wait in the rings: a group whose
        other part is still there has not been silent."""
        self._drained_ns = now_ns
        if len(comm_events):
            self.registry.apply(comm_events)
        self.registry.resolve(now_ns)
        if not len(records) and not self.groups.held and not self.rooted.held:
            return
        records = self._take_splits(records)
        slots = self.registry.assign(records)
        self.windows.splits.place(records, slots)
        if len(slots) and int(slots.max()) == NO_SLOT:
            placed = slots != NO_SLOT
            records, slots = events.rows_of(records, placed), slots[placed]
        self._rows += len(records)
        records, slots = self._take_rooted(records, slots, now_ns)
        grouped = events.point_to_point(records)
        if not grouped.any():
            self.windows.add(events.collectives(records, slots, self._rules))
            if self.groups.held:
                self.windows.add(*self.groups.add(records[:0], slots[:0], now_ns))
            return
        if not grouped.all():
            alone = ~grouped
            single = events.rows_of(records, alone)
            self.windows.add(events.collectives(single, slots[alone], self._rules))
            records, slots = events.rows_of(records, grouped), slots[grouped]
        self.windows.add(*self.groups.add(records, slots, now_ns))

    def _take_splits(self, records: Records) -> Records:
        """Sets PyTorch's split sizes apart; -> the operations."""
        told = records["func"] == Func.SPLITS
        if not told.any():
            return records
        alone = told & (records["peer"] < 0)  # the sends of the call tell whose it is
        self.windows.splits.wait(events.rows_of(records, alone))
        if (told & ~alone).any():
            self._add_splits(events.rows_of(records, told & ~alone))
        return events.rows_of(records, ~told)

    def _add_splits(self, records: Records) -> None:
        """Those whose process group tells its rank and size."""
        slots = self.registry.assign_backends(records)
        placed = slots != NO_SLOT
        self.windows.splits.unmatched += int((~placed).sum())
        self.windows.splits.add(events.rows_of(records, placed), slots[placed])

    def _take_rooted(self, records: Records, slots: U16, now_ns: int) -> tuple[Records, U16]:
        """Sets groups of broadcasts and of reduces apart; -> the other records."""
        rooted = classify.rooted(records)
        if rooted.any():
            mine, of = events.rows_of(records, rooted), slots[rooted]
            records, slots = events.rows_of(records, ~rooted), slots[~rooted]
            self.windows.add(*self.rooted.add(mine, of, now_ns))
        elif self.rooted.held:
            self.windows.add(*self.rooted.add(records[:0], slots[:0], now_ns))
        return records, slots

    @property
    def full(self) -> bool:
        return self._rows >= MAX_WINDOW_ROWS

    @property
    def operations_unresolved(self) -> int:
        return self.windows.unresolved + self.registry.without_slot

    @property
    def groups_forced(self) -> int:
        return self.groups.forced + self.rooted.forced

    def close(
        self,
        end_ns: int,
        stride: int,
        context: Callable[[], Context],
        *,
        final: bool = False,
        origins: Origins = UNTOLD,
    ) -> list[tuple[int, bytes]]:
        """End the window; -> (sequence, encoded batch) pairs. `context` is asked after the columns
        are made, so that its totals cover them. stride, origins: as the collector told them."""
        for groups in (self.groups, self.rooted):
            if final or groups.held:
                empty = np.empty(0, RECORD), np.empty(0, np.uint16)
                self.windows.add(*groups.add(*empty, self._drained_ns, close=final))
        registry = self.registry
        window = self.windows.close(
            end_ns,
            stride,
            registry.table(),
            final=final,
            facts=self._facts(),
            wanted=self._sampling(stride, origins),
        )
        self._replaying |= self.windows.kernels.take_replaying()
        named = np.zeros(1 << 16, np.bool_)
        for column in (
            window.instances.operations.slot,
            window.summaries.slot,
            window.traffic.slot,
        ):
            named[column] = True
        alive = registry.alive()
        named[[comm.slot for comm in alive]] = False
        described = [*registry.describe(np.flatnonzero(named).tolist()), *alive]
        batches = encode(window, described, context(), self._head, self._sequence)
        numbered = list(enumerate(batches, self._sequence))
        self._sequence += len(batches)
        self._rows = 0
        self.windows.forget(registry.next_round())
        return numbered

    def _sampling(self, stride: int, origins: Origins) -> Sampling:
        if stride == 1 or origins.epoch != self._head.epoch:  # or of the run before this one
            return sampling(stride, self.registry.rows)
        known = np.flatnonzero(self.registry.table().resolved).tolist()
        return sampling(stride, self.registry.rows, origins, self.registry.describe(known))
