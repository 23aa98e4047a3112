"""Who is who: pointers to identities, over a communicator's whole life, on a made-up /proc."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from agent_arrays import BASE_NS, comm_event, record, records

from lanterne.agent import commhash, identity, structure
from lanterne.agent.comms import QUARANTINE_ROUNDS, Registry
from lanterne.agent.creations import MAX_PENDING
from lanterne.agent.events import NO_SLOT
from lanterne.agent.identity import MAX_ATTEMPTS, RAS_AFTER, Communicator
from lanterne.agent.process import Processes
from lanterne.agent.ras import Answer
from lanterne.agent.ras_answer import Member
from lanterne.probes import layout
from lanterne.probes.layout import CommFlag, CommKind

UNIQUE_ID = bytes((37 * i + 11) & 255 for i in range(128))
OLD_HASH, NEW_HASH = 0x65BB3B0CBA527185, 0x3002DCD1BBE6653D
SECOND = 10**9


@dataclass(frozen=True)
class Offsets:
    comm_hash: int = 0x100
    rank: int = 0x108
    n_ranks: int = 0x10C
    cuda_dev: int = 0x110
    bus_id: int = 0x128
    has_magic: bool = True
    source: str = "build_id"


@dataclass(frozen=True)
class Library:
    kind: str = "nccl"
    nccl_version: int | None = 22809
    comm_offsets: Offsets | None = Offsets()


class Host:
    """A /proc in a folder; memory is a sparse file."""

    def __init__(self, root: Path):
        self.root = root

    def process(self, pid: int, *, ticks: int = 500, session: int = 3, **environ: str) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", "1", "1", str(session)] + ["0"] * 15 + [str(ticks)] + ["0"] * 10
        (folder / "stat").write_text(f"{pid} (a) b ( x) {' '.join(fields)}\n")
        (folder / "environ").write_bytes(
            b"\0".join(f"{k}={v}".encode() for k, v in environ.items()) + b"\0"
        )
        (folder / "mem").touch()

    def write(self, pid: int, address: int, data: bytes) -> None:
        with (self.root / str(pid) / "mem").open("r+b") as file:
            file.seek(address)
            file.write(data)

    def structure(
        self, pid: int, comm: int, *, comm_hash: int, rank: int, n_ranks: int, bus: int = 0x3B000
    ) -> None:
        self.write(pid, comm, struct.pack("<Q", structure.MAGIC))
        self.write(pid, comm + 0x100, struct.pack("<Qii", comm_hash, rank, n_ranks))
        self.write(pid, comm + 0x128, struct.pack("<q", bus))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.process(10, LANTERNE_WORKLOAD="train-7", MASTER_ADDR="node0", MASTER_PORT="29500")
    return host


def registry(host: Host, *libraries: Library, **options: object) -> Registry:
    settings = {"workload_variables": ("LANTERNE_WORKLOAD", "SLURM_JOB_ID")} | options
    return Registry(
        libraries=lambda _: libraries or (Library(),),
        processes=Processes(host.root),
        **settings,  # type: ignore[arg-type]
    )


def init(comm: int = 0x1000, **fields: object) -> np.ndarray:  # type: ignore[type-arg]
    known = {"id": UNIQUE_ID, "n_ranks": 8, "rank": 3, "flags": CommFlag.ID | CommFlag.RANK}
    return comm_event(CommKind.INIT, comm=comm, **(known | fields))


def only(found: Registry) -> Communicator:
    (comm,) = found.alive()
    return comm


# -- identity ------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "expected"), [(22105, OLD_HASH), (22809, NEW_HASH)])
def test_init_arguments_identify(host: Host, version: int, expected: int) -> None:
    found = registry(host, Library(nccl_version=version, comm_offsets=None))
    found.apply(init(name=b"ep_group", flags=CommFlag.ID | CommFlag.RANK | CommFlag.NAME))
    comm = only(found)
    assert (comm.comm_hash, comm.rank, comm.n_ranks) == (expected, 3, 8)
    assert (comm.identity, comm.complete) == (identity.INIT_ARGUMENTS, True)
    assert (comm.workload, comm.start_ticks, comm.name) == ("train-7", 500, "ep_group")
    assert found.unresolved == 0


def test_the_bus_id_comes_from_the_structure(host: Host) -> None:
    found = registry(host)
    host.structure(10, 0x1000, comm_hash=NEW_HASH, rank=3, n_ranks=8, bus=0x3B000)
    found.apply(init())
    assert only(found).bus_id == "0000:3b:00.0"
    assert only(found).identity == identity.INIT_ARGUMENTS


def test_a_structure_that_contradicts_the_arguments_is_not_believed(host: Host) -> None:
    found = registry(host)
    host.structure(10, 0x1000, comm_hash=1, rank=0, n_ranks=2)
    found.apply(init())
    comm = only(found)
    assert (comm.comm_hash, comm.rank, comm.bus_id) == (NEW_HASH, 3, "")


def test_a_failed_init_makes_nothing(host: Host) -> None:
    found = registry(host)
    found.apply(init(rc=5))
    assert found.alive() == []
    assert found.creations_lost == {"failed": 1}
    found.apply(init(rc=7))  # ncclInProgress is no failure
    assert len(found.alive()) == 1
    assert found.creations_lost == {"failed": 1}


def test_older_communicators_are_read_from_memory_at_first_use(host: Host) -> None:
    found = registry(host)
    host.structure(10, 0x1000, comm_hash=77, rank=1, n_ranks=4)
    slots = found.assign(record())
    assert found.unresolved == 1
    found.resolve(BASE_NS)
    comm = only(found)
    assert comm.slot == slots[0]
    assert (comm.comm_hash, comm.rank, comm.n_ranks) == (77, 1, 4)
    assert (comm.identity, comm.complete) == (identity.STRUCTURE, False)
    assert bool(found.table().resolved[slots[0]])
    assert not bool(found.table().complete[slots[0]])


@pytest.mark.parametrize(
    ("rank", "n_ranks", "comm_hash"),
    [(4, 4, 7), (-1, 4, 7), (0, 0, 7), (0, 65_537, 7), (0, 4, 0), (-2, -1, 7)],
)
def test_a_structure_without_sense_is_refused(
    host: Host, rank: int, n_ranks: int, comm_hash: int
) -> None:
    host.structure(10, 0x1000, comm_hash=comm_hash, rank=rank, n_ranks=n_ranks)
    assert structure.read(Processes(host.root), 10, 0x1000, Offsets()) is None


def test_a_wrong_magic_is_refused_until_it_is_right(host: Host) -> None:
    found = registry(host)
    host.structure(10, 0x1000, comm_hash=77, rank=1, n_ranks=4)
    host.write(10, 0x1000, b"\1" * 8)
    found.assign(record())
    for i in range(3 * MAX_ATTEMPTS):
        found.resolve(BASE_NS + i * 10 * SECOND)
    assert found.unresolved == 1
    assert found.unresolved_reasons() == {"structure not readable or not yet valid": 1}
    host.write(10, 0x1000, struct.pack("<Q", structure.MAGIC))
    found.apply(comm_event(CommKind.FIRST_USE))
    assert only(found).comm_hash == 77


def test_init_all_is_local_to_its_process(host: Host) -> None:
    found = registry(host, Library(comm_offsets=None))
    found.apply(
        records(
            *(
                comm_event(
                    CommKind.INIT_ALL,
                    comm=0x1000 * (i + 1),
                    key=i,
                    rank=i,
                    n_ranks=2,
                    slot=0x90 + 8 * i,
                    flags=CommFlag.RANK,
                )
                for i in range(2)
            )
        )
    )
    first, second = found.alive()
    assert first.comm_hash == second.comm_hash != 0
    assert (first.rank, second.rank, first.identity) == (0, 1, identity.PROCESS)


def split(comm: int, color: int, **fields: object) -> np.ndarray:  # type: ignore[type-arg]
    return comm_event(CommKind.SPLIT, comm=comm, parent=0x1000, color=color, **fields)


def test_a_split_child_is_derived_and_verified(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    found.apply(split(0, -1, time_ns=BASE_NS + 1, slot=0x50))  # no child, but it counts
    expected = commhash.split_hash(NEW_HASH, 2, 5, 22809)
    host.structure(10, 0x9000, comm_hash=expected, rank=1, n_ranks=2)
    found.apply(split(0x9000, 5, time_ns=BASE_NS + 2, slot=0x50))
    child = found.alive()[1]
    assert (child.comm_hash, child.rank, child.n_ranks) == (expected, 1, 2)
    assert (child.identity, child.parent_hash) == (identity.DERIVED, NEW_HASH)
    assert child.complete


def test_the_structure_wins_where_the_derivation_differs(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    host.structure(10, 0x9000, comm_hash=4242, rank=1, n_ranks=2)
    found.apply(split(0x9000, 5, time_ns=BASE_NS + 2, slot=0x50))
    child = found.alive()[1]
    assert (child.comm_hash, child.identity) == (4242, identity.STRUCTURE)


def test_without_offsets_a_child_stays_unresolved(host: Host) -> None:
    found = registry(host, Library(comm_offsets=None))
    found.apply(init())
    found.apply(split(0x9000, 5, time_ns=BASE_NS + 2, slot=0x50))
    assert len(found.alive()) == 1
    assert found.unresolved == 1
    assert "no structure offsets for this libnccl" in found.unresolved_reasons()


def test_a_shrink_does_not_count(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    expected = commhash.split_hash(NEW_HASH, 0, 0, 22809)
    host.structure(10, 0x9000, comm_hash=expected, rank=1, n_ranks=7)
    found.apply(
        comm_event(CommKind.SHRINK, comm=0x9000, parent=0x1000, color=1, time_ns=BASE_NS + 1)
    )
    assert found.alive()[1].identity == identity.DERIVED
    second = commhash.split_hash(NEW_HASH, 1, 5, 22809)
    host.structure(10, 0xA000, comm_hash=second, rank=0, n_ranks=2)
    found.apply(split(0xA000, 5, time_ns=BASE_NS + 2, slot=0x50))
    assert found.alive()[2].identity == identity.DERIVED


def test_grow_is_the_same_for_old_and_new_ranks(host: Host) -> None:
    old, new = (
        registry(host, Library(comm_offsets=None)),
        registry(host, Library(comm_offsets=None)),
    )
    old.apply(init())
    old.apply(
        comm_event(
            CommKind.GROW,
            comm=0x9000,
            parent=0x1000,
            n_ranks=9,
            rank=-1,
            flags=CommFlag.RANK,
            time_ns=BASE_NS + 1,
        )
    )
    magic = commhash.combine(int.from_bytes(UNIQUE_ID[:8], "little"), 1)
    new.apply(
        comm_event(
            CommKind.GROW,
            comm=0x9000,
            n_ranks=9,
            rank=8,
            time_ns=BASE_NS + 1,
            id=struct.pack("<Q", magic) + bytes(120),
            flags=CommFlag.RANK | CommFlag.ID,
        )
    )
    before, after = old.alive()[1], only(new)
    assert before.comm_hash == after.comm_hash == commhash.combine(magic, 9)
    assert (before.rank, after.rank, after.n_ranks) == (3, 8, 9)


def test_a_pending_pointer_is_read_when_it_is_there(host: Host) -> None:
    found = registry(host)
    event = init(0, slot=0x50)
    event["flags"] |= int(CommFlag.PENDING)
    found.apply(event)
    found.resolve(BASE_NS)
    assert found.unresolved == 1
    host.write(10, 0x50, struct.pack("<Q", 0x1000))
    found.resolve(BASE_NS + 10 * SECOND)
    assert only(found).pointer == 0x1000
    assert only(found).complete


def pending(slot: int, **fields: object) -> np.ndarray:  # type: ignore[type-arg]
    return init(0, slot=slot, flags=CommFlag.ID | CommFlag.RANK | CommFlag.PENDING, **fields)


def test_a_pointer_that_never_comes_is_a_creation_lost(host: Host) -> None:
    found = registry(host)
    found.apply(pending(0x50))
    found.apply(pending(0, tid=11))  # nobody knows where its pointer would be
    assert (found.unresolved, found.creations_lost) == (1, {"no_pointer": 1})
    for attempt in range(1, MAX_ATTEMPTS + 1):
        found.resolve(BASE_NS + attempt * 60 * SECOND)
    assert (found.unresolved, found.creations_lost) == (0, {"no_pointer": 2})


def test_creations_that_wait_are_bounded_and_the_oldest_is_lost(host: Host) -> None:
    found = registry(host)
    for number in range(MAX_PENDING + 3):
        found.apply(pending(0x50 + 8 * number, time_ns=BASE_NS + number))
    assert (found.unresolved, found.creations_lost) == (MAX_PENDING, {"too_many": 3})
    host.write(10, 0x50, struct.pack("<4Q", 0x1000, 0x2000, 0x3000, 0x4000))
    found.resolve(BASE_NS + 10 * SECOND)
    assert [comm.pointer for comm in found.alive()] == [0x4000]


def test_a_creation_whose_process_ends_is_lost(host: Host) -> None:
    """It has made no communicator before, so that nothing else is known of it."""
    host.process(11)
    found = registry(host)
    found.apply(pending(0x50, tgid=11))
    found.forget_processes([10], BASE_NS)
    assert (found.unresolved, found.creations_lost.get("process_ended", 0)) == (1, 0)
    found.forget_processes([11], BASE_NS)
    assert (found.unresolved, found.creations_lost["process_ended"]) == (0, 1)


def test_a_creation_told_twice_counts_once(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    expected = commhash.split_hash(NEW_HASH, 1, 5, 22809)
    host.structure(10, 0x9000, comm_hash=expected, rank=1, n_ranks=2)
    early = split(0, 5, time_ns=BASE_NS + 1, slot=0x50, flags=CommFlag.PENDING)
    found.apply(records(early, split(0x9000, 5, time_ns=BASE_NS + 1, slot=0x50)))
    found.apply(split(0x9000, 5, time_ns=BASE_NS + 1, slot=0x50))
    host.write(10, 0x50, struct.pack("<Q", 0x9000))
    found.resolve(BASE_NS + 10 * SECOND)
    assert [comm.pointer for comm in found.alive()] == [0x1000, 0x9000]
    assert found.alive()[1].identity == identity.DERIVED
    assert found.unresolved == 0
    assert not any(found.creations_lost.values())


def test_gloo_is_named_by_store_and_prefix(host: Host) -> None:
    host.process(11, MASTER_ADDR="other", MASTER_PORT="1")
    hashes = set()
    for pid in (10, 11):
        found = registry(host, Library(kind="gloo"))
        found.apply(
            comm_event(
                CommKind.CONNECT,
                tgid=pid,
                name=b"default_pg/0//0",
                n_ranks=4,
                rank=pid - 9,
                key=29500,
                id=b"node0",
                flags=CommFlag.NAME | CommFlag.RANK,
            )
        )
        comm = only(found)
        assert (comm.library, comm.identity, comm.complete) == (2, identity.STORE, True)
        hashes.add(comm.comm_hash)
    assert hashes == {commhash.stable_hash("gloo", "default_pg/0//0", "node0:29500", "4")}


def test_gloo_falls_back_to_the_environment(host: Host) -> None:
    found = registry(host, Library(kind="gloo"))
    found.apply(
        comm_event(
            CommKind.CONNECT, name=b"pg", n_ranks=4, rank=1, flags=CommFlag.NAME | CommFlag.RANK
        )
    )
    assert only(found).comm_hash == commhash.stable_hash("gloo", "pg", "node0:29500", "4")
    host.process(12, LANTERNE_WORKLOAD="w")
    found.apply(
        records(
            *(
                comm_event(
                    CommKind.FIRST_USE,
                    tgid=12,
                    comm=comm,
                    n_ranks=4,
                    rank=1,
                    flags=CommFlag.RANK,
                    time_ns=BASE_NS + comm,
                )
                for comm in (0x10, 0x20)
            )
        )
    )
    _, first, second = found.alive()
    assert first.comm_hash == commhash.stable_hash("gloo", "context 1", "w", "4")
    assert second.comm_hash == commhash.stable_hash("gloo", "context 2", "w", "4")
    assert (first.identity, first.complete) == (identity.ENVIRONMENT, False)


def test_a_process_with_both_libraries_is_told_by_the_probe(host: Host) -> None:
    found = registry(host, Library(), Library(kind="gloo"), gloo_probes=(70,))
    slots = found.assign(records(record(probe=70, comm=0x10), record(probe=1, comm=0x20)))
    assert [comm.library for comm in found.describe(slots.tolist())] == [2, 1]


OTHER = Library(nccl_version=22105, comm_offsets=Offsets(0xF8, 0x100, 0x104, 0x108, 0x120))


def test_the_bus_id_is_read_when_a_later_scan_meets_the_process(host: Host) -> None:
    """The library was attached for another process: calls come before the scan that tells which
    libraries this one has."""
    known: list[Library] = []
    found = Registry(libraries=lambda _: known, processes=Processes(host.root))
    host.structure(10, 0x1000, comm_hash=NEW_HASH, rank=3, n_ranks=8, bus=0x3B000)
    found.apply(init())
    second = 1_000_000_000
    for tick in range(30):  # three seconds without knowing its libraries
        found.resolve(tick * second // 10)
    assert only(found).bus_id == ""
    known.append(Library())
    for tick in range(30, 60):
        found.resolve(tick * second // 10)
    assert only(found).bus_id == "0000:3b:00.0"


def test_two_libraries_in_a_process_the_bus_id_decides(host: Host) -> None:
    """The other library's offsets show numbers, too: rank 1 of 3, but no bus id."""
    found = registry(host, OTHER, Library())
    host.structure(10, 0x1000, comm_hash=3 << 32 | 1, rank=1, n_ranks=4)
    host.write(10, 0x1000 + 0xF8, struct.pack("<Q", 5))
    found.apply(comm_event(CommKind.FIRST_USE, comm=0x1000))
    comm = only(found)
    assert (comm.comm_hash, comm.rank, comm.n_ranks) == (3 << 32 | 1, 1, 4)
    assert comm.bus_id == "0000:3b:00.0"


def test_two_readings_that_make_sense_are_no_identity(host: Host) -> None:
    found = registry(host, OTHER, Library())
    host.structure(10, 0x1000, comm_hash=3 << 32 | 1, rank=1, n_ranks=4, bus=0)
    host.write(10, 0x1000 + 0xF8, struct.pack("<Q", 5))
    found.apply(comm_event(CommKind.FIRST_USE, comm=0x1000))
    assert found.alive() == []
    (reason,) = found.unresolved_reasons()
    assert "more than one libnccl" in reason


def test_hash_of_the_library_that_was_called(host: Host) -> None:
    """Two generations of the hash in one process: the structure says which."""
    found = registry(host, OTHER, Library())
    host.structure(10, 0x1000, comm_hash=NEW_HASH, rank=3, n_ranks=8)
    found.apply(init())
    assert only(found).comm_hash == NEW_HASH
    host.structure(10, 0x2000, comm_hash=OLD_HASH, rank=3, n_ranks=8)
    found.apply(init(0x2000, time_ns=BASE_NS + 5))
    assert sorted(comm.comm_hash for comm in found.alive()) == sorted([NEW_HASH, OLD_HASH])


# -- pointers ------------------------------------------------------------------------------


def test_records_find_their_communicators(host: Host) -> None:
    found = registry(host)
    host.process(11)
    found.apply(records(init(0x1000), init(0x2000, time_ns=BASE_NS + 1), init(0x1000, tgid=11)))
    rows = records(*(record(comm=c, tgid=t) for t in (10, 11) for c in (0x1000, 0x2000, 0x3000)))
    slots = found.assign(rows)
    assert len(set(slots.tolist())) == 6
    assert (found.assign(rows[::-1]) == slots[::-1]).all()
    pointers = [(comm.tgid, comm.pointer) for comm in found.describe(slots.tolist())]
    assert pointers == [(int(r["tgid"]), int(r["comm"])) for r in rows]


def test_a_pointer_used_again_is_somebody_else(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    old = found.assign(record(enter_ns=BASE_NS + 10))[0]
    found.apply(
        records(
            comm_event(CommKind.DESTROY, time_ns=BASE_NS + 100),
            init(time_ns=BASE_NS + 200),
        )
    )
    # Both lives in one drain, the first one's records come late.
    slots = found.assign(records(record(enter_ns=BASE_NS + 50), record(enter_ns=BASE_NS + 300)))
    assert slots[0] == old
    assert slots[1] != old
    assert found.describe([int(old)])[0].comm_hash == NEW_HASH


@pytest.mark.parametrize("kind", [CommKind.DESTROY, CommKind.ABORT])
def test_destroy_and_abort_forget(host: Host, kind: CommKind) -> None:
    found = registry(host)
    found.apply(init())
    found.apply(comm_event(CommKind.FINALIZE, time_ns=BASE_NS + 1))
    assert len(found.alive()) == 1
    found.apply(comm_event(kind, time_ns=BASE_NS + 2))
    assert found.alive() == []


def test_a_revoked_communicator_is_there_until_its_end(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    slot = only(found).slot
    found.apply(comm_event(CommKind.REVOKE, time_ns=BASE_NS + 1))
    assert only(found).slot == slot
    assert found.assign(record(enter_ns=BASE_NS + 2)).tolist() == [slot]
    found.apply(comm_event(CommKind.ABORT, time_ns=BASE_NS + 3))
    assert found.alive() == []
    # Whoever uses the pointer after that is somebody else, not known yet.
    later = found.assign(record(enter_ns=BASE_NS + 4)).tolist()
    assert later != [slot]
    assert not found.describe(later)[0].resolved


def test_a_forked_child_has_the_pointers_but_no_communicators(host: Host) -> None:
    """Only a use gives it one, and its end is not the parent's."""
    host.process(11, ticks=501)
    found = registry(host)
    found.apply(init())
    assert found.pids() == {10}
    found.apply(comm_event(CommKind.DESTROY, tgid=11, time_ns=BASE_NS + 1))
    assert only(found).tgid == 10
    host.structure(11, 0x1000, comm_hash=NEW_HASH, rank=3, n_ranks=8)
    mine, other = found.assign(records(record(enter_ns=BASE_NS + 2), record(tgid=11)))
    assert mine != other
    assert found.pids() == {10, 11}
    found.forget_processes([11], BASE_NS + 3)
    assert only(found).tgid == 10


def test_a_slot_rests_before_it_is_used_anew(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    slot = only(found).slot
    found.apply(comm_event(CommKind.DESTROY, time_ns=BASE_NS + 2))
    released = [found.next_round().tolist() for _ in range(QUARANTINE_ROUNDS)]
    assert released == [[]] * (QUARANTINE_ROUNDS - 1) + [[slot]]
    found.apply(init(time_ns=BASE_NS + 3))
    assert only(found).slot == slot


def test_a_process_that_ended_is_forgotten(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    found.forget_processes([10], BASE_NS + 1)
    assert found.alive() == []
    assert found.pids() == set()


def test_a_pid_used_again_is_found_out(host: Host) -> None:
    found = registry(host)
    found.apply(init())
    found.verify_processes(BASE_NS + 1)
    assert len(found.alive()) == 1
    host.process(10, ticks=501)
    found.verify_processes(BASE_NS + 2)
    assert found.alive() == []


def test_the_communicator_idle_longest_makes_room(host: Host) -> None:
    found = registry(host, limit=16)
    for i in range(16):
        found.apply(init(0x1000 + i * 16, time_ns=BASE_NS + i))
    found.assign(record(comm=0x1000, enter_ns=BASE_NS + 999))
    found.apply(init(0x9000, time_ns=BASE_NS + 1000))
    pointers = {comm.pointer for comm in found.alive()}
    assert found.evicted == 1
    assert 0x1000 in pointers
    assert 0x1010 not in pointers


def test_without_any_room_operations_are_counted(host: Host) -> None:
    found = registry(host, limit=16)
    rows = records(*(record(comm=0x10000 + i * 16) for i in range(200)))
    slots = found.assign(rows)
    assert int((slots == NO_SLOT).sum()) == found.without_slot > 0
    assert len(found.pids()) == 1


def test_without_any_room_creations_are_counted(host: Host) -> None:
    found = registry(host, limit=16)
    for number in range(found.rows + 5):
        found.apply(init(0x10000 + number * 16, time_ns=BASE_NS + number))
    assert found.creations_lost == {"no_room": 5}


# -- processes -----------------------------------------------------------------------------


def test_hostile_environments_are_cut_and_cleaned(host: Host) -> None:
    host.process(12, LANTERNE_WORKLOAD="a\x1b[31m\nb" + "x" * 5000)
    found = registry(host)
    found.apply(init(tgid=12))
    workload = only(found).workload
    assert workload.startswith("a?[31m?b")
    assert len(workload) == 128
    assert workload.isprintable()


def test_the_next_variable_is_asked_where_the_first_is_empty(host: Host) -> None:
    host.process(12, LANTERNE_WORKLOAD=" ", SLURM_JOB_ID="99")
    found = registry(host)
    found.apply(init(tgid=12))
    assert only(found).workload == "99"


def test_roles_are_given_by_name(host: Host) -> None:
    found = registry(host, roles={"ep_*": "expert"})
    found.apply(init(name=b"ep_0", flags=CommFlag.ID | CommFlag.RANK | CommFlag.NAME))
    assert only(found).role == "expert"


def test_the_own_process_can_be_read() -> None:
    mine = Processes()
    data = struct.pack("<Q", 0x1122334455667788)
    holder = np.frombuffer(data, np.uint8)
    assert mine.memory(os.getpid(), holder.ctypes.data, 8) == data
    assert mine.memory(os.getpid(), 2**63 + 5, 8) is None
    assert mine.memory(os.getpid(), 0, 8) is None
    assert (mine.start_ticks(os.getpid()) or 0) > 0
    assert mine.start_ticks(2**22 + 1) is None
    assert mine.environ(2**22 + 1) == {}


# -- what a profiler plugin tells ----------------------------------------------------------


def told(**fields: object) -> np.ndarray:  # type: ignore[type-arg]
    row = np.zeros(1, layout.DEVICE)
    for name, value in ({"tgid": 10, "comm_hash": 77, "rank": 2, "n_ranks": 4} | fields).items():
        row[name] = value
    return row


def test_a_plugin_names_a_communicator_that_makes_no_call(host: Host) -> None:
    found = registry(host)
    slots, trusted = found.assign_device(np.concatenate([told(), told(), told(rank=3)]))
    assert slots[0] == slots[1] != slots[2]
    assert trusted.all(), "the collector aligns it by time"
    comm, _ = found.alive()
    assert (comm.comm_hash, comm.rank, comm.n_ranks, comm.complete) == (77, 2, 4, False)
    assert found.assign_device(told())[0] == slots[0]


def test_a_plugin_tells_of_the_communicator_that_was_seen(host: Host) -> None:
    since = BASE_NS - 1
    found = registry(host, plugins_since=lambda: since)
    found.apply(init())
    found.resolve(BASE_NS)
    (comm,) = found.alive()
    mine = {"comm_hash": comm.comm_hash, "rank": comm.rank, "n_ranks": comm.n_ranks}
    slots, trusted = found.assign_device(told(**mine))
    assert (slots.tolist(), trusted.tolist()) == ([comm.slot], [True])
    assert len(found.alive()) == 1


def test_replays_count_only_where_the_plugin_was_listened_to_before(host: Host) -> None:
    found = registry(host, plugins_since=lambda: BASE_NS + 1)
    found.apply(init())
    (comm,) = found.alive()
    mine = {"comm_hash": comm.comm_hash, "rank": comm.rank, "n_ranks": comm.n_ranks}
    assert found.assign_device(told(**mine))[1].tolist() == [False]


def test_a_nonsensical_plugin_names_nobody(host: Host) -> None:
    found = registry(host)
    slots, _ = found.assign_device(
        np.concatenate([told(rank=4), told(n_ranks=0), told(comm_hash=0)])
    )
    assert set(slots.tolist()) == {NO_SLOT}
    assert not found.alive()


class FakeRas:
    """agent.ras.Ras without its thread: `current` is what it knows by now."""

    def __init__(self) -> None:
        self.current: Answer | None = None
        self.asked: list[int] = []
        self.forgotten: list[int] = []

    def answer(self, pid: int) -> Answer | None:
        self.asked.append(pid)
        return self.current

    def forget(self, pids: Iterable[int]) -> None:
        self.forgotten += pids


def test_ras_is_asked_last_and_its_word_is_checked(host: Host) -> None:
    service = FakeRas()
    found = registry(host, Library(comm_offsets=None), ras=service)
    host.structure(10, 0x1000, comm_hash=77, rank=2, n_ranks=4)
    host.write(10, 0x4000, b"\0")  # memory comes in whole pages
    found.assign(record())
    now = BASE_NS
    for _ in range(RAS_AFTER):
        assert not service.asked
        now += SECOND
        found.resolve(now)
    told = (Member(77, 4, 2, "127.0.0.1", 10), Member(78, 4, 2, "127.0.0.1", 10))
    steps = [
        (Answer(1, (), "not told by NCCL RAS: refused"), "not told by NCCL RAS: refused"),
        (Answer(2, told[1:], ""), "none of the communicators"),
        (Answer(3, told, ""), None),
    ]
    for answer, reason in steps:
        service.current = answer
        now += 10 * SECOND
        found.resolve(now)
        if reason is not None:
            assert any(reason in text for text in found.unresolved_reasons())
    comm = only(found)
    assert (comm.comm_hash, comm.rank, comm.identity) == (77, 2, identity.RAS)
    asked = len(service.asked)
    found.resolve(now + 60 * SECOND)
    assert len(service.asked) == asked, "it is known now"
    found.forget_processes([10], now)
    assert service.forgotten == [10]
