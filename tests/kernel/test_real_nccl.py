"""The real libnccl wheels, no GPU: every call fails, and every probe fires with its arguments.

The library is called from a child process through ctypes. `make test-nccl` fetches the wheels into
build/nccl/VERSION and names that folder in LANTERNE_NCCL_DIR.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from lanterne.agent import libnccl
from lanterne.agent.attach import Attacher
from lanterne.agent.commhash import unique_id_hash
from lanterne.agent.kernel import Programs, load
from lanterne.agent.library import examine
from lanterne.agent.ring import Ring
from lanterne.probes.layout import COMM_EVENT, RECORD, CommFlag, CommKind, Flag, Func

pytestmark = [pytest.mark.nccl, pytest.mark.kernel, pytest.mark.timeout(300)]

FOLDER = Path(os.environ.get("LANTERNE_NCCL_DIR", "build/nccl"))
LIBRARIES = sorted(FOLDER.glob("*/libnccl.so.2"))

# The child loads the library, waits for a line, makes its calls, prints what it knows as JSON.
CHILD = textwrap.dedent(
    """
    import ctypes, json, sys
    lib = ctypes.CDLL(sys.argv[1])
    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_ubyte * 128)]
    print("ready", flush=True)
    sys.stdin.readline()
    out = {}
    uid = Id()
    out["unique_id_rc"] = lib.ncclGetUniqueId(ctypes.byref(uid))
    out["id"] = bytes(uid.bytes).hex()
    comm = ctypes.c_void_p()
    lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    out["init_rc"] = lib.ncclCommInitRank(ctypes.byref(comm), 7, uid, 3)
    P, S, I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    # Not a communicator: NCCL checks the magic and refuses; the memory stays readable. Before
    # 2.21 there is no magic, and only NULL is refused.
    version = ctypes.c_int()
    lib.ncclGetVersion(ctypes.byref(version))
    fake = ctypes.create_string_buffer(2 << 20)
    c = ctypes.addressof(fake) if version.value >= 22100 else 0
    out["comm"] = c
    def call(name, types, *args):
        function = getattr(lib, name)
        function.argtypes = types
        return function(*args)
    rc = {}
    rc["AllReduce"] = call("ncclAllReduce", [P, P, S, I, I, P, P], 1, 2, 1001, 7, 0, c, 0x51)
    rc["Broadcast"] = call("ncclBroadcast", [P, P, S, I, I, P, P], 1, 2, 1002, 6, 5, c, 0x52)
    rc["Reduce"] = call("ncclReduce", [P, P, S, I, I, I, P, P], 1, 2, 1003, 8, 0, 4, c, 0x53)
    rc["AllGather"] = call("ncclAllGather", [P, P, S, I, P, P], 1, 2, 1004, 9, c, 0x54)
    types = [P, P, S, I, I, P, P]
    rc["ReduceScatter"] = call("ncclReduceScatter", types, 1, 2, 1005, 2, 0, c, 0x55)
    rc["Send"] = call("ncclSend", [P, S, I, I, P, P], 1, 1006, 0, 6, c, 0x56)
    rc["Recv"] = call("ncclRecv", [P, S, I, I, P, P], 1, 1007, 4, 2, c, 0x57)
    if hasattr(lib, "ncclAlltoAll"):
        rc["AlltoAll"] = call("ncclAlltoAll", [P, P, S, I, P, P], 1, 2, 1008, 7, c, 0x58)
    out["group"] = [lib.ncclGroupStart(), lib.ncclGroupStart()]
    rc["Send2"] = call("ncclSend", [P, S, I, I, P, P], 1, 1009, 7, 1, c, 0x59)
    out["group"] += [lib.ncclGroupEnd(), lib.ncclGroupEnd()]
    out["rc"] = rc
    print(json.dumps(out), flush=True)
    """
)


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with load() as loaded:
        yield loaded


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.parent.name)
def test_calls_fire_with_their_arguments(programs: Programs, library: Path) -> None:
    library = library.resolve()
    command = [sys.executable, "-c", CHILD, str(library)]
    env = dict(os.environ, NCCL_SOCKET_IFNAME="lo")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with Attacher(programs, include=[str(library)]) as attacher:
            attacher.scan()
            (found,) = [x for x in attacher.libraries.values() if x.path == str(library)]
            assert found.state == "attached", found.error
            assert found.nccl_version is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            said = json.loads(child.stdout.readline())
            child.wait(30)
            with Ring(programs.ring_fd, programs.ring_bytes, RECORD) as ring:
                records = ring.drain()
            with Ring(programs.comm_ring_fd, programs.comm_ring_bytes, COMM_EVENT) as ring:
                events = ring.drain()
    check_version(library, found.nccl_version)
    check_init(events[events["tgid"] == child.pid], said, found.nccl_version)
    check_records(records[records["tgid"] == child.pid], said)


def check_version(library: Path, version: int) -> None:
    major, minor, patch = (int(x) for x in library.parent.name.split(".")[:3])
    assert version == major * 10000 + minor * 100 + patch


def check_init(events: np.ndarray, said: dict[str, object], version: int) -> None:
    assert said["unique_id_rc"] == 0
    (init,) = events[events["kind"] == CommKind.INIT]
    assert init["flags"] & (CommFlag.ID | CommFlag.RANK) == CommFlag.ID | CommFlag.RANK
    assert (init["n_ranks"], init["rank"]) == (7, 3)
    unique_id = bytes.fromhex(str(said["id"]))
    assert init["id"].tobytes() == unique_id
    assert init["rc"] == said["init_rc"] != 0
    # The hash of this very id, by the generation that this version uses.
    assert unique_id_hash(unique_id, version) == unique_id_hash(init["id"].tobytes(), version) != 0


EXPECTED = {
    # func: (count, dtype, root or peer, stream)
    "AllReduce": (Func.ALL_REDUCE, 1001, 7, None, 0x51),
    "Broadcast": (Func.BROADCAST, 1002, 6, 5, 0x52),
    "Reduce": (Func.REDUCE, 1003, 8, 4, 0x53),
    "AllGather": (Func.ALL_GATHER, 1004, 9, None, 0x54),
    "ReduceScatter": (Func.REDUCE_SCATTER, 1005, 2, None, 0x55),
    "Send": (Func.SEND, 1006, 0, 6, 0x56),
    "Recv": (Func.RECV, 1007, 4, 2, 0x57),
    "AlltoAll": (Func.ALL_TO_ALL, 1008, 7, None, 0x58),
    "Send2": (Func.SEND, 1009, 7, 1, 0x59),
}


def check_records(records: np.ndarray, said: dict[str, object]) -> None:
    rc = said["rc"]
    assert isinstance(rc, dict)
    assert len(records) == len(rc), "one record a call, no more: ncclX and pncclX are one address"
    for name, row in zip(rc, records, strict=True):
        func, count, dtype, peer, stream = EXPECTED[name]
        assert (row["func"], row["count"], row["dtype"]) == (func, count, dtype), name
        assert (row["comm"], row["stream"]) == (said["comm"], stream), name
        if peer is not None:
            assert row["peer"] == peer, name
        assert bool(row["flags"] & Flag.P2P) == (func in (Func.SEND, Func.RECV)), name
        # Older versions put a group of its own around a single send or recv.
        grouped = bool(row["flags"] & Flag.GROUP)
        assert grouped == (row["group"] != 0), name
        assert grouped or name != "Send2"
        assert not grouped or func in (Func.SEND, Func.RECV), name
        if row["flags"] & Flag.PAIR:
            assert row["rc"] == rc[name], name
    groups = records["group"][records["group"] != 0]
    assert len(set(groups.tolist())) == len(groups), "three sends and receives, in no common group"
    collectives = records[(records["flags"] & Flag.P2P) == 0]
    assert collectives["seq"].tolist() == list(range(len(collectives)))


def dwarf_offsets(library: Path) -> dict[str, int]:
    """Of the members of struct ncclComm, from the debugging information in the wheel."""
    with library.open("rb") as file:
        for unit in ELFFile(file).get_dwarf_info().iter_CUs():
            for die in unit.get_top_DIE().iter_children():
                name = die.attributes.get("DW_AT_name")
                if name is None or name.value != b"ncclComm" or not die.has_children:
                    continue
                return {
                    member.attributes["DW_AT_name"].value.decode(): member.attributes[
                        "DW_AT_data_member_location"
                    ].value
                    for member in die.iter_children()
                    if member.tag == "DW_TAG_member" and "DW_AT_name" in member.attributes
                }
    raise AssertionError(f"{library} has no struct ncclComm in its DWARF")


@pytest.mark.parametrize("source", ["build_id", "getters", "dwarf"])
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.parent.name)
def test_offsets_of_the_communicator_agree(
    library: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By build id, by the getters' machine code, and by what the agent reads of the DWARF, with
    the library's own DWARF."""
    if source != "build_id":
        monkeypatch.setattr(libnccl, "_RANK_BY_BUILD_ID", {})
    if source == "dwarf":
        monkeypatch.setattr(libnccl, "GETTERS", ("not_there",))
    truth = dwarf_offsets(library)
    with library.open("rb") as file:
        found = examine(file.fileno(), "nccl", str(library), str(library)).comm_offsets
    assert found is not None
    assert found.source == source
    assert found.has_magic == ("startMagic" in truth)
    fields = (found.comm_hash, found.rank, found.n_ranks, found.cuda_dev, found.bus_id)
    assert fields == tuple(truth[n] for n in ("commHash", "rank", "nRanks", "cudaDev", "busId"))


def test_the_wheels_are_there() -> None:
    names = [p.parent.name for p in LIBRARIES]
    assert "2.21.5" in names
    assert len(names) >= 2, "the newest wheel beside it: run make setup-nccl"
