"""The real librccl of Debian, no GPU: every call fails, and every probe fires with its arguments.

`make test-nccl ALL=1` fetches it into build/rccl, with the C library that it was linked against.
HIP itself is a stand-in with the names that librccl wants, whose every call fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.library import AttachedLibrary, examine
from lanterne.probes import catalog, rccl
from lanterne.probes.layout import CommFlag, CommKind, Flag, Func

pytestmark = [pytest.mark.nccl, pytest.mark.kernel, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("LANTERNE_RCCL_DIR", ROOT / "build/rccl"))
BESIDE = (FOLDER / "usr/lib/x86_64-linux-gnu").resolve()
LIBRARY = BESIDE / "librccl.so.1.0"
VERSION = 21304  # of Debian's 5.4.3

CHILD = textwrap.dedent(
    """
    import ctypes, json, sys
    lib = ctypes.CDLL("librccl.so.1")
    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_ubyte * 128)]
    print("ready", flush=True)
    sys.stdin.readline()
    uid, comm = Id(), ctypes.c_void_p()
    out = {"unique_id_rc": lib.ncclGetUniqueId(ctypes.byref(uid)), "id": bytes(uid.bytes).hex()}
    lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    out["init_rc"] = lib.ncclCommInitRank(ctypes.byref(comm), 7, uid, 3)
    P, S, I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    fake = ctypes.create_string_buffer(2 << 20)  # a communicator without ranks: refused
    out["comm"] = c = ctypes.addressof(fake)
    def call(name, types, *args):
        function = getattr(lib, name)
        function.argtypes = types
        return function(*args)
    rc = {}
    rc["AllReduce"] = call("ncclAllReduce", [P, P, S, I, I, P, P], 1, 2, 1001, 7, 0, 0, 0x51)
    rc["Broadcast"] = call("ncclBroadcast", [P, P, S, I, I, P, P], 1, 2, 1002, 6, 5, 0, 0x52)
    rc["Bcast"] = call("ncclBcast", [P, S, I, I, P, P], 1, 1003, 5, 4, 0, 0x53)
    rc["Reduce"] = call("ncclReduce", [P, P, S, I, I, I, P, P], 1, 2, 1004, 8, 0, 4, 0, 0x54)
    rc["AllGather"] = call("ncclAllGather", [P, P, S, I, P, P], 1, 2, 1005, 9, 0, 0x55)
    types = [P, P, S, I, I, P, P]
    rc["ReduceScatter"] = call("ncclReduceScatter", types, 1, 2, 1006, 2, 0, 0, 0x56)
    out["group"] = lib.ncclGroupStart()
    rc["Send"] = call("ncclSend", [P, S, I, I, P, P], 1, 1007, 0, 6, 0, 0x57)
    rc["Recv"] = call("ncclRecv", [P, S, I, I, P, P], 1, 1008, 4, 2, 0, 0x58)
    lib.ncclGroupEnd()
    rc["Gather"] = call("ncclGather", [P, P, S, I, I, P, P], 1, 2, 1009, 7, 0, c, 0x59)
    out["rc"] = rc
    print(json.dumps(out), flush=True)
    """
)
EXPECTED = {
    # func: (count, dtype, root or peer, stream)
    "AllReduce": (Func.ALL_REDUCE, 1001, 7, -1, 0x51),
    "Broadcast": (Func.BROADCAST, 1002, 6, 5, 0x52),
    "Bcast": (Func.BROADCAST, 1003, 5, 4, 0x53),
    "Reduce": (Func.REDUCE, 1004, 8, 4, 0x54),
    "AllGather": (Func.ALL_GATHER, 1005, 9, -1, 0x55),
    "ReduceScatter": (Func.REDUCE_SCATTER, 1006, 2, -1, 0x56),
    "Send": (Func.SEND, 1007, 0, 6, 0x57),
    "Recv": (Func.RECV, 1008, 4, 2, 0x58),
    "Gather": (Func.SEND, 1009, 7, 0, 0x59),  # the send that the root makes to itself
}


def stand_ins(folder: Path) -> None:
    """libamdhip64.so.5 and librocm_smi64.so.1 with what librccl wants of them."""
    told = subprocess.run(
        ["readelf", "-W", "--dyn-syms", LIBRARY], capture_output=True, text=True, check=True
    )
    wanted: dict[str, list[str]] = defaultdict(list)
    for line in told.stdout.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[6] == "UND":
            name, _, version = fields[7].partition("@")
            if name.startswith(("hip", "__hip", "rsmi_")):
                wanted[version or name[:4]].append(name)
    plain = wanted.pop("rsmi")
    bodies = {
        "hipGetErrorString": 'const char *hipGetErrorString(void) { return "no device"; }',
        "__hipRegisterFatBinary": "static void *h; void **__hipRegisterFatBinary(void) "
        "{ return &h; }",
    }

    def compiled(soname: str, names: list[str], *flags: str) -> None:
        text = [bodies.get(name, f"int {name}(void) {{ return 100; }}") for name in names]
        (folder / "stub.c").write_text("\n".join(text))
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", *flags]
        subprocess.run([*command, "-o", soname, "stub.c"], cwd=folder, check=True, timeout=60)

    parts = (f"{version} {{ global: {'; '.join(of)}; }};" for version, of in wanted.items())
    (folder / "versions").write_text("\n".join(parts))
    names = [name for of in wanted.values() for name in of]
    compiled("libamdhip64.so.5", names, "-Wl,--version-script=versions")
    compiled("librocm_smi64.so.1", plain)


@pytest.fixture(scope="module")
def library() -> Path:
    if not LIBRARY.exists():
        pytest.skip(f"no {LIBRARY}: run make test-nccl ALL=1")
    return LIBRARY


def examined(library: Path) -> AttachedLibrary:
    with library.open("rb") as file:
        return examine(file.fileno(), "nccl", str(library), str(library))


@pytest.fixture
def child(library: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    stand_ins(tmp_path)
    path = ":".join(map(str, (BESIDE, tmp_path, "/usr/lib/x86_64-linux-gnu")))
    loader = [str(BESIDE / "ld-linux-x86-64.so.2"), "--library-path", path]
    command = [*loader, str(Path(sys.executable).resolve()), "-S", "-E", "-c", CHILD]
    env = dict(os.environ, NCCL_SOCKET_IFNAME="lo")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_calls_fire_with_their_arguments(either: Any, child: subprocess.Popen[str]) -> None:
    with either.attacher(BESIDE) as attacher:
        attacher.scan()
        (found,) = [one for one in attacher.libraries.values() if one.path == str(LIBRARY)]
        assert found.state == "attached", found.error
        either.records(child.pid)
        either.events(child.pid)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        said = json.loads(child.stdout.readline())
        records, events = either.records(child.pid), either.events(child.pid)
    check_init(events, said)
    check_records(records, said)


def check_init(events: np.ndarray, said: dict[str, Any]) -> None:
    assert said["unique_id_rc"] == 0
    (init,) = events[events["kind"] == CommKind.INIT]
    assert init["flags"] & (CommFlag.ID | CommFlag.RANK) == CommFlag.ID | CommFlag.RANK
    assert (init["n_ranks"], init["rank"]) == (7, 3)
    assert init["id"].tobytes() == bytes.fromhex(said["id"])
    assert init["rc"] == said["init_rc"] != 0


def check_records(records: np.ndarray, said: dict[str, Any]) -> None:
    assert len(records) == len(said["rc"]), "one record a call, no more"
    for (name, rc), record in zip(said["rc"].items(), records, strict=True):
        assert rc != 0, name
        func, *values = EXPECTED[name]
        told = [record[field] for field in ("count", "dtype", "peer", "stream")]
        assert (record["func"], told) == (func, values), name
        assert record["comm"] == (said["comm"] if name == "Gather" else 0), name
    grouped = {name: bool(one["group"]) for name, one in zip(said["rc"], records, strict=True)}
    assert [name for name, one in grouped.items() if one] == ["Send", "Recv", "Gather"]
    assert (records["flags"] & Flag.P2P != 0).tolist() == list(grouped.values())


def test_what_the_file_tells(library: Path) -> None:
    """Its own names; ncclBcast, which has the code of ncclBroadcast in it; no offsets, since this
    release keeps no hash in a communicator."""
    found = examined(library)
    assert found.nccl_version == VERSION
    assert found.comm_offsets is None
    names = {site.symbol for site in found.sites}
    assert {"pncclAllReduce", "pncclSend", "pncclBcast", "pncclCommInitRank"} <= names
    made_of_sends = {row.symbol for row in catalog.COLLECTIVES if row.func in rccl.MADE_OF_SENDS}
    assert "pncclGather" in made_of_sends
    assert not names & made_of_sends
