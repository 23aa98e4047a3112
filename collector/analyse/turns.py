"""Which communicators are told whole for a while under load, so that their ranks can be aligned.

The ranks of a communicator that was met running cannot be aligned by samples (see `joining`), and
to be told all of it is what the load forbids. So few are at a time: together no more ranks than
make for as many rows as the sample of all, or one communicator. One that could not be aligned in
its turn waits for another, each time twice as long, and is sampled meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

TURN_NS = 15 * 10**9  # agents learn of it within some 3 s, then rows for 3 s are enough
PAUSE_NS = 30 * 10**9
MOST_DOUBLINGS = 5


class Turns:
    """`asked`: the slots whose turn it is, and since when."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}
        self._failed: dict[int, tuple[int, int]] = {}  # slot: (how often, not before)

    def forget(self, slot: int) -> None:
        """Another communicator, or another begin of the same."""
        self.asked.pop(slot, None)
        self._failed.pop(slot, None)

    def choose(self, waiting: Mapping[int, int], room: int, now_ns: int) -> None:
        """waiting: ranks of each slot that is not aligned. room: ranks that may be told whole."""
        for slot, since in list(self.asked.items()):
            if slot not in waiting:
                self.forget(slot)
            elif now_ns - since > TURN_NS:
                del self.asked[slot]
                times = self._failed.get(slot, (0, 0))[0]
                self._failed[slot] = times + 1, now_ns + (PAUSE_NS << min(times, MOST_DOUBLINGS))
        used = sum(waiting[slot] for slot in self.asked)
        rest = [(self._failed.get(slot, (0, 0)), slot) for slot in waiting.keys() - self.asked]
        for (_, not_before), slot in sorted(rest):
            if not_before > now_ns:
                continue
            if self.asked and used + waiting[slot] > room:
                return  # not one of the smaller ones instead: a large one would never come
            self.asked[slot] = now_ns
            used += waiting[slot]
