"""How much one node may send: batches and bytes a second, and new communicators. Pure.

Token buckets: a node may send twice its rate at once, and then at its rate. Of communicators the
list that a node has sent before costs nothing, so that a job of thousands is free, and a node that
invents new ones with every batch is not.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from lanterne.collector.batch import Communicators

BURST_SECONDS = 2.0
REMEMBERED = 8_192  # communicators of a node that are not new


@dataclass(frozen=True)
class Rate:
    """Of one node; a second, but for the last: at once."""

    batches: float = 100.0
    num_bytes: float = 32 << 20
    communicators: float = 100.0
    communicators_at_once: float = 16_384.0


class _Node:
    __slots__ = ("at", "batches", "communicators", "known", "num_bytes", "table")

    def __init__(self, rate: Rate, now: float) -> None:
        self.at = now
        self.batches = rate.batches * BURST_SECONDS
        self.num_bytes = rate.num_bytes * BURST_SECONDS
        self.communicators = rate.communicators_at_once
        self.known: set[int] = set()  # hashes: a set of texts would be several times as large
        self.table: Communicators | None = None


class Rates:
    """Of at most `nodes` nodes; the one that was silent longest is forgotten."""

    def __init__(self, rate: Rate, nodes: int) -> None:
        self._rate = rate
        self._limit = nodes
        self._nodes: OrderedDict[str, _Node] = OrderedDict()

    def take(self, node: str, size: int, now: float) -> bool:
        """Whether a batch of so many bytes may come at this time (monotonic seconds)."""
        found = self._node(node, now)
        if found.batches < 1 or found.num_bytes < 0:
            return False
        found.batches -= 1
        found.num_bytes -= size  # may fall below zero: the largest batch passes, and is paid for
        return True

    def communicators(self, node: str, table: Communicators, now: float) -> bool:
        """Whether the node may have these: those it has not sent lately are new."""
        found = self._node(node, now)
        if table is found.table:  # decode keeps tables that repeat
            return True
        rows = set(map(hash, zip(table.comm_hash, table.rank, table.workload, strict=True)))
        new = len(rows - found.known)
        if new > found.communicators:
            return False
        found.communicators -= new
        if len(found.known) + new > REMEMBERED:
            found.known = rows
        else:
            found.known |= rows
        found.table = table
        return True

    def _node(self, node: str, now: float) -> _Node:
        rate = self._rate
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = _Node(rate, now)
            if len(self._nodes) > self._limit:
                self._nodes.popitem(last=False)
            return found
        self._nodes.move_to_end(node)
        passed = max(0.0, now - found.at)
        found.at = now
        most = BURST_SECONDS
        found.batches = min(found.batches + passed * rate.batches, most * rate.batches)
        found.num_bytes = min(found.num_bytes + passed * rate.num_bytes, most * rate.num_bytes)
        found.communicators = min(
            found.communicators + passed * rate.communicators, rate.communicators_at_once
        )
        return found
