"""Operations as the GPU ran them, from the profiler plugin's records, joined to the calls.

The calls that the probes see keep counting calls, bytes, traffic and roles. Where a process also
tells when the GPU ran them, what the collector gets to align are the same rows, with number, role
and size of the call, and with the GPU's start and duration, on evidence `device`.

Which call stands for an operation is found in `device_calls`.

*Replays of a CUDA graph* have no call. They are numbered behind the last matched operation of the
lane (0 collectives, 1 sends and receives) that ran before them on the GPU: sends and receives by
the plugin's count of replays, collectives by counting, where NCCL's number of the function shows
what is missing. The communicator's operations run in one order on all ranks, so these numbers are
the same everywhere if every rank was listened to from the communicator's beginning, or if the
collector aligns the ranks by time because the communicator was met running. Of any other one the
replays are counted in `unplaced` and sent nowhere. The first replay raises the numbers of its lane
by `REPLAYS_FROM`, since captured calls have numbers, too, and never run themselves.

The plugin may tell one group of sends and receives in parts: first start, last stop, all bytes. An
operation without a usable stop keeps its number and has no evidence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.agent.device_calls import KIND, KINDS, MAX_ROWS, P2P, ROW, Calls
from lanterne.agent.events import (
    CAPTURED,
    DEVICE,
    GROUPED,
    I64,
    MAX_CALL_BYTES,
    ORDER,
    U8,
    U16,
    Bool,
    Operations,
    Records,
    concatenate,
    empty_operations,
)
from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler.usdt import OpFlag

ACTIVE_ROUNDS = 5  # windows without an operation until a communicator counts as not told of
QUIET_ROUNDS = 2  # until it may be stuck
REPLAYS_FROM = 1 << 23  # above the numbers of the calls that were captured
SETTLE_NS = 50_000_000  # after its stop, the parts of an operation are all there
READ_NS = 700_000_000  # a record older than that before a window has been read in the one before
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

_TIMELINE = np.dtype([("lane", "<i8"), ("start", "<i8"), ("seq", "<i8")])


class Device:
    """One per agent, for as many slots as the registry has rows; not thread-safe."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._round = 0
        self._new = np.empty(0, ROW)  # perhaps not all parts yet
        self._calls = Calls()
        self._replays = np.empty(0, ROW)
        self._timeline = np.empty(0, _TIMELINE)
        self._active = np.full(slots, -ACTIVE_ROUNDS, np.int64)
        self._replaying = np.zeros(slots, np.bool_)
        self._replayed = np.zeros((slots, 2), np.int64)  # replays so far, by lane
        self._last_number = np.full((slots, 2), -1, np.int64)  # of the calls that were matched
        self.last_told = np.full((slots, 2), -1, np.int64)  # by lane, of what has a number
        self._last_seq = np.zeros(slots * KINDS, np.int64)
        self._last_replayed = np.zeros(slots * KINDS, np.bool_)
        self.operations = 0  # told by plugins
        self._unusable = 0
        self.unplaced = 0

    @property
    def unmatched(self) -> int:
        """Operations that were left out because their call is not known."""
        return self._unusable + self._calls.unmatched

    def leave_out(self, count: int) -> None:
        """Operations of communicators that are not known."""
        self._unusable += count

    def tells(self) -> Bool:
        """Per slot: a plugin has told of it in the last windows."""
        active: Bool = self._round - self._active < ACTIVE_ROUNDS
        return active

    def quiet(self) -> I64:
        """Slots of which a plugin has told, but not in the last windows: idle, or stuck."""
        quiet = (self._active >= 0) & (self._round - self._active >= QUIET_ROUNDS)
        return np.flatnonzero(quiet)

    def forget(self, slots: U16) -> None:
        """Before slots are used for other communicators."""
        self._calls.forget(slots)
        for name in ("_new", "_replays"):
            rows = getattr(self, name)
            if len(rows):
                setattr(self, name, rows[~np.isin(rows["key"] // KINDS, slots)])
        self._timeline = self._timeline[~np.isin(self._timeline["lane"] // 2, slots)]
        self._active[slots] = -ACTIVE_ROUNDS
        self._replaying[slots] = False
        self._replayed[slots] = 0
        self._last_number[slots] = self.last_told[slots] = -1
        keys = (slots.astype(np.int64)[:, None] * KINDS + np.arange(KINDS)).ravel()
        self._last_seq[keys] = 0
        self._last_replayed[keys] = False

    def add(self, records: Records, slots: U16, trusted: Bool) -> None:
        """Drained layout.DEVICE rows with their slots. ``trusted``: see above, for replays."""
        self.operations += len(records)
        sane = (records["start_ns"] > 0) & (records["start_ns"] < 1 << 62)
        sane &= (records["stop_ns"] == 0) | (records["stop_ns"] >= records["start_ns"])
        replayed = (records["flags"] & np.uint8(OpFlag.GRAPH)) != 0
        self._unusable += int((~sane).sum())
        self.unplaced += int((sane & replayed & ~trusted).sum())
        sane &= ~replayed | trusted
        records, slots = records[sane], slots[sane]
        rows = np.zeros(len(records), ROW)
        rows["key"] = slots.astype(np.int64) * KINDS + KIND[records["func"]]
        for name in ("seq", "bytes", "tasks", "peer", "func", "flags", "part"):
            rows[name] = records[name]
        for name in ("start", "stop", "enqueue"):
            rows[name] = records[f"{name}_ns"]
        rows["received"] = records["bytes_received"]
        self._active[slots] = self._round
        joined = np.concatenate([self._new, rows])
        self._unusable += max(0, len(joined) - MAX_ROWS)
        self._new = joined[-MAX_ROWS:]

    # -- replays ----------------------------------------------------------------------------

    def replays(self, end_ns: int, *, final: bool = False) -> Operations:
        """Begins the end of a window: replays of graphs that can be numbered by now."""
        rows = self._merged(end_ns, final=final)
        if len(rows):
            self._count_replays(rows)
            replayed = _replayed(rows)
            self._replaying[rows["key"][replayed] // KINDS] = True
            self._calls.expect(rows[~replayed])
            self._replays = np.concatenate([self._replays, rows[replayed]])
        rows = self._replays
        if not len(rows):
            return empty_operations()
        # An operation that ran before it and is not matched yet may still move its number.
        first = np.full(self._slots, np.iinfo(np.int64).max)
        eager = self._calls.eager
        np.minimum.at(first, eager["key"] // KINDS, eager["start"])
        ready = rows["start"] < first[rows["key"] // KINDS]
        waits = rows[~ready]
        self.unplaced += max(0, len(waits) - MAX_ROWS)
        self._replays = waits[-MAX_ROWS:]
        if final:
            self.unplaced += len(self._replays)
        return self._as_operations(rows[ready])

    def _merged(self, end_ns: int, *, final: bool) -> np.ndarray:
        """Operations whose parts are all there, one row each, by slot and start."""
        rows = self._new
        if not len(rows):
            return self._new
        open_ = np.maximum(rows["stop"], rows["start"]) + SETTLE_NS > end_ns
        if final:
            open_[:] = False
        # Nothing overtakes: what began after one that is open waits with it.
        slot = rows["key"] // KINDS
        first = np.full(self._slots, np.iinfo(np.int64).max)
        for _ in range(2):  # again for the parts of what now waits
            np.minimum.at(first, slot[open_], rows["start"][open_])
            open_ |= rows["start"] >= first[slot]
            order = np.lexsort((rows["seq"], _replayed(rows), rows["key"]))
            same = _starts(rows[order], "key", "seq", "flags")
            any_open = np.logical_or.reduceat(open_[order], same)
            open_[order] = np.repeat(any_open, np.diff(same, append=len(rows)))
        self._new = rows[open_]
        rows = rows[~open_]
        if not len(rows):
            return self._new[:0]
        rows = rows[np.lexsort((rows["part"], rows["seq"], _replayed(rows), rows["key"]))]
        starts = _starts(rows, "key", "seq", "flags")
        merged = rows[starts]
        if len(starts) < len(rows):
            lost_stop = np.logical_or.reduceat(rows["stop"] == 0, starts)
            merged["start"] = np.minimum.reduceat(rows["start"], starts)
            merged["stop"] = np.maximum.reduceat(rows["stop"], starts)
            merged["stop"][lost_stop] = 0
            for name in ("bytes", "received", "tasks"):
                merged[name] = np.add.reduceat(rows[name], starts)
            merged["enqueue"] = np.minimum.reduceat(rows["enqueue"], starts)
        merged["since"] = self._round
        ordered: np.ndarray = merged[np.lexsort((merged["start"], merged["key"] // KINDS))]
        return ordered

    def _count_replays(self, rows: np.ndarray) -> None:
        """Of each operation: how many replays of each lane ran before it; the number of a replay
        among those of its lane. `rows` by slot and start."""
        replayed, p2p = _replayed(rows), rows["key"] % KINDS == P2P
        step = np.zeros(len(rows), np.int64)
        order = np.lexsort((rows["seq"], rows["key"]))
        key, seq, again = rows["key"][order], rows["seq"][order], replayed[order]
        first = np.r_[True, key[1:] != key[:-1]]
        before = np.where(first, self._last_seq[key], np.r_[0, seq[:-1]])
        was_again = np.where(first, self._last_replayed[key], np.r_[False, again[:-1]])
        # Between two replays of a function NCCL numbers only replays: a gap is what was lost.
        step[order] = np.where(again, np.where(was_again, np.maximum(seq - before, 1), 1), 0)
        self._last_seq[key], self._last_replayed[key] = seq, again
        slot = rows["key"] // KINDS
        starts = np.flatnonzero(np.r_[True, slot[1:] != slot[:-1]])
        lengths = np.diff(starts, append=len(rows))
        ran = np.cumsum(np.where(p2p, 0, step))
        ran += np.repeat(self._replayed[slot[starts], 0] - np.r_[0, ran[starts[1:] - 1]], lengths)
        told = np.where(p2p & replayed, rows["seq"] + 1, 0)
        told[starts] = np.maximum(told[starts], self._replayed[slot[starts], 1])
        lift = np.repeat(np.arange(len(starts)), lengths) << 48
        told = np.maximum.accumulate(told + lift) - lift
        rows["number"] = REPLAYS_FROM + np.where(p2p, rows["seq"], ran - 1)
        for lane, before in enumerate((np.where(p2p, ran, ran - step), told)):
            rows["before"][:, lane] = before + np.where(before > 0, REPLAYS_FROM, 0)
        ends = np.append(starts[1:], len(rows)) - 1
        self._replayed[slot[ends], 0], self._replayed[slot[ends], 1] = ran[ends], told[ends]

    def _as_operations(self, rows: np.ndarray) -> Operations:
        n = len(rows)
        if not n:
            return empty_operations()
        slot = rows["key"] // KINDS
        p2p = rows["key"] % KINDS == P2P
        seq = self._number_before(slot, p2p.astype(np.int64), rows["start"]) + 1 + rows["number"]
        np.maximum.at(self.last_told, (slot, p2p.astype(np.int64)), seq)
        timed = rows["stop"] > 0
        sent, received = rows["bytes"].astype(np.uint64), rows["received"].astype(np.uint64)
        peers = np.minimum(rows["tasks"] // 2, 0xFFFF).astype(np.uint16)
        peers[~p2p] = 0
        zero = np.zeros(n, np.uint64)
        return Operations(
            slot=slot.astype(np.uint16),
            seq=seq.astype(np.uint32),
            lane=p2p.astype(np.uint8),
            op=np.where(p2p, np.uint8(Func.P2P_GROUP), rows["func"]),
            evidence=np.where(timed, np.uint8(DEVICE), np.uint8(ORDER)),
            flags=np.where(rows["func"] == Func.P2P_GROUP, np.uint8(GROUPED), np.uint8(0)),
            error=np.zeros(n, np.bool_),
            arrival_ns=rows["start"].astype(np.uint64),
            duration_ns=np.where(timed, rows["stop"] - rows["start"], 0).astype(np.uint64),
            bytes=np.where(sent > np.uint64(MAX_CALL_BYTES), zero, sent),
            root=rows["peer"].copy(),
            sync_blocked_ns=zero,
            # Totals in place of vectors: a combine returns what its dispatch sent.
            send_shape=np.where(p2p, (sent + np.uint64(1)) * _MULTIPLIER, zero),
            receive_shape=np.where(p2p, (received + np.uint64(1)) * _MULTIPLIER, zero),
            uniform=(sent == received) | ~p2p,
            send_peers=peers,
            receive_peers=peers,
        )

    def _number_before(self, slot: I64, lane: I64, start: I64) -> I64:
        """Number of the last matched operation of the lane before a time; -1: none."""
        found = self._last_number[slot, lane].copy()
        line = self._timeline
        if len(line):
            base = int(min(line["start"].min(), start.min()))
            width = int(max(line["start"].max(), start.max())) - base + 2
            at = np.searchsorted(
                line["lane"] * width + (line["start"] - base),
                (slot * 2 + lane) * width + (start - base),
            )
            at = np.maximum(at - 1, 0)
            known = (line["lane"][at] == slot * 2 + lane) & (line["start"][at] < start)
            found[known] = line["seq"][at][known]
        return found

    # -- calls ------------------------------------------------------------------------------

    def upgrade(
        self, operations: Operations, role: U8, start_ns: int, *, final: bool = False
    ) -> tuple[Operations, U8, Operations, U8]:
        """Ends a window that began at `start_ns`: its operations, sorted by slot -> (those to be
        sent one by one, their roles, of them those that a plugin has timed, their roles)."""
        # Read in the window before, and held back there for one window at most.
        settled = np.iinfo(np.int64).max if final else start_ns - READ_NS
        told = self._round - self._active[operations.slot] < ACTIVE_ROUNDS
        self._round += 1
        calls = told & (operations.evidence != DEVICE)
        if calls.any():
            # Only those that run: a failed call moves nothing, a captured one runs in replays.
            runs = calls & ~operations.error & ((operations.flags & CAPTURED) == 0)
            runs &= operations.duration_ns == 0
            self._calls.add(operations.take(runs), role[runs], self._round)
            rest = ~calls | operations.error
            operations, role = operations.take(rest), role[rest]
        timed, timed_role = self._timed(*self._calls.match(settled))
        self._tidy(start_ns)
        if not len(timed):
            return operations, role, timed, timed_role
        return (
            concatenate([operations, timed]),
            np.concatenate([role, timed_role]),
            timed,
            timed_role,
        )

    def _timed(self, rows: np.ndarray, calls: Operations, role: U8) -> tuple[Operations, U8]:
        slot, lane = calls.slot.astype(np.int64), calls.lane.astype(np.int64)
        seq = calls.seq.astype(np.int64)
        in_graphs = self._replaying[slot]
        if in_graphs.any():
            line = np.zeros(int(in_graphs.sum()), _TIMELINE)
            line["lane"] = (slot * 2 + lane)[in_graphs]
            line["start"], line["seq"] = rows["start"][in_graphs], seq[in_graphs]
            line = np.concatenate([self._timeline, line])
            self._timeline = line[np.lexsort((line["start"], line["lane"]))]
        plain = ~in_graphs
        np.maximum.at(self._last_number, (slot[plain], lane[plain]), seq[plain])
        timed = rows["stop"] > 0
        shifted = seq + rows["before"][np.arange(len(rows)), lane]
        np.maximum.at(self.last_told, (slot, lane), shifted)
        return replace(
            calls,
            seq=shifted.astype(np.uint32),
            evidence=np.where(timed, np.uint8(DEVICE), np.uint8(ORDER)),
            arrival_ns=rows["start"].astype(np.uint64),
            duration_ns=np.where(timed, rows["stop"] - rows["start"], 0).astype(np.uint64),
        ), role

    def _tidy(self, start_ns: int) -> None:
        self._calls.tidy(self._round)
        old = self._timeline["start"] < start_ns - 30 * 10**9
        if old.any():
            gone, self._timeline = self._timeline[old], self._timeline[~old]
            slot, lane = np.divmod(gone["lane"], 2)
            np.maximum.at(self._last_number, (slot, lane), gone["seq"])


def _replayed(rows: np.ndarray) -> Bool:
    replayed: Bool = (rows["flags"] & np.uint8(OpFlag.GRAPH)) != 0
    return replayed


def _starts(rows: np.ndarray, key: str, seq: str, flags: str) -> I64:
    """First row of each operation, of rows sorted by key, replayed or not, and number."""
    again = _replayed(rows)
    new = (rows[key][1:] != rows[key][:-1]) | (rows[seq][1:] != rows[seq][:-1])
    return np.flatnonzero(np.r_[True, new | (again[1:] != again[:-1])])
