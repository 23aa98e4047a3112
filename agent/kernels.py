"""Kernels that parcagpu tells of -> stage times of each process, and operations with GPU times.

*Operations.* The kernels of NCCL and DeepEP that are operations of a communicator's ranks are
numbered in the order of their start, inside CUDA graphs and outside alike, from NUMBERS_FROM on.
The order is the same on all ranks, and so the collector joins them by these numbers; waits then
follow from durations alone. They take the place of the host's calls of the same kind on the
communicator, which keep being counted. A kernel that waits for the ranks ahead of the operation
proper (DeepEP's notify) is the first part of it. With DeepEP's receive hooks one operation is two
kernels, and counts as two.

*Whose communicator* a kernel does not say. It is the process's only one on which this kind of
operation has been called, or its only one of that library; otherwise the kernel is in the stage
times alone and counted in `left_out["communicator"]`.

*A number counts only if no kernel is missing before it.* parcagpu limits the rate of launches that
it tells of; the programs compare them with the launches at libcuda, and what comes from a process
that has missed one, or of which the ring has lost a record, is left out from there on, for its
life. Numbers have the same beginning on all ranks if the probes stood before the communicator was
made, or if the collector aligns its ranks anyway (see `device`).

*Sends and receives* have one kernel for any pattern. It is an all-to-all where every group that was
called on the communicator is one, in graphs or outside; otherwise it says nothing of waits.

*The profiler plugin's word goes first*: where it tells of a communicator, kernels are in the stage
times alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lanterne.agent.events import I64, U8, Bool, Operations, Records
from lanterne.agent.kernel_names import NO_OPERATION, OTHER, Kind, kind_of
from lanterne.agent.kernel_places import Places
from lanterne.agent.kernel_rows import CODES, ROW, Facts, Process, join, take
from lanterne.agent.stages import StageColumns, columns
from lanterne.agent.unique import unique

MAX_ROWS = 1 << 18  # kernels of one window
MAX_KINDS = 1 << 15  # different names
MAX_PROCESSES = 4096
PATIENCE = 5  # windows until what cannot be verified is given up
LATEST_NS = 3600 * 10**9  # a kernel that was told later than this is on no known clock
_LIMIT = 1 << 62


@dataclass(frozen=True)
class Told:
    """What a window's kernels come to: operations that no call was made for (replays of graphs),
    and those that were counted when they were called; roles of each; stage times."""

    replayed: Operations
    replayed_role: U8
    called: Operations
    called_role: U8
    stages: StageColumns


class Kernels:
    """One per agent, for as many slots as the registry has rows; not thread-safe. ``name_of``: the
    text of a name's number, None where it is lost."""

    def __init__(self, slots: int, name_of: Callable[[int], str | None]) -> None:
        self._name_of = name_of
        self._codes = np.array([_code(OTHER)], CODES)
        self._code_of: dict[int, int] = {0: 0}
        self._parts: list[np.ndarray] = []
        self._rows = 0
        self._round = 0
        self._held = np.empty(0, ROW)
        self._processes: dict[int, Process] = {}
        self.read = 0
        self.left_out: Counter[str] = Counter()  # kernels, by cause
        self._places = Places(slots, self._processes, self.left_out)
        self.forget = self._places.forget
        self.note_calls = self._places.note_calls
        self.replaced = self._places.replaced
        self.take_replaying = self._places.take_replaying

    def forget_processes(self, tgids: Iterable[int]) -> None:
        """They have ended: whether their last kernels were all told can no more be found out."""
        gone = [tgid for tgid in tgids if self._processes.pop(tgid, None) is not None]
        if gone:
            of = np.isin(self._held["tgid"], gone)
            self.left_out["process"] += int(of.sum())
            self._held = self._held[~of]

    @property
    def operations(self) -> int:
        """That were sent."""
        return self._places.operations

    @property
    def tgids(self) -> list[int]:
        """Processes that parcagpu has told of."""
        return list(self._processes)

    # -- records ----------------------------------------------------------------------------

    def add(self, records: Records, realtime_offset_ns: int) -> None:
        """Drained parcagpu.KERNEL rows. The offset: CLOCK_REALTIME - CLOCK_MONOTONIC."""
        self.read += len(records)
        self._look_for_gaps(records)
        start, stop = (records[name].astype(np.int64) for name in ("start_ns", "end_ns"))
        told = records["told_ns"].astype(np.int64)
        sane = (records["start_ns"] < _LIMIT) & (records["end_ns"] < _LIMIT)
        sane &= (start > 0) & (start <= stop)
        self.left_out["malformed"] += int((~sane).sum())
        # CUPTI's times are on the system's clock, or on the one that never goes back.
        shift = np.where(_near(stop, told), 0, realtime_offset_ns)
        known = _near(stop - shift, told)
        self.left_out["clock"] += int((sane & ~known).sum())
        keep = sane & known
        room = max(0, MAX_ROWS - self._rows)
        if int(keep.sum()) > room:
            beyond = np.flatnonzero(keep)[room:]
            self._break(unique(records["tgid"][beyond]).tolist(), "window_full")
            self.left_out["window_full"] += len(beyond)
            keep[beyond] = False
        rows = np.zeros(int(keep.sum()), ROW)
        rows["tgid"], rows["device"] = records["tgid"][keep], records["device"][keep]
        rows["start"], rows["stop"] = (start - shift)[keep], (stop - shift)[keep]
        rows["told"], rows["round"] = told[keep], self._round
        rows["length"] = rows["stop"] - rows["start"]
        rows["graph"] = records["graph"][keep] != 0
        codes = self._codes_of(records["name"][keep])
        for name in CODES.names or ():
            rows[name] = codes[name]
        self._parts.append(rows)
        self._rows += len(rows)

    def _look_for_gaps(self, records: Records) -> None:
        for tgid in unique(records["tgid"]).tolist():
            seq = records["seq"][records["tgid"] == tgid].astype(np.int64)
            process = self._processes.get(tgid)
            if process is None:
                if len(self._processes) >= MAX_PROCESSES:
                    continue
                process = self._processes[tgid] = Process(next_seq=0)
            if int(seq.min()) > process.next_seq or int(seq.max()) - int(seq.min()) >= len(seq):
                self._break([tgid], "lost")
            process.next_seq = max(process.next_seq, int(seq.max()) + 1)

    def _break(self, tgids: Iterable[int], why: str) -> None:
        for tgid in tgids:
            process = self._processes.get(tgid)
            if process is not None:
                process.break_off(why)

    def _codes_of(self, keys: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(keys, return_inverse=True)
        index = np.array([self._code(key) for key in distinct.tolist()], np.int64)
        found: np.ndarray = self._codes[index[inverse]] if len(keys) else self._codes[:0]
        return found

    def _code(self, key: int) -> int:
        code = self._code_of.get(key)
        if code is not None:
            return code
        name = self._name_of(key)
        if name is None:
            self.left_out["name"] += 1
            return 0  # asked for again with the next one
        if len(self._code_of) >= MAX_KINDS:
            self._code_of = {0: 0}
        packed = np.array([_code(kind_of(name))], CODES)
        same = np.flatnonzero(self._codes == packed[0])
        if not len(same):
            self._codes = np.concatenate([self._codes, packed])
            same = np.array([len(self._codes) - 1])
        self._code_of[key] = int(same[0])
        return int(same[0])

    # -- window -----------------------------------------------------------------------------

    def close(self, facts: Facts, covered: Bool, *, final: bool = False) -> Told:
        """Ends a window. ``covered`` [slot]: the profiler plugin tells of it."""
        told = facts.told
        self._places.know(facts.owners)
        if not (self._parts or len(self._held)):  # on most hosts, always
            self._round += 1
            return Told(*self._places.place(self._held, 0, covered, self._round), columns([]))
        rows = join(self._parts)
        self._parts, self._rows = [], 0
        stages = self._stages(rows, told)
        waiting = join([self._held, take(rows, self._is_part(rows))])
        ready = self._certain(waiting, told, final=final)
        operations = self._merged(waiting, ready, final=final)
        self._round += 1
        return Told(*self._places.place(operations, facts.since_ns, covered, self._round), stages)

    def _is_part(self, rows: np.ndarray) -> Bool:
        part: Bool = (rows["func"] != NO_OPERATION) | rows["begins"]
        return part

    def _stages(self, rows: np.ndarray, told: Mapping[int, np.void]) -> StageColumns:
        ticks = {owner.tgid: owner.start_ticks for owner in self._places.owners.values()}
        found: list[tuple[int, ...]] = []
        column = {n: rows[n].copy() for n in ("tgid", "device", "stage", "start", "stop")}
        for tgid in unique(column["tgid"]).tolist():
            mine = np.flatnonzero(column["tgid"] == tgid)
            process = self._processes.get(tgid)
            if process is None or tgid not in ticks:
                self.left_out["process"] += len(mine)
                continue
            state = told.get(tgid)
            whole = state is not None and bool(state["based"]) and not int(state["missed"])
            whole &= process.broken in ("", "order")
            found += process.spans.rows(
                tgid, ticks[tgid], whole, column["device"][mine].astype(np.uint32),
                column["stage"][mine], column["start"][mine], column["stop"][mine],
            )  # fmt: skip
        return columns(found)

    def _certain(self, rows: np.ndarray, told: Mapping[int, np.void], *, final: bool) -> Bool:
        """Rows before which nothing is missing; those of a window are judged with the next one, for
        the buffers of two streams may come in any order."""
        ready = (rows["round"] < self._round) | final
        for tgid in unique(rows["tgid"]).tolist():
            mine = rows["tgid"] == tgid
            state = told.get(tgid)
            if state is None or not int(state["based"]):
                ready[mine] = False
            elif int(state["missed"]):
                ready[mine] &= rows["told"][mine] <= int(state["whole_ns"])
            process = self._processes.get(tgid)
            why, drop = process.broken if process is not None else "process", mine
            old = mine & (rows["round"] <= self._round - PATIENCE)
            if not why and bool((old & ~ready).any() or (final and (mine & ~ready).any())):
                unchecked = state is None or not int(state["based"])
                why, drop = "unchecked" if unchecked else "sampled", mine & ~ready
                self._break([tgid], why)
            drop = drop if why else old & rows["begins"]
            if drop.any():
                self.left_out[why or "held"] += int((drop & ~rows["begins"]).sum())
                ready[drop] = False
                rows["round"][drop] = -1  # _merged leaves them out
        return ready

    def _merged(self, rows: np.ndarray, ready: Bool, *, final: bool) -> np.ndarray:
        """Operations, one row each, by process and start; keeps the others."""
        keep = ~ready & (rows["round"] >= 0)
        held, rows = take(rows, keep), take(rows, ready)
        rows = take(rows, np.lexsort((rows["start"], rows["library"], rows["tgid"])))
        mains = np.flatnonzero(~rows["begins"])
        following = np.searchsorted(mains, np.arange(len(rows)))
        has = following < len(mains)
        main = mains[np.minimum(following, len(mains) - 1)] if len(mains) else np.zeros(0, np.int64)
        if len(mains):
            for name in ("tgid", "library"):
                has &= rows[name] == rows[name][main]
        begins = rows["begins"]
        alone = begins & ~has
        first = begins & has
        if first.any():
            np.add.at(rows["length"], main[first], rows["length"][first])
            np.minimum.at(rows["start"], main[first], rows["start"][first])
        if not final:
            held = join([held, take(rows, alone)])
        self.left_out["held"] += max(0, len(held) - MAX_ROWS)
        self._held = held[-MAX_ROWS:]
        return take(rows, ~begins)


def _near(stop: I64, told: I64) -> Bool:
    """Whether a kernel may have ended then; a millisecond for the conversion of clocks."""
    near: Bool = (stop <= told + 1_000_000) & (stop > told - LATEST_NS)
    return near


def _code(kind: Kind) -> tuple[int, int, int, int, bool]:
    return (int(kind.stage), kind.library, kind.func, kind.role, kind.begins)
