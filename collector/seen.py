"""Which batches were applied: duplicate suppression by (node, epoch, sequence), bounded.

Per epoch (one run of an agent) the applied sequence numbers are kept as a short list of closed
ranges; in order delivery keeps one range. Decisions:

* A batch of an older epoch that was not seen is data: an agent may be restarted with a spool, or
  its last batches may still be on the way. It is accepted while that epoch is remembered or newer
  than every forgotten one; otherwise it cannot be told from a duplicate and is refused.
* When an epoch has more gaps than are kept, the oldest gap is closed: its batches, should they
  still come, count as duplicates. An agent that dropped batches leaves such gaps for good.
* After a restart of the collector nothing is remembered, and what had been applied is gone as
  well, so nothing counts twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

EPOCHS = 4
RANGES = 64


class Epoch:
    """Applied sequence numbers of one agent run."""

    __slots__ = ("closed_gaps", "ranges")

    def __init__(self) -> None:
        self.ranges: list[list[int]] = []
        self.closed_gaps = 0

    def has(self, sequence: int) -> bool:
        at = bisect_right(self.ranges, sequence, key=lambda r: r[0]) - 1
        return at >= 0 and sequence <= self.ranges[at][1]

    def add(self, sequence: int) -> None:
        at = bisect_right(self.ranges, sequence, key=lambda r: r[0])
        joins_left = at > 0 and self.ranges[at - 1][1] == sequence - 1
        joins_right = at < len(self.ranges) and self.ranges[at][0] == sequence + 1
        if joins_left and joins_right:
            self.ranges[at - 1][1] = self.ranges.pop(at)[1]
        elif joins_left:
            self.ranges[at - 1][1] = sequence
        elif joins_right:
            self.ranges[at][0] = sequence
        else:
            self.ranges.insert(at, [sequence, sequence])
        if len(self.ranges) > RANGES:
            self.ranges[0][1] = self.ranges.pop(1)[1]
            self.closed_gaps += 1


class Seen:
    """Memory of applied batches of all nodes; at most `nodes` of them, the idlest forgotten."""

    def __init__(self, nodes: int = 8_192) -> None:
        self._limit = nodes
        self._nodes: OrderedDict[str, tuple[dict[int, Epoch], list[int]]] = OrderedDict()

    def verdict(self, node: str, epoch: int, sequence: int) -> str:
        """-> "new", "duplicate", or "stale" (an epoch already forgotten)."""
        entry = self._nodes.get(node)
        if entry is None:
            return "new"
        epochs, forgotten = entry
        known = epochs.get(epoch)
        if known is not None:
            return "duplicate" if known.has(sequence) else "new"
        return "stale" if epoch <= forgotten[0] else "new"

    def add(self, node: str, epoch: int, sequence: int) -> None:
        """Remember an applied batch whose verdict was "new"."""
        entry = self._nodes.get(node)
        if entry is None:
            entry = self._nodes[node] = ({}, [0])
            if len(self._nodes) > self._limit:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(node)
        epochs, forgotten = entry
        if epoch not in epochs:
            epochs[epoch] = Epoch()
            if len(epochs) > EPOCHS:
                oldest = min(epochs)
                del epochs[oldest]
                forgotten[0] = max(forgotten[0], oldest)
                if oldest == epoch:
                    return
        epochs[epoch].add(sequence)
