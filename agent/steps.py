"""Which steps of a process run collectives that nobody sees: the blindness gauge.

A step (bpf/row.h) goes from one synchronise call to the next, or from one graph launch to the next.
Counted are the steps of processes that hold a communicator. A step is blind where no collective was
seen in it, a graph was launched in it, and the process has graphs with collectives in them: it has
captured some, or it holds a communicator that is older than the agent, so that it may have. Such a
step is not blind where the profiler plugin tells of the replayed collectives; that comes when the
GPU has run them, so the word on a window's steps is spoken one window later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lanterne.agent.cuda import Use

TOLD_ROUNDS = 2  # the plugin tells in the window of the step, the one before or the one after


@dataclass
class _Process:
    steps: int = 0
    replay_steps: int = 0
    graph_launches: int = 0
    waiting: tuple[int, int] = (0, 0)  # blind steps and graph launches of the last window, perhaps
    counted_steps: int = 0
    blind_steps: int = 0
    holder: bool = False
    graphs: bool = False  # may hold collectives in graphs
    told_round: int = -TOLD_ROUNDS - 1


@dataclass
class Steps:
    """One per agent; `update` once a window."""

    steps: int = 0
    blind_steps: int = 0
    blind_launches: int = 0
    _round: int = 0
    _processes: dict[int, _Process] = field(default_factory=dict)

    def update(
        self,
        uses: Mapping[int, Use],
        ended: Mapping[int, Use],
        holders: Mapping[int, bool],
        told: Iterable[int],
    ) -> None:
        """`holders`: pids with a communicator, and whether one is older than the agent. `told`:
        pids of which a plugin has told replays since the last call. `ended`: the last totals of
        processes that are no more; their pids may be in `uses` again as something else."""
        self._round += 1
        for pid in told:
            self._process(pid).told_round = self._round
        for pid, use in ended.items():
            self._add(pid, use, holders)
            self._settle(self._processes.pop(pid))
        for pid, use in uses.items():
            self._add(pid, use, holders)
        for pid in self._processes.keys() - uses.keys():
            self._settle(self._processes.pop(pid))

    def finish(self) -> None:
        """No window comes any more: what waits for a plugin's word goes without."""
        for process in self._processes.values():
            self._settle(process)

    def of(self, pid: int) -> tuple[int, int]:
        """(steps, blind steps) of one process."""
        process = self._processes.get(pid)
        return (process.counted_steps, process.blind_steps) if process else (0, 0)

    def _process(self, pid: int) -> _Process:
        return self._processes.setdefault(pid, _Process())

    def _add(self, pid: int, use: Use, holders: Mapping[int, bool]) -> None:
        process = self._process(pid)
        self._settle(process)
        if use.steps < process.steps or use.graph_launches < process.graph_launches:
            told = process.told_round  # another process has the pid
            process = self._processes[pid] = _Process(told_round=told)
        process.holder |= pid in holders or use.captured_ops > 0
        process.graphs |= use.captured_ops > 0 or holders.get(pid, False)
        steps = use.steps - process.steps
        blind = use.replay_steps - process.replay_steps
        launches = use.graph_launches - process.graph_launches
        process.steps, process.replay_steps = use.steps, use.replay_steps
        process.graph_launches = use.graph_launches
        if process.holder:
            self.steps += steps
            process.counted_steps += steps
        if process.graphs:
            process.waiting = blind, launches

    def _settle(self, process: _Process) -> None:
        blind, launches = process.waiting
        process.waiting = 0, 0
        if self._round - process.told_round <= TOLD_ROUNDS:
            return
        self.blind_steps += blind
        self.blind_launches += launches
        process.blind_steps += blind
