"""Placing the probes of one library, and taking them away without making anybody wait.

The kernel waits for a grace period at every close of a link (some 30 ms) and of a uprobe perf event
(some 80 ms, one after the other: they share a lock). A library of the perf method takes seconds. So
closing is done by threads, in the background, many at once where the kernel lets them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lanterne.probes import catalog

from . import bpf
from .errors import AttachError
from .kernel import Programs
from .library import Site

_AT_ONCE = 16  # threads that close the descriptors of one library

# Descriptors that may go in any order among themselves; the groups go one after the other.
Stages = Sequence[Sequence[int]]


class Closer:
    """Closes descriptors in the background. What is left when the process ends, the kernel closes.

    ``close`` is os.close, unless a test wants to see it.
    """

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close = close
        self._changed = threading.Condition()
        self.pending = 0  # libraries whose descriptors are not all closed yet

    def add(self, stages: Stages) -> None:
        """Returns at once."""
        stages = [list(stage) for stage in stages if stage]
        if not stages:
            return
        with self._changed:
            self.pending += 1
        threading.Thread(target=self._run, args=(stages,), name="detach", daemon=True).start()

    def wait(self, timeout: float) -> bool:
        """Until everything is closed, at most so many seconds; -> whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pending == 0, timeout)

    def _run(self, stages: Sequence[list[int]]) -> None:
        try:
            for stage in stages:
                helpers = [
                    threading.Thread(target=self._work, args=(stage,), daemon=True)
                    for _ in range(min(_AT_ONCE, len(stage)) - 1)
                ]
                for helper in helpers:
                    helper.start()
                self._work(stage)
                for helper in helpers:
                    helper.join()
        finally:
            with self._changed:
                self.pending -= 1
                self._changed.notify_all()

    def _work(self, stage: list[int]) -> None:
        while True:
            try:
                fd = stage.pop()  # atomic: the threads share the list
            except IndexError:
                return
            self._close(fd)


class Links:
    """The links of one library; closing them removes the probes."""

    def __init__(self, programs: Programs, closer: Closer) -> None:
        self._programs = programs
        self._closer = closer
        self._entries: list[int] = []
        self._returns: list[int] = []
        self._events: list[int] = []

    def add(self, path: str, sites: Sequence[Site]) -> None:
        """Places all probes or none; raises AttachError."""
        try:
            for function, at_return, chosen in _by_function(sites):
                if self._programs.method == "multi":
                    self._add_multi(path, function, chosen, at_return)
                else:
                    self._add_perf(path, function, chosen, at_return)
        except OSError as error:
            self.close()
            raise AttachError(
                f"{path}: probes could not be placed: {error.strerror or error}"
            ) from error
        except BaseException:
            self.close()
            raise

    def _add_multi(self, path: str, function: str, sites: Sequence[Site], at_return: bool) -> None:
        link = bpf.link_uprobes(
            self._programs.program(function),
            path,
            [site.offset for site in sites],
            [self._programs.cookie(site.what) for site in sites],
            at_return=at_return,
            semaphores=[site.semaphore for site in sites],
        )
        (self._returns if at_return else self._entries).append(link)

    def _add_perf(self, path: str, function: str, sites: Sequence[Site], at_return: bool) -> None:
        kind, return_bit = _uprobe_pmu()
        for site in sites:
            # Bits 32 to 63 of config: the semaphore, as in format/ref_ctr_offset.
            config = (return_bit if at_return else 0) | site.semaphore << 32
            event = bpf.open_uprobe(kind, config, path, site.offset)
            self._events.append(event)
            cookie = self._programs.cookie(site.what)
            link = bpf.link_perf_event(self._programs.program(function), event, cookie)
            (self._returns if at_return else self._entries).append(link)

    def close(self) -> None:
        """In the background. Entries first, so that none is seen whose return would not be; and
        the links before their events: from then on no program runs."""
        self._closer.add((self._entries, self._returns, self._events))
        self._entries, self._returns, self._events = [], [], []


def _by_function(sites: Sequence[Site]) -> list[tuple[str, bool, list[Site]]]:
    """(BPF function, at return, its sites): returns before entries, so that an entry that is
    seen has a return that is seen."""
    returns: dict[str, list[Site]] = {}
    entries: dict[str, list[Site]] = {}
    for site in sites:
        entry, at_return = catalog.PROGRAMS[site.what.program]
        if entry:
            entries.setdefault(entry, []).append(site)
        if at_return:
            returns.setdefault(at_return, []).append(site)
    return [(name, True, chosen) for name, chosen in returns.items()] + [
        (name, False, chosen) for name, chosen in entries.items()
    ]


def _uprobe_pmu(sys: Path = Path("/sys")) -> tuple[int, int]:
    """(perf event type, config bit that means "at return") of the uprobe PMU."""
    folder = sys / "bus/event_source/devices/uprobe"
    kind = int((folder / "type").read_text())
    bit = (folder / "format/retprobe").read_text().strip()
    return kind, 1 << int(bit.removeprefix("config:"))
