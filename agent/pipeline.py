"""Wiring of the pure stages: drained records in, encoded batches out. No IO but reading /proc.

`main` feeds it from the rings, the benchmark from arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lanterne.agent import classify, events
from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head, encode
from lanterne.agent.events import NO_SLOT, U16, Records, Rules
from lanterne.agent.groups import Groups
from lanterne.agent.windows import Windows
from lanterne.probes.layout import RECORD

MAX_WINDOW_ROWS = 1 << 18  # more operations than this end a window early: memory is bounded


class Pipeline:
    """One per agent run; not thread-safe."""

    def __init__(
        self, registry: Registry, rules: Rules, head: Head, start_ns: int, *, grace_ns: int
    ):
        self.registry = registry
        self.groups = Groups(rules, grace_ns=grace_ns)
        self.rooted = Groups(rules, grace_ns=grace_ns, assemble=classify.Rooted(registry.table()))
        self.windows = Windows(registry.rows, start_ns)
        self._rules = rules
        self._head = head
        self._sequence = 1
        self._rows = 0

    def feed_device(self, records: Records) -> None:
        """Drained layout.DEVICE rows. What was drained before they were must be fed before."""
        slots, trusted = self.registry.assign_device(records)
        placed = slots != NO_SLOT
        self.windows.device.unmatched += int((~placed).sum())
        self.windows.device.add(records[placed], slots[placed], trusted[placed])

    def feed(self, records: Records, comm_events: Records, now_ns: int) -> None:
        """One drain. The main ring must have been drained before the ring of communicators, so
        that the creation of every communicator in `records` is here or known."""
        if len(comm_events):
            self.registry.apply(comm_events)
        self.registry.resolve(now_ns)
        if not len(records) and not self.groups.held and not self.rooted.held:
            return
        slots = self.registry.assign(records)
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

    def close(
        self,
        end_ns: int,
        stride: int,
        context: Callable[[], Context],
        *,
        final: bool = False,
    ) -> list[tuple[int, bytes]]:
        """End the window; -> (sequence, encoded batch) pairs. `context` is asked after the columns
        are made, so that its totals cover them."""
        for groups in (self.groups, self.rooted):
            if final or groups.held:
                empty = np.empty(0, RECORD), np.empty(0, np.uint16)
                self.windows.add(*groups.add(*empty, end_ns, close=final))
        registry = self.registry
        window = self.windows.close(end_ns, stride, registry.table(), final=final)
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
