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
from typing import Protocol

import numpy as np

from lanterne.agent import commhash, identity
from lanterne.agent.creations import Creations, Pending
from lanterne.agent.events import I64, NO_SLOT, U16, Bool, CommTable, Records
from lanterne.agent.identity import (
    DEEPEP,
    DEEPEP_TAG,
    GLOO,
    MAX_ATTEMPTS,
    NCCL,
    RAS_AFTER,
    Communicator,
    LibraryFacts,
    ProcessFacts,
    pause_ns,
)
from lanterne.agent.lookup import Lookup
from lanterne.agent.process import Processes
from lanterne.agent.structure import MAX_RANKS
from lanterne.probes.layout import CommFlag, CommKind

QUARANTINE_ROUNDS = 8  # windows; more than windows' patience, and than a group is held


class RasAnswer(Protocol):
    """Of agent.ras."""

    @property
    def number(self) -> int: ...
    @property
    def members(self) -> Sequence[identity.Told]: ...
    @property
    def reason(self) -> str: ...


class RasService(Protocol):
    """agent.ras.Ras; both return at once."""

    def answer(self, pid: int) -> RasAnswer | None: ...
    def forget(self, pids: Iterable[int]) -> None: ...


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
        plugins_since: Callable[[], int] = lambda: 0,
        ras: RasService | None = None,
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
        # Since when every profiler plugin is listened to, CLOCK_MONOTONIC ns; 0: none is.
        self._plugins_since = plugins_since
        self._ras = ras
        self._comms: dict[int, Communicator] = {}  # by slot, ended ones included
        self._held: dict[int, bool] = {}  # see `holders`
        self._by_key: dict[tuple[int, int], Communicator] = {}
        self._facts: dict[int, ProcessFacts] = {}
        self._free = list(range(self.rows))  # a heap: low numbers first keeps arrays short
        self._told: dict[tuple[int, int, int], int] = {}  # by a plugin: slot
        self._unresolved: dict[int, Communicator] = {}
        self._creations = Creations(processes)
        self._lookup = Lookup(self.rows)
        self._quarantine: deque[Communicator] = deque()
        self._round = 0
        self._n_ranks = np.zeros(self.rows, np.uint32)
        self._rank = np.zeros(self.rows, np.uint32)
        self._resolved = np.zeros(self.rows, np.bool_)
        self._complete = np.zeros(self.rows, np.bool_)
        self._expert = np.zeros(self.rows, np.bool_)
        self.evicted = 0
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
            self._creations.lost["failed"] += 1
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
        call = (tgid, int(event["slot"]), time_ns)
        known = self._creations.origin(call)
        origin = known or self._parent_of(event, kind, tgid, time_ns)
        if known is None:
            self._creations.remember(call, origin)
        if kind == CommKind.SPLIT and int(event["color"]) < 0:
            return
        if pointer:
            self._born(event, pointer, *origin, time_ns)
        elif int(event["flags"]) & CommFlag.PENDING and int(event["slot"]):
            self._creations.add(event, call, origin)
        else:
            self._creations.lost["no_pointer"] += 1

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
            self._creations.lost["no_room"] += 1
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
        comm.library = DEEPEP if pointer >> 48 == DEEPEP_TAG else self._only_library(tgid)
        self._comms[slot] = self._by_key[tgid, pointer] = comm
        self._unresolved[slot] = comm
        self._lookup.put(slot, tgid, pointer, time_ns)
        self._resolved[slot] = self._complete[slot] = self._expert[slot] = False
        return comm

    def _end(self, tgid: int, pointer: int, time_ns: int) -> None:
        comm = self._by_key.pop((tgid, pointer), None)
        if comm is None:
            return
        self._lookup.end(comm.slot, tgid, pointer, time_ns)
        comm.ended_round = self._round
        _hold(self._held, comm)
        comm.parent = None
        self._unresolved.pop(comm.slot, None)
        self._quarantine.append(comm)

    def _evict(self, time_ns: int) -> None:
        idle = self._comms[self._lookup.idle_longest()]
        self._end(idle.tgid, idle.pointer, time_ns)
        self.evicted += 1

    def forget_processes(self, pids: Iterable[int], now_ns: int) -> None:
        """Of processes that have ended: their pids may come back as something else."""
        gone = set(pids) & (self.pids() | set(self._facts) | self._creations.pids())
        if not gone:
            return
        for tgid, pointer in [key for key in self._by_key if key[0] in gone]:
            self._end(tgid, pointer, now_ns)
        for pid in gone:
            self._facts.pop(pid, None)
        self._creations.forget(gone)
        if self._ras is not None:
            self._ras.forget(gone)

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
            self._lookup.release(slot)
            self._resolved[slot] = False
            heapq.heappush(self._free, slot)
            released.append(slot)
        return np.array(released, np.uint16)

    # -- lookup -----------------------------------------------------------------------------

    def assign(self, records: Records) -> U16:
        """Slot of each record; unknown communicators get one. NO_SLOT where there is no room."""
        if not len(records):
            return np.empty(0, np.uint16)
        slots, missing = self._lookup.find(records)
        if missing.any():
            self._meet(records, slots, np.flatnonzero(missing))
        self._lookup.used(slots, int(records["enter_ns"].max()))
        self.without_slot += int(np.count_nonzero(slots == NO_SLOT))
        return slots

    def find(self, records: Records) -> U16:
        """Slot of each record; NO_SLOT where its communicator has none."""
        if not len(records):
            return np.empty(0, np.uint16)
        return self._lookup.find(records)[0]

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

    def assign_device(self, records: Records) -> tuple[U16, Bool]:
        """Slot of each layout.DEVICE row, NO_SLOT where it may still become known; and whether the
        plugin was listened to from the beginning of the communicator, or the collector has to find
        out how its numbers stand to the others' anyway."""
        names = ["tgid", "comm_hash", "rank", "n_ranks"]
        who = np.ascontiguousarray(np.stack([records[n].astype(np.uint64) for n in names], axis=1))
        different, number = np.unique(who, axis=0, return_inverse=True)
        slots = np.full(len(different), NO_SLOT, np.uint16)
        trusted = np.zeros(len(different), np.bool_)
        for i, (tgid, comm_hash, rank, n_ranks) in enumerate(different.tolist()):
            comm = self._of_plugin(tgid, comm_hash, rank, n_ranks, int(records["enqueue_ns"].max()))
            if comm is not None:
                slots[i] = comm.slot
                trusted[i] = self._replays_numbered(comm)
        slots = slots[number.reshape(-1)]
        self._lookup.used(slots, int(records["enqueue_ns"].max()))
        return slots, trusted[number.reshape(-1)]

    def assign_backends(self, records: Records) -> U16:
        """Slot of the communicator that a process group of PyTorch uses, of records of func Splits:
        the only one of Gloo in its process with its rank and size; NO_SLOT where there are more."""
        names = ("tgid", "peer", "seq")
        who = np.stack([records[name].astype(np.int64) for name in names], axis=1)
        different, number = np.unique(who, axis=0, return_inverse=True)
        slots = np.full(len(different), NO_SLOT, np.uint16)
        for i, (tgid, rank, size) in enumerate(different.tolist()):
            fitting = [
                comm.slot
                for (pid, _), comm in self._by_key.items()
                if (pid, comm.library, comm.rank, comm.n_ranks) == (tgid, GLOO, rank, size)
            ]
            if len(fitting) == 1:
                slots[i] = fitting[0]
        found: U16 = slots[number.reshape(-1)]
        return found

    def _replays_numbered(self, comm: Communicator) -> bool:
        if comm.replays_numbered is None:
            since = self._plugins_since()
            comm.replays_numbered = not comm.complete or 0 < since < comm.born_ns
        return comm.replays_numbered

    def _of_plugin(
        self, tgid: int, comm_hash: int, rank: int, n_ranks: int, now_ns: int
    ) -> Communicator | None:
        who = (tgid, comm_hash, rank)
        known = self._comms.get(self._told.get(who, -1))
        same = known is not None and (known.tgid, known.comm_hash, known.rank) == who
        if known is not None and same and known.ended_round < 0:
            return known
        found = None
        unknown = False
        for comm in self._comms.values():
            if comm.tgid != tgid or comm.library != NCCL:
                continue
            unknown |= not comm.resolved and comm.ended_round < 0 and comm.attempts < 8
            if (comm.comm_hash, comm.rank) == (comm_hash, rank):
                found = comm if found is None or comm.ended_round < 0 else found
        if found is None and not unknown and 0 <= rank < n_ranks <= MAX_RANKS and comm_hash:
            # It was made before the agent came and makes no call: it runs in graphs.
            found = self._new(tgid, _plugin_pointer(comm_hash, rank), now_ns)
            if found is not None:
                found.comm_hash, found.rank, found.n_ranks = comm_hash, rank, n_ranks
                found.library, found.identity = NCCL, identity.STRUCTURE
                self._unresolved.pop(found.slot, None)
                self._resolved[found.slot] = True
                self._n_ranks[found.slot], self._rank[found.slot] = n_ranks, rank
        if found is not None:
            if len(self._told) >= self.rows:
                self._told.clear()
            self._told[who] = found.slot
        return found

    # -- identity ---------------------------------------------------------------------------

    def resolve(self, now_ns: int, *, at_most: int = 64) -> None:
        """Try again what is due; call often, it is cheap when nothing is."""
        for pointer, pending in self._creations.stored(now_ns):
            self._stored(pointer, pending)
        due = [comm for comm in self._unresolved.values() if comm.next_try_ns <= now_ns]
        for comm in due[:at_most]:
            self._try(comm, now_ns)

    def _stored(self, pointer: int, pending: Pending) -> None:
        event = pending.event
        # Its first operations may have come already, under a slot of the same pointer.
        early = self._by_key.get((int(event["tgid"]), pointer))
        if early is not None and not early.resolved:
            self._adopt(early, event, pending)
        else:
            self._born(event, pointer, pending.parent, pending.number, int(event["time_ns"]))

    def _adopt(self, comm: Communicator, event: np.void, pending: Pending) -> None:
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
        elif comm.library == DEEPEP:
            of_process = [c for (tgid, _), c in self._by_key.items() if tgid == comm.tgid]
            identity.experts(comm, self._process(comm.tgid), of_process)
        else:
            identity.derive(comm, self._version(comm.tgid))
            identity.from_structure(comm, self._processes, self._libraries(comm.tgid))
            if not comm.resolved and comm.attempts >= RAS_AFTER:
                self._ask_ras(comm)
        comm.attempts += 1
        # NCCL's bus id is in the structure, and its offsets are known only when a scan has met the
        # process: seconds after its first call, where another process had the library attached.
        patience = MAX_ATTEMPTS if comm.library == NCCL else 5
        if comm.resolved and (comm.bus_id or comm.library == GLOO or comm.attempts >= patience):
            self._unresolved.pop(comm.slot, None)
        comm.next_try_ns = now_ns + pause_ns(comm.attempts)
        comm.role = identity.role_of(comm.name, self._roles)
        self._expert[comm.slot] = identity.is_expert(comm.name, comm.role)
        slot = comm.slot
        self._complete[slot] = comm.complete
        self._resolved[slot] = comm.resolved
        if comm.resolved:
            self._n_ranks[slot], self._rank[slot] = comm.n_ranks, comm.rank
            # What a plugin told of it before it was met goes to it from now on.
            if self._told.get((comm.tgid, comm.comm_hash, comm.rank), slot) != slot:
                del self._told[comm.tgid, comm.comm_hash, comm.rank]
                self._end(comm.tgid, _plugin_pointer(comm.comm_hash, comm.rank), now_ns)

    def _ask_ras(self, comm: Communicator) -> None:
        answer = self._ras.answer(comm.tgid) if self._ras is not None else None
        if answer is None:
            return
        if answer.reason:
            comm.reason = f"{comm.reason}; {answer.reason}"
        elif answer.number != comm.ras_answer:  # the search is for new answers only
            comm.ras_answer = answer.number
            identity.from_ras(comm, self._processes, answer.members)

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
        if self._gloo_probes and comm.library != DEEPEP:
            comm.library = GLOO if probe in self._gloo_probes else NCCL

    def _only_library(self, tgid: int) -> int:
        kinds = {library.kind for library in self._libraries(tgid)} - {
            "cuda",
            "deepep",
            "nccl_ep",
            "parcagpu",
            "profiler",
            "torch",
        }
        return GLOO if kinds == {"gloo"} else NCCL

    def _version(self, tgid: int) -> int | None:
        versions = (lib.nccl_version for lib in self._libraries(tgid) if lib.kind == "nccl")
        return next((version for version in versions if version), None)

    # -- what others see --------------------------------------------------------------------

    def table(self) -> CommTable:
        return CommTable(self._n_ranks, self._rank, self._resolved, self._complete, self._expert)

    @property
    def creations_lost(self) -> dict[str, int]:
        """Calls that should have made a communicator, and none is known of them, by reason."""
        return dict(self._creations.lost)

    @property
    def unresolved(self) -> int:
        """Communicators that are alive and not identified."""
        return sum(not comm.resolved for comm in self._unresolved.values()) + len(self._creations)

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

    def holders(self) -> dict[int, bool]:
        """Processes that hold a communicator on GPUs, or did since this was last asked -> whether
        one is older than the agent."""
        found, self._held = self._held, {}
        for comm in self._by_key.values():
            _hold(found, comm)
        return found

    def pids(self) -> set[int]:
        return {tgid for tgid, _ in self._by_key}


def _hold(held: dict[int, bool], comm: Communicator) -> None:
    if comm.library != GLOO:
        held[comm.tgid] = held.get(comm.tgid, False) or not comm.complete


def _plugin_pointer(comm_hash: int, rank: int) -> int:
    """In the place of a pointer that only a plugin's word stands for: no address is odd or as high.
    Ranks of one communicator may share a process."""
    mixed = (comm_hash + rank * 0x9E3779B97F4A7C15) & commhash.MASK
    return mixed | (1 << 63) | 1
