"""Which batches were applied: duplicate suppression by (node, epoch, sequence), bounded.

Per epoch (one run of an agent) the applied sequence numbers are kept as a short list of closed
ranges; in order delivery keeps one range. Decisions:

* A batch of an older epoch that was not seen is data: an agent may be restarted with a spool, or
  its last batches may still be on the way. Nothing is concluded from the order of epochs: they are
  times of a clock that may be set back.
* The epochs heard of last are remembered. Of those before them only that they were is, so that one
  of their batches, which cannot be told from a duplicate, is refused; and of still older ones only
  the latest.
* When an epoch has more gaps than are kept, the oldest gap is closed: its batches, should they
  still come, count as duplicates. An agent that dropped batches leaves such gaps for good.
* What outlives a restart of the collector is in `journal`. Without it nothing is remembered, and
  what had been applied is gone as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

EPOCHS = 16
RANGES = 64
FORGOTTEN = 256


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


@dataclass(slots=True)
class NodeSeen:
    epochs: OrderedDict[int, Epoch] = field(default_factory=OrderedDict)  # last heard of at the end
    forgotten: OrderedDict[int, None] = field(default_factory=OrderedDict)
    floor: int = 0  # the latest of the epochs of which not even the number is kept

    def stale(self, epoch: int) -> bool:
        return epoch in self.forgotten or (epoch not in self.epochs and epoch <= self.floor)

    def forget(self, epoch: int) -> None:
        self.forgotten[epoch] = None
        if len(self.forgotten) > FORGOTTEN:
            self.floor = max(self.floor, self.forgotten.popitem(last=False)[0])


class Seen:
    """Memory of applied batches of all nodes; at most `nodes` of them, the idlest forgotten."""

    def __init__(self, nodes: int = 8_192) -> None:
        self._limit = nodes
        self._nodes: OrderedDict[str, NodeSeen] = OrderedDict()

    def verdict(self, node: str, epoch: int, sequence: int) -> str:
        """-> "new", "duplicate", or "stale" (an epoch already forgotten)."""
        entry = self._nodes.get(node)
        if entry is None:
            return "new"
        known = entry.epochs.get(epoch)
        if known is not None:
            return "duplicate" if known.has(sequence) else "new"
        return "stale" if entry.stale(epoch) else "new"

    def add(self, node: str, epoch: int, sequence: int) -> None:
        """Remember an applied batch whose verdict was "new"."""
        entry = self._entry(node)
        known = entry.epochs.get(epoch)
        if known is None:
            known = entry.epochs[epoch] = Epoch()
            if len(entry.epochs) > EPOCHS:
                entry.forget(entry.epochs.popitem(last=False)[0])
        entry.epochs.move_to_end(epoch)
        known.add(sequence)

    def like(self) -> Seen:
        """An empty one with the same bound."""
        return Seen(self._limit)

    def restore(self, node: str, entry: NodeSeen) -> None:
        """Put back what `items` gave, as the node heard of last."""
        self._entry(node)
        self._nodes[node] = entry

    def items(self) -> Iterator[tuple[str, NodeSeen]]:
        """Everything, the idlest node first; not to be changed."""
        yield from self._nodes.items()

    def _entry(self, node: str) -> NodeSeen:
        entry = self._nodes.get(node)
        if entry is None:
            entry = self._nodes[node] = NodeSeen()
            if len(self._nodes) > self._limit:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(node)
        return entry
