"""Who is who: from (process, communicator pointer) to a slot, and from the slot to an identity.

A slot is a row number that a communicator keeps for its life. Pointers are forgotten on
destroy, abort and process exit; a pointer that is used again gets a new slot, and records are told
apart by their time. A slot that was given up stays out of use for some windows, so that operations
that still wait in `windows` keep their owner. Rows are bounded: when all are taken, the
communicator that was idle longest is forgotten, and counted in `evicted`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.agent import commhash, identity
from lanterne.agent.events import I64, NO_SLOT, U16, U64, Bool, CommTable, Records, rows_of
from lanterne.agent.identity import GLOO, NCCL, Communicator, LibraryFacts, ProcessFacts
from lanterne.agent.process import Processes
from lanterne.probes.layout import CommFlag, CommKind

QUARANTINE_ROUNDS = 8  # windows; more than windows' patience
MAX_ATTEMPTS = 14
FIRST_RETRY_NS = 20_000_000
LAST_RETRY_NS = 2_000_000_000
RECENT_NS = 2_000_000_000
MAX_PENDING = 1024
_TGID_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class _Ended:
    tgid: int
    pointer: int
    slot: int
    time_ns: int


@dataclass
class _Pending:
    """A creation whose pointer was not stored yet: a non-blocking or grouped init."""

    event: np.void
    call: tuple[int, int, int]  # tgid, address of the variable, time
    parent: Communicator | None
    number: int
    attempts: int = 0
    next_try_ns: int = 0


class Registry:
    """All communicators of this host; not thread-safe."""

    def __init__(
        self,
        *,
        libraries: Callable[[int], Sequence[LibraryFacts]],
        processes: Processes,
        limit: int = 4096,
        workload_variables: Sequence[str] = (),
        roles: Mapping[str, str] | None = None,
        gloo_probes: Iterable[int] = (),
        boot_id: str = "",
    ):
        # A quarter more rows than communicators: those in quarantine need a place, too.
        self.rows = min(limit + limit // 4 + 64, NO_SLOT)
        self._limit = limit
        self._libraries = libraries
        self._processes = processes
        self._variables = tuple(workload_variables)
        self._roles = roles or {}
        self._gloo_probes = frozenset(gloo_probes)
        self._boot_id = boot_id
        self._comms: dict[int, Communicator] = {}  # by slot, ended ones included
        self._by_key: dict[tuple[int, int], Communicator] = {}
        self._facts: dict[int, ProcessFacts] = {}
        self._free = list(range(self.rows))  # a heap: low numbers first keeps arrays short
        self._unresolved: dict[int, Communicator] = {}
        self._pending: deque[_Pending] = deque()
        self._calls: dict[tuple[int, int, int], tuple[Communicator | None, int]] = {}
        self._recent: deque[_Ended] = deque(maxlen=1024)
        self._quarantine: deque[Communicator] = deque()
        self._round = 0
        self._pointer = np.zeros(self.rows, np.uint64)
        self._tgid = np.zeros(self.rows, np.uint32)
        self._last_used = np.zeros(self.rows, np.uint64)
        self._n_ranks = np.zeros(self.rows, np.uint32)
        self._rank = np.zeros(self.rows, np.uint32)
        self._resolved = np.zeros(self.rows, np.bool_)
        self._complete = np.zeros(self.rows, np.bool_)
        self._keys: U64 = np.empty(0, np.uint64)
        self._key_slots: U16 = np.empty(0, np.uint16)
        self._stale = True
        self.evicted = 0
        self.failed_inits = 0
        self.pending_dropped = 0
        self.without_slot = 0  # operations with no row to go to

    # -- life -------------------------------------------------------------------------------

    def apply(self, events: Records) -> None:
        """Communicator events in the order of the ring; drained after the records they precede."""
        if len(events) > 1:
            events = events[np.argsort(events["time_ns"], kind="stable")]
        for event in events:
            self._apply_one(event)

    def _apply_one(self, event: np.void) -> None:
        kind, tgid, pointer = int(event["kind"]), int(event["tgid"]), int(event["comm"])
        time_ns = int(event["time_ns"])
        if kind in (CommKind.DESTROY, CommKind.ABORT):
            self._end(tgid, pointer, time_ns)
        elif kind == CommKind.FIRST_USE:
            self._first_use(event, tgid, pointer, time_ns)
        elif kind in (CommKind.FINALIZE, CommKind.REVOKE):
            return  # the pointer stays valid until destroy or abort
        elif int(event["rc"]) not in (0, 7):
            self.failed_inits += 1
        else:
            self._create(event, kind, tgid, pointer, time_ns)

    def _first_use(self, event: np.void, tgid: int, pointer: int, time_ns: int) -> None:
        comm = self._by_key.get((tgid, pointer)) or self._new(tgid, pointer, time_ns)
        if comm is None or comm.resolved:
            return
        self._set_library(comm, int(event["probe"]))
        identity.from_event(comm, event, self._version(tgid))
        self._try(comm, time_ns)

    def _create(self, event: np.void, kind: int, tgid: int, pointer: int, time_ns: int) -> None:
        # Inside a group a creation is told twice: at the call, and when its pointer is stored.
        call = (tgid, int(event["slot"]), time_ns)
        known = self._calls.get(call)
        parent, number = known or self._parent_of(event, kind, tgid, time_ns)
        if known is not None:
            self._pending = deque(p for p in self._pending if p.call != call)
        elif int(event["slot"]):
            self._calls[call] = parent, number
            if len(self._calls) > MAX_PENDING:
                del self._calls[next(iter(self._calls))]
        if kind == CommKind.SPLIT and int(event["color"]) < 0:
            return
        if pointer:
            self._born(event, pointer, parent, number, time_ns)
        elif int(event["flags"]) & CommFlag.PENDING and int(event["slot"]):
            if len(self._pending) >= MAX_PENDING:
                self._pending.popleft()
                self.pending_dropped += 1
            self._pending.append(_Pending(event.copy(), call, parent, number))

    def _parent_of(
        self, event: np.void, kind: int, tgid: int, time_ns: int
    ) -> tuple[Communicator | None, int]:
        """The parent and this child's number, counted at the call even if no child comes of it."""
        pointer = int(event["parent"])
        if kind not in (CommKind.SPLIT, CommKind.SHRINK, CommKind.GROW) or not pointer:
            return None, 0
        parent = self._by_key.get((tgid, pointer)) or self._new(tgid, pointer, time_ns)
        if parent is None:
            return None, -1
        if kind == CommKind.SHRINK:
            return parent, 0
        parent.children += 1
        return parent, parent.children if parent.complete else -1

    def _born(
        self, event: np.void, pointer: int, parent: Communicator | None, number: int, time_ns: int
    ) -> None:
        tgid, kind = int(event["tgid"]), int(event["kind"])
        comm = self._by_key.get((tgid, pointer))
        if comm is not None and comm.born_ns == time_ns:
            return  # told again
        self._end(tgid, pointer, time_ns)
        comm = self._new(tgid, pointer, time_ns)
        if comm is None:
            return
        comm.complete, comm.born_ns = True, time_ns
        if kind == CommKind.CONNECT:
            comm.library = GLOO
        identity.from_event(comm, event, self._version(tgid))
        if kind == CommKind.INIT_ALL:
            # The id is made inside the library. All ranks are here: the call itself names it.
            comm.comm_hash = commhash.stable_hash(
                "process", self._boot_id, str(tgid), str(comm.start_ticks), str(time_ns)
            )
            comm.identity = identity.PROCESS
        elif kind in (CommKind.SPLIT, CommKind.SHRINK):
            comm.parent, comm.child_number = parent, number
            comm.color = int(event["color"]) if kind == CommKind.SPLIT else 0
        elif kind == CommKind.GROW:
            identity.grown(comm, event, parent)
        self._try(comm, time_ns)

    def _new(self, tgid: int, pointer: int, time_ns: int) -> Communicator | None:
        if len(self._by_key) >= self._limit:
            self._evict(time_ns)
        facts = self._process(tgid)
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        comm = Communicator(slot, tgid, pointer, facts.start_ticks)
        comm.workload = identity.workload_of(facts.environ, self._variables)
        comm.library = self._only_library(tgid)
        self._comms[slot] = self._by_key[tgid, pointer] = comm
        self._unresolved[slot] = comm
        self._pointer[slot], self._tgid[slot] = pointer, tgid
        self._last_used[slot] = time_ns
        self._resolved[slot] = self._complete[slot] = False
        self._stale = True
        return comm

    def _end(self, tgid: int, pointer: int, time_ns: int) -> None:
        comm = self._by_key.pop((tgid, pointer), None)
        if comm is None:
            return
        self._recent.append(_Ended(tgid, pointer, comm.slot, time_ns))
        comm.ended_round = self._round
        comm.parent = None
        self._unresolved.pop(comm.slot, None)
        self._quarantine.append(comm)
        self._stale = True

    def _evict(self, time_ns: int) -> None:
        slots = np.fromiter((c.slot for c in self._by_key.values()), np.int64, len(self._by_key))
        idle = self._comms[int(slots[np.argmin(self._last_used[slots])])]
        self._end(idle.tgid, idle.pointer, time_ns)
        self.evicted += 1

    def forget_processes(self, pids: Iterable[int], now_ns: int) -> None:
        """Of processes that have ended: their pids may come back as something else."""
        gone = set(pids) & ({tgid for tgid, _ in self._by_key} | set(self._facts))
        if not gone:
            return
        for tgid, pointer in [key for key in self._by_key if key[0] in gone]:
            self._end(tgid, pointer, now_ns)
        for pid in gone:
            self._facts.pop(pid, None)
        self._pending = deque(p for p in self._pending if p.call[0] not in gone)

    def verify_processes(self, now_ns: int) -> None:
        """Drop what belongs to a pid that is gone or somebody else's by now."""
        dead = [
            pid
            for pid, facts in self._facts.items()
            if self._processes.start_ticks(pid) != facts.start_ticks
        ]
        self.forget_processes(dead, now_ns)

    def next_round(self) -> U16:
        """Call once a window, after it closed: slots that may be used anew from now on."""
        self._round += 1
        released: list[int] = []
        while (
            self._quarantine and self._quarantine[0].ended_round + QUARANTINE_ROUNDS <= self._round
        ):
            slot = self._quarantine.popleft().slot
            del self._comms[slot]
            self._resolved[slot] = False
            heapq.heappush(self._free, slot)
            released.append(slot)
        return np.array(released, np.uint16)

    # -- lookup -----------------------------------------------------------------------------

    def assign(self, records: Records) -> U16:
        """Slot of each record; unknown communicators get one. NO_SLOT where there is no room."""
        n = len(records)
        if not n:
            return np.empty(0, np.uint16)
        pointer, tgid = np.ascontiguousarray(records["comm"]), np.ascontiguousarray(records["tgid"])
        key = pointer + tgid * _TGID_FACTOR
        slots, missing = self._lookup(key, pointer, tgid)
        self._correct_ended(records, key, slots, missing)
        if missing.any():
            self._meet(records, slots, np.flatnonzero(missing))
        used = np.flatnonzero(np.bincount(slots, minlength=NO_SLOT + 1)[: self.rows])
        self._last_used[used] = records["enter_ns"].max()
        lost = int(np.count_nonzero(slots == NO_SLOT))
        self.without_slot += lost
        return slots

    def _lookup(
        self, key: U64, pointer: U64, tgid: np.ndarray[tuple[int], np.dtype[np.uint32]]
    ) -> tuple[U16, Bool]:
        if self._stale:
            self._index()
        if not len(self._keys):
            return np.full(len(key), NO_SLOT, np.uint16), np.ones(len(key), np.bool_)
        at = np.searchsorted(self._keys, key)
        at[at == len(self._keys)] = 0
        slots = self._key_slots[at]
        # The key mixes two numbers into one: compare both, a false match is a wrong owner.
        missing = (self._pointer[slots] != pointer) | (self._tgid[slots] != tgid)
        slots[missing] = NO_SLOT
        return slots, missing

    def _index(self) -> None:
        slots = np.fromiter((c.slot for c in self._by_key.values()), np.uint16, len(self._by_key))
        keys = self._pointer[slots] + self._tgid[slots] * _TGID_FACTOR
        order = np.argsort(keys)
        self._keys, self._key_slots = keys[order], slots[order]
        self._stale = False

    def _correct_ended(self, records: Records, key: U64, slots: U16, missing: Bool) -> None:
        """Records from before a communicator's end belong to it, whoever has the pointer now."""
        if not self._recent:
            return
        entered = records["enter_ns"]
        oldest, newest = int(entered.min()), int(entered.max())
        while self._recent and self._recent[0].time_ns + RECENT_NS < newest:
            self._recent.popleft()
        # Newest end first, so that the earliest end after a record has the last word.
        ended = [e for e in reversed(self._recent) if e.time_ns > oldest and e.slot in self._comms]
        if not ended:
            return
        keys = [_key(e.pointer, e.tgid) for e in ended]
        rows = np.flatnonzero(np.isin(key, np.array(keys, np.uint64)))
        if not len(rows):
            return
        some = rows_of(records, rows)
        for one in ended:
            mine = (some["comm"] == one.pointer) & (some["tgid"] == one.tgid)
            mine &= some["enter_ns"] < one.time_ns
            slots[rows[mine]] = one.slot
            missing[rows[mine]] = False

    def _meet(self, records: Records, slots: U16, rows: I64) -> None:
        """Communicators seen for the first time through an operation."""
        pairs = records[rows][["tgid", "comm"]]
        _, first, number = np.unique(pairs, return_index=True, return_inverse=True)
        found = np.full(len(first), NO_SLOT, np.uint16)
        for i, row in enumerate(rows[first]):
            record = records[row]
            tgid, pointer, now = int(record["tgid"]), int(record["comm"]), int(record["enter_ns"])
            comm = self._by_key.get((tgid, pointer)) or self._new(tgid, pointer, now)
            if comm is not None:
                found[i] = comm.slot
                self._set_library(comm, int(record["probe"]))
        slots[rows] = found[number]

    # -- identity ---------------------------------------------------------------------------

    def resolve(self, now_ns: int, *, at_most: int = 64) -> None:
        """Try again what is due; call often, it is cheap when nothing is."""
        for _ in range(len(self._pending)):
            self._retry_pending(self._pending.popleft(), now_ns)
        due = [comm for comm in self._unresolved.values() if comm.next_try_ns <= now_ns]
        for comm in due[:at_most]:
            self._try(comm, now_ns)

    def _retry_pending(self, pending: _Pending, now_ns: int) -> None:
        if pending.next_try_ns > now_ns:
            self._pending.append(pending)
            return
        event = pending.event
        data = self._processes.memory(int(event["tgid"]), int(event["slot"]), 8)
        pointer = int.from_bytes(data, "little") if data else 0
        if pointer and pointer != (1 << 64) - 1:
            # Its first operations may have come already, under a slot of the same pointer.
            early = self._by_key.get((int(event["tgid"]), pointer))
            if early is not None and not early.resolved:
                self._adopt(early, event, pending)
            else:
                self._born(event, pointer, pending.parent, pending.number, int(event["time_ns"]))
            return
        pending.attempts += 1
        pending.next_try_ns = now_ns + _pause(pending.attempts)
        if pending.attempts < MAX_ATTEMPTS:
            self._pending.append(pending)
        else:
            self.pending_dropped += 1

    def _adopt(self, comm: Communicator, event: np.void, pending: _Pending) -> None:
        comm.complete, comm.born_ns = True, int(event["time_ns"])
        identity.from_event(comm, event, self._version(comm.tgid))
        if int(event["kind"]) in (CommKind.SPLIT, CommKind.SHRINK):
            comm.parent, comm.child_number = pending.parent, pending.number
            comm.color = int(event["color"]) if int(event["kind"]) == CommKind.SPLIT else 0
        elif int(event["kind"]) == CommKind.GROW:
            identity.grown(comm, event, pending.parent)
        self._try(comm, int(event["time_ns"]))

    def _try(self, comm: Communicator, now_ns: int) -> None:
        """One attempt; a communicator stays in `_unresolved` until nothing more can be learned."""
        if comm.library == GLOO:
            identity.gloo(comm, self._process(comm.tgid))
        else:
            identity.derive(comm, self._version(comm.tgid))
            identity.from_structure(comm, self._processes, self._libraries(comm.tgid))
        if comm.resolved and (comm.bus_id or comm.library == GLOO or comm.attempts >= 4):
            self._unresolved.pop(comm.slot, None)
        comm.attempts += 1
        if comm.attempts >= MAX_ATTEMPTS and comm.resolved:
            self._unresolved.pop(comm.slot, None)
        comm.next_try_ns = now_ns + _pause(comm.attempts)
        comm.role = identity.role_of(comm.name, self._roles)
        slot = comm.slot
        self._complete[slot] = comm.complete
        self._resolved[slot] = comm.resolved
        if comm.resolved:
            self._n_ranks[slot], self._rank[slot] = comm.n_ranks, comm.rank

    def _process(self, tgid: int) -> ProcessFacts:
        facts = self._facts.get(tgid)
        if facts is None:
            facts = self._facts[tgid] = ProcessFacts(
                self._processes.start_ticks(tgid) or 0,
                self._processes.session(tgid),
                self._processes.environ(tgid),
            )
        return facts

    def _set_library(self, comm: Communicator, probe: int) -> None:
        if self._gloo_probes:
            comm.library = GLOO if probe in self._gloo_probes else NCCL

    def _only_library(self, tgid: int) -> int:
        kinds = {library.kind for library in self._libraries(tgid)} - {"cuda"}
        return GLOO if kinds == {"gloo"} else NCCL

    def _version(self, tgid: int) -> int | None:
        versions = (lib.nccl_version for lib in self._libraries(tgid) if lib.kind == "nccl")
        return next((version for version in versions if version), None)

    # -- what others see --------------------------------------------------------------------

    def table(self) -> CommTable:
        return CommTable(self._n_ranks, self._rank, self._resolved, self._complete)

    @property
    def unresolved(self) -> int:
        """Communicators that are alive and not identified."""
        return sum(not comm.resolved for comm in self._unresolved.values()) + len(self._pending)

    def unresolved_reasons(self) -> dict[str, int]:
        reasons: dict[str, int] = {}
        for comm in self._unresolved.values():
            if not comm.resolved:
                reasons[comm.reason] = reasons.get(comm.reason, 0) + 1
        return reasons

    def describe(self, slots: Iterable[int]) -> list[Communicator]:
        """Communicators of slots, also of those that ended within the last windows."""
        return [self._comms[slot] for slot in slots]

    def alive(self) -> list[Communicator]:
        """Identified and not ended, by slot."""
        return sorted((c for c in self._by_key.values() if c.resolved), key=lambda c: c.slot)

    def pids(self) -> set[int]:
        return {tgid for tgid, _ in self._by_key}


def _pause(attempts: int) -> int:
    return min(FIRST_RETRY_NS << min(attempts, 10), LAST_RETRY_NS)


def _key(pointer: int, tgid: int) -> int:
    """What `assign` computes for whole columns."""
    return (pointer + tgid * int(_TGID_FACTOR)) & commhash.MASK
