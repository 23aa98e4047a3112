"""Creations of communicators that are told in parts: inside a group, or by a non-blocking init.

Inside a group a creation is told twice, at its call and when its pointer is stored. Where no second
telling comes, the variable that receives the pointer is read in the process until it is there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lanterne.agent.identity import MAX_ATTEMPTS, Communicator, pause_ns
from lanterne.agent.process import Processes

MAX_PENDING = 1024

Call = tuple[int, int, int]  # tgid, address of the variable, time
Origin = tuple[Communicator | None, int]  # parent, number among its children


@dataclass
class Pending:
    """A creation whose pointer was not stored yet."""

    event: np.void
    call: Call
    parent: Communicator | None
    number: int
    attempts: int = 0
    next_try_ns: int = 0


class Creations:
    """Bounded; not thread-safe."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._pending: deque[Pending] = deque()
        self._calls: dict[Call, Origin] = {}
        self.lost: Counter[str] = Counter()  # creations that led to no communicator, by reason

    def __len__(self) -> int:
        return len(self._pending)

    def origin(self, call: Call) -> Origin | None:
        """What was learned at the first telling of this call, which is thereby over."""
        known = self._calls.get(call)
        if known is not None:
            self._pending = deque(p for p in self._pending if p.call != call)
        return known

    def remember(self, call: Call, origin: Origin) -> None:
        if call[1]:
            self._calls[call] = origin
            if len(self._calls) > MAX_PENDING:
                del self._calls[next(iter(self._calls))]

    def add(self, event: np.void, call: Call, origin: Origin) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self.lost["too_many"] += 1
        self._pending.append(Pending(event.copy(), call, *origin))

    def forget(self, pids: Iterable[int]) -> None:
        gone = set(pids)
        left = deque(p for p in self._pending if p.call[0] not in gone)
        self.lost["process_ended"] += len(self._pending) - len(left)
        self._pending = left

    def pids(self) -> set[int]:
        return {p.call[0] for p in self._pending}

    def stored(self, now_ns: int) -> list[tuple[int, Pending]]:
        """(pointer, creation) of those whose pointer is there by now; tries again what is due."""
        found: list[tuple[int, Pending]] = []
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            if pending.next_try_ns > now_ns:
                self._pending.append(pending)
                continue
            data = self._processes.memory(pending.call[0], pending.call[1], 8)
            pointer = int.from_bytes(data, "little") if data else 0
            if pointer and pointer != (1 << 64) - 1:
                found.append((pointer, pending))
                continue
            pending.attempts += 1
            pending.next_try_ns = now_ns + pause_ns(pending.attempts)
            if pending.attempts < MAX_ATTEMPTS:
                self._pending.append(pending)
            else:
                self.lost["no_pointer"] += 1
        return found
