"""From what was seen of a communicator's creation to its cluster-wide identity.

Order of sources: the arguments of the call that made it; for children the parent's hash; the
structure in memory; NCCL's RAS service; for Gloo the store prefix with the rendezvous address, else
the job's environment. Functions here fill in a Communicator; `resolved` says whether it is enough.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lanterne.agent import commhash, structure
from lanterne.agent.process import MAX_TEXT, Processes, printable
from lanterne.agent.structure import MAX_RANKS, Offsets
from lanterne.probes.layout import CommFlag, CommKind

NCCL, GLOO, DEEPEP = 1, 2, 3  # telemetry.proto Library
DEEPEP_TAG = 0xDEE9  # upper 16 bits of the number that stands for a DeepEP buffer's ranks
PATIENT_ATTEMPTS = 6  # until a DeepEP exchange is named without an NCCL communicator; some 0.7 s
INIT_ARGUMENTS, DERIVED, STRUCTURE, STORE, ENVIRONMENT, PROCESS, RAS = range(1, 8)  # Identity
MAX_ATTEMPTS = 14
RAS_AFTER = 6  # attempts without RAS; some 1.3 s
FIRST_RETRY_NS = 20_000_000
LAST_RETRY_NS = 2_000_000_000


class LibraryFacts(Protocol):
    """What identification needs of agent.attach.AttachedLibrary."""

    @property
    def kind(self) -> str: ...
    @property
    def nccl_version(self) -> int | None: ...
    @property
    def comm_offsets(self) -> Offsets | None: ...


@dataclass(slots=True)
class Communicator:
    """One rank of one communicator on this host."""

    slot: int
    tgid: int
    pointer: int
    start_ticks: int
    library: int = NCCL
    comm_hash: int = 0
    n_ranks: int = 0
    rank: int = -1
    name: str = ""
    identity: int = 0
    complete: bool = False
    parent_hash: int = 0
    workload: str = ""
    bus_id: str = ""
    role: str = ""
    store: str = ""  # Gloo: HOST:PORT of the rendezvous store
    born_ns: int = 0  # of the event that told of its creation; 0: met in use
    parent: Communicator | None = None  # while the child's hash waits for it
    color: int = -1
    child_number: int = 0  # which child of the parent, from 1; 0 of a shrink; -1 unknown
    children: int = 0  # split and grow calls on it so far
    magic: int = 0  # bootstrap magic, 0 unknown: a grow needs it
    attempts: int = 0
    next_try_ns: int = 0
    reason: str = "not seen being created"
    ended_round: int = -1
    ras_answer: int = 0  # number of the last one that was looked at
    replays_numbered: bool | None = None  # see device; None: no plugin told of it yet

    @property
    def resolved(self) -> bool:
        return self.comm_hash != 0 and 0 <= self.rank < self.n_ranks


_EXPERT = re.compile(r"(?<![a-z])(?:ep|experts?|moe)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class ProcessFacts:
    start_ticks: int
    session: int
    environ: Mapping[str, str]
    contexts: dict[int, int] = field(default_factory=dict)  # Gloo contexts made, by size


def from_event(comm: Communicator, event: np.void, version: int | None) -> None:
    """A creating event's own arguments: id, rank, size, name."""
    flags, kind = int(event["flags"]), int(event["kind"])
    if flags & CommFlag.NAME:
        comm.name = printable(bytes(event["name"]).decode("utf-8", "replace"), 64)
    if kind == CommKind.CONNECT and int(event["key"]) > 0:
        # Without the ID flag the field carries the host of the store, and `key` its port.
        host = event["id"].tobytes().split(b"\0", 1)[0].decode("utf-8", "replace")
        comm.store = f"{printable(host, 64)}:{int(event['key'])}" if host else ""
    if flags & CommFlag.RANK:
        n_ranks, rank = int(event["n_ranks"]), int(event["rank"])
        if 1 <= n_ranks <= MAX_RANKS and 0 <= rank < n_ranks:
            comm.n_ranks, comm.rank = n_ranks, rank
    if flags & CommFlag.ID and comm.library == NCCL:
        unique_id = event["id"].tobytes()
        if kind == CommKind.INIT:
            comm.comm_hash = commhash.unique_id_hash(unique_id, version)
            comm.magic = int.from_bytes(unique_id[:8], "little")
            comm.identity = INIT_ARGUMENTS
        elif kind != CommKind.GROW and not any(unique_id[8:]):
            comm.comm_hash = int.from_bytes(unique_id[:8], "little")
            comm.identity = STRUCTURE


def derive(comm: Communicator, version: int | None) -> None:
    """A child's hash, as soon as the parent's is known. Its rank is learned elsewhere."""
    parent = comm.parent
    if parent is None or comm.comm_hash:
        return
    if not parent.resolved:
        comm.reason = "parent not identified"
        return
    comm.parent_hash = parent.comm_hash
    counted = version is None or version >= commhash.COUNT_SINCE
    if comm.child_number < 0 and counted:
        comm.reason = "children of the parent were made before the agent came"
        return
    comm.comm_hash = comm.magic = commhash.split_hash(
        parent.comm_hash, max(comm.child_number, 0), comm.color, version
    )
    comm.identity = DERIVED


def grown(comm: Communicator, event: np.void, parent: Communicator | None) -> None:
    """A grown communicator: existing ranks know the parent, new ones the id they were handed."""
    n_ranks, rank = int(event["n_ranks"]), int(event["rank"])
    base = 0
    if parent is not None:
        comm.parent_hash = parent.comm_hash
        if parent.magic and parent.complete:
            base = commhash.combine(parent.magic, parent.children)
        if rank < 0:
            rank = parent.rank
    elif int(event["flags"]) & CommFlag.ID:
        base = int.from_bytes(event["id"].tobytes()[:8], "little")
    if 1 <= n_ranks <= MAX_RANKS:
        comm.n_ranks = n_ranks
        comm.rank = rank if rank < n_ranks else -1
        if base:
            comm.magic = base
            comm.comm_hash = commhash.combine(base, n_ranks)
            comm.identity = DERIVED


def from_structure(
    comm: Communicator, processes: Processes, libraries: Sequence[LibraryFacts]
) -> bool:
    """Read the structure; what it says wins over what was derived, not over init arguments.

    -> whether it could be read. During an asynchronous init rank and size come before the hash.
    """
    nccl = [lib for lib in libraries if lib.kind == "nccl"]
    offsets = list(dict.fromkeys(lib.comm_offsets for lib in nccl if lib.comm_offsets))
    if not offsets:
        comm.reason = "no structure offsets for this libnccl"
        return False
    readings = [structure.read(processes, comm.tgid, comm.pointer, one) for one in offsets]
    candidates = list(dict.fromkeys(reading for reading in readings if reading is not None))
    if not candidates:
        comm.reason = "structure not readable or not yet valid"
        return False
    if comm.identity in (INIT_ARGUMENTS, PROCESS):
        # A structure that contradicts the arguments is not this communicator (any more).
        same = [one for one in candidates if (one.rank, one.n_ranks) == (comm.rank, comm.n_ranks)]
        found = _likely(same)
        if found is not None:
            comm.bus_id = found.bus_id
            if comm.identity == INIT_ARGUMENTS and found.bus_id and _several_versions(nccl):
                # The arguments do not say which library was called, so which hash it computes.
                comm.comm_hash = found.comm_hash
        return True
    found = _likely(candidates)
    if found is None:
        comm.reason = "structure makes sense for more than one libnccl of the process"
        return False
    if comm.identity != DERIVED or found.comm_hash != comm.comm_hash:
        comm.identity = STRUCTURE
    comm.comm_hash, comm.rank, comm.n_ranks = found.comm_hash, found.rank, found.n_ranks
    comm.bus_id = found.bus_id
    return True


class Told(Protocol):
    """What NCCL's RAS service says of one rank (agent.ras_answer.Member)."""

    @property
    def comm_hash(self) -> int: ...
    @property
    def n_ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...


def from_ras(comm: Communicator, processes: Processes, told: Sequence[Told]) -> None:
    """Of a process that is these ranks, which one this communicator is: by what is in its memory,
    so that neither another process of that number nor a made-up answer gives it a name."""
    known = {(one.comm_hash, one.rank, one.n_ranks) for one in told}
    if comm.n_ranks and comm.rank >= 0:
        known = {one for one in known if one[1:] == (comm.rank, comm.n_ranks)}
    found = structure.find(processes, comm.tgid, comm.pointer, known)
    if found is None:
        comm.reason = "none of the communicators that NCCL RAS tells of is in its memory"
        return
    comm.comm_hash, comm.rank, comm.n_ranks = found.comm_hash, found.rank, found.n_ranks
    comm.bus_id = found.bus_id
    comm.identity = RAS


def _likely(candidates: Sequence[structure.Structure]) -> structure.Structure | None:
    """The one reading, or the only one with a bus id that makes sense: with two libraries in a
    process, offsets of the wrong one may show numbers that would do."""
    with_bus = [one for one in candidates if one.bus_id]
    chosen = with_bus or candidates
    return chosen[0] if len(chosen) == 1 else None


def _several_versions(libraries: Sequence[LibraryFacts]) -> bool:
    return len({library.nccl_version for library in libraries}) > 1


def gloo(comm: Communicator, facts: ProcessFacts) -> None:
    """Hash of a Gloo context. Needs its size and rank; the name is the prefix in the store.

    The store's address, or MASTER_ADDR and MASTER_PORT of the environment at exec, and the prefix
    name it on every host. Without an address the workload does, or on one host the login session;
    without a prefix the order in which the process made its contexts of this size.
    """
    if comm.resolved:
        return
    if not 0 <= comm.rank < comm.n_ranks:
        comm.reason = "size and rank not seen yet"
        return
    env = facts.environ
    address = env.get("MASTER_ADDR", "")
    store = comm.store or (f"{address}:{env.get('MASTER_PORT', '')}" if address else "")
    size = str(comm.n_ranks)
    if comm.name and store:
        comm.comm_hash = commhash.stable_hash("gloo", comm.name, store, size)
        comm.identity = STORE
        return
    number = facts.contexts[comm.n_ranks] = facts.contexts.get(comm.n_ranks, 0) + 1
    where = store or comm.workload or f"session {facts.session}"
    label = comm.name or f"context {number}"
    comm.comm_hash = commhash.stable_hash("gloo", label, where, size)
    comm.identity = ENVIRONMENT


def experts(comm: Communicator, facts: ProcessFacts, siblings: Sequence[Communicator]) -> None:
    """Hash of the ranks that exchange through DeepEP, whose launchers tell rank and size only.

    Where they are the whole job (WORLD_SIZE), MASTER_ADDR and MASTER_PORT name them on every host.
    Else the NCCL communicator of the same process with the same rank and size does: one that is
    called expert-parallel, or the only one, or the one made first if all were seen being made (a
    job's ranks make theirs in one order). Without one, after some patience, the environment and
    the size: wrong where one job has two such groups, whose ranks then collide and are refused.
    """
    same = [
        other
        for other in siblings
        if other.library == NCCL
        and other.resolved
        and (other.n_ranks, other.rank) == (comm.n_ranks, comm.rank)
    ]
    comm.name = "deepep"
    comm.bus_id = next((other.bus_id for other in siblings if other.bus_id), "")
    if comm.resolved:
        return
    if not 0 <= comm.rank < comm.n_ranks:
        comm.reason = "size and rank not seen yet"
        return
    env, size = facts.environ, str(comm.n_ranks)
    address = env.get("MASTER_ADDR", "")
    store = f"{address}:{env.get('MASTER_PORT', '')}" if address else ""
    whole_job = store and env.get("WORLD_SIZE") == size
    chosen = None if whole_job else _of_experts(same)
    if chosen is not None:
        comm.parent_hash = chosen.comm_hash
        comm.comm_hash = commhash.stable_hash("deepep", f"{chosen.comm_hash:016x}", size)
        comm.identity = DERIVED
    elif whole_job or comm.attempts >= PATIENT_ATTEMPTS:
        where = store or comm.workload or f"session {facts.session}"
        comm.comm_hash = commhash.stable_hash("deepep", where, size)
        comm.identity = ENVIRONMENT
    else:
        comm.reason = "no NCCL communicator of the same rank and size seen yet"


def _of_experts(same: Sequence[Communicator]) -> Communicator | None:
    named = [other for other in same if is_expert(other.name, other.role)]
    candidates = named or same
    if len({other.comm_hash for other in candidates}) <= 1:
        return candidates[0] if candidates else None
    if all(other.born_ns for other in candidates):
        return min(candidates, key=lambda other: other.born_ns)
    return None


def is_expert(name: str, role: str) -> bool:
    """Whether a communicator's name or configured role calls it expert-parallel."""
    return bool(_EXPERT.search(role.replace("_", " ")) or _EXPERT.search(name.replace("_", " ")))


def workload_of(environ: Mapping[str, str], variables: Sequence[str]) -> str:
    for variable in variables:
        value = environ.get(variable, "").strip()
        if value:
            return printable(value, MAX_TEXT)
    return ""


def role_of(name: str, roles: Mapping[str, str]) -> str:
    return next((role for glob, role in roles.items() if fnmatch.fnmatchcase(name, glob)), "")


def pause_ns(attempts: int) -> int:
    """Until the next attempt to learn what is not known yet."""
    return min(FIRST_RETRY_NS << min(attempts, 10), LAST_RETRY_NS)
