"""The libraries have the symbols, entries, layouts, hashes and error codes of the real ones."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rig.rig import Job, JobConfig, RigPaths, build

MASK = (1 << 64) - 1
HASH_OF_VECTOR = {22809: 0x3002DCD1BBE6653D, 22105: 0x65BB3B0CBA527185}
# commHash, rank, nRanks, cudaDev, nvmlDev, busId, node, nNodes, localRank, localRanks, size
OFFSETS = {
    "normal": (1066184, 1066192, 1066224, 1066372, 1082968),
    "old": (13528, 13536, 13568, 13708, 16288),
}
SHORT = {"RIG_NCCL_TIMEOUT_MS": "20000"}


@pytest.fixture(scope="module")
def normal() -> RigPaths:
    return build()


def run_module(name: str, *arguments: str, **env: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.rig.{name}", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parents[2], env=dict(os.environ) | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(path: Path) -> dict[str, tuple[int, str]]:
    rows = (line.split() for line in tool("nm", "-D", "--defined-only", str(path)).splitlines())
    return {name: (int(address, 16), kind) for address, kind, name in rows}


@pytest.mark.parametrize(("variant", "public"), [("normal", 42), ("stripped", 42), ("old", 31)])
def test_exports_are_alias_pairs(variant: str, public: int) -> None:
    symbols = dynamic_symbols(build(variant).nccl)
    weak = {name for name, (_, kind) in symbols.items() if kind == "W"}
    assert len(weak) == public
    for name in weak:
        assert symbols[f"p{name}"] == (symbols[name][0], "T")
    assert ("ncclAlltoAll" in weak) == (variant != "old")


def test_internal_function_is_local_and_gone_when_stripped() -> None:
    def symtab(variant: str) -> str:
        return tool("readelf", "-sW", str(build(variant).nccl))

    line = next(x for x in symtab("normal").splitlines() if "_Z16ncclEnqueueCheck" in x)
    assert "LOCAL" in line
    assert "FUNC" in line
    assert "_Z20ncclGroupEndInternalP18ncclSimInfo_v22200" in symtab("normal")
    assert "_Z16ncclEnqueueCheck" not in symtab("stripped")


def test_entries_begin_with_a_push(normal: RigPaths) -> None:
    code = tool("objdump", "-d", "--no-show-raw-insn", str(normal.nccl)).splitlines()
    entries = {
        line.split("<")[1].rstrip(">:"): code[number + 1]
        for number, line in enumerate(code)
        if line.endswith(">:") and ("<pnccl" in line or "<_Z16ncclEnqueueCheck" in line)
    }
    assert len(entries) == 43
    assert all("push" in first for first in entries.values()), entries


@pytest.mark.parametrize("variant", ["normal", "stripped", "old"])
def test_getters_show_their_offsets(variant: str) -> None:
    """Exactly one far 32-bit load in each, as tools that have no DWARF expect."""
    rank = OFFSETS["old" if variant == "old" else "normal"][1]
    for name, offset in {"UserRank": rank, "Count": rank + 4, "CuDevice": rank + 8}.items():
        code = tool("objdump", "-d", "--no-show-raw-insn",
                    f"--disassemble=pncclComm{name}", str(build(variant).nccl))  # fmt: skip
        far = [
            line.split()[-1]
            for line in code.splitlines()
            if (load := re.search(r"mov +0x([0-9a-f]+)\(", line)) and int(load[1], 16) > 0xFFF
        ]
        assert len(far) == 1
        assert far[0].startswith(f"{offset:#x}(")
        assert ",%e" in far[0]


def test_no_link_to_the_driver_and_the_usual_sonames(normal: RigPaths) -> None:
    for path in (normal.nccl, normal.cuda, normal.cudart, normal.nvml):
        dynamic = tool("readelf", "-d", str(path))
        assert f"soname: [{path.name}]" in dynamic
        assert "libcuda" not in "".join(x for x in dynamic.splitlines() if "NEEDED" in x)
    assert "cudaLaunchKernel@@libcudart.so.12" in tool("nm", "-D", str(normal.cudart))


def test_variants_and_copies(tmp_path: Path) -> None:
    def build_id(paths: RigPaths) -> str:
        notes = tool("readelf", "-n", str(paths.nccl))
        return next(x.split()[-1] for x in notes.splitlines() if "Build ID" in x)

    made = {variant: build(variant) for variant in ("normal", "stripped", "old")}
    assert len({build_id(paths) for paths in made.values()}) == 3
    copy = build("normal", tmp_path / "own")
    assert build_id(copy) == build_id(made["normal"])
    assert copy.nccl.stat().st_ino != made["normal"].nccl.stat().st_ino


def hash_new(*parts: bytes) -> int:
    a, b = 1, 1
    for part in parts:
        a ^= len(part)
        for at in range(0, len(part), 8):
            a = (a + b) & MASK
            b ^= a
            a = ((a ^ (a >> 31)) * 0x9DE62BBC8CEF3CE3) & MASK
            b = ((b ^ (b >> 32)) * 0x485CD6311B599E79) & MASK
            a = (a + int.from_bytes(part[at : at + 8], "little")) & MASK
    h = ((a ^ (a >> 31)) * 0xBAC3BD562846DE6B) & MASK
    h = (h + b) & MASK
    return ((h ^ (h >> 32)) * 0x995A187A14E7B445) & MASK


@pytest.mark.parametrize("variant", ["normal", "old"])
def test_alone(variant: str) -> None:
    """Hash vector, error codes, non-blocking init, driver lookup and the runtime's forwarding."""
    found = run_module("solo", str(build(variant).root))
    assert found["hash"] == HASH_OF_VECTOR[found["version"]]
    assert found["non_blocking"] == [7, 0, 0]
    assert all(found["addresses"].values())
    assert found["cudart"] == {"codes": [0, 0, 0], "returned first": True}
    assert found["copy"] is True
    codes = found["errors"]
    assert codes.pop("group end") == 5
    assert codes.pop("group start") == 0
    assert codes.pop("after") == 0
    assert set(codes.values()) == {4}, codes


@pytest.mark.parametrize("variant", ["normal", "old"])
def test_communicators_in_memory(variant: str) -> None:
    """Every rank's communicators, read from outside as an agent does."""
    hash_at, rank_at, bus_at, node_at, size = OFFSETS[variant]
    config = JobConfig(ranks=4, ranks_per_node=2, dp_groups=2, pipeline=True, steps=1)
    with Job(config, paths=build(variant), hold="init", env=SHORT) as job:
        job.wait_ready()
        for rank, truth in enumerate(job.truths()):
            assert [x["name"] for x in truth["comms"]] == ["world", "dp", "pipeline"]
            with Path(f"/proc/{truth['pid']}/mem").open("rb", buffering=0) as memory:
                for comm in truth["comms"]:
                    memory.seek(int(comm["pointer"], 16))
                    raw = memory.read(size)
                    assert struct.unpack_from("<Q", raw, 0) == (0x0280028002800280,)
                    assert struct.unpack_from("<Q", raw, size - 8) == (0x0280028002800280,)
                    got = struct.unpack_from("<Q4i", raw, hash_at)
                    local = rank % 2
                    assert got == (
                        int(comm["hash"], 16),
                        comm["rank"],
                        comm["nranks"],
                        local,
                        local,
                    )
                    assert struct.unpack_from("<q", raw, bus_at) == ((0x0A + 3 * local) << 12,)
            world = struct.unpack_from("<4i", _world(truth, size), node_at)
            assert world == (rank // 2, 2, rank % 2, 2)
            assert rank_at == hash_at + 8
        if variant == "normal":
            _check_child_hashes(job)
        job.release()
        assert job.wait() == [0] * 4


def _world(truth: dict[str, Any], size: int) -> bytes:
    with Path(f"/proc/{truth['pid']}/mem").open("rb", buffering=0) as memory:
        memory.seek(int(truth["comms"][0]["pointer"], 16))
        return memory.read(size)


def _check_child_hashes(job: Job) -> None:
    world = hash_new((job.folder / "uid").read_bytes())
    parent = world.to_bytes(8, "little")
    for rank, truth in enumerate(job.truths()):
        wanted = [world] + [
            hash_new(parent, count.to_bytes(4, "little"), color.to_bytes(4, "little"))
            for count, color in ((1, rank % 2), (2, rank // 2))
        ]
        assert [int(x["hash"], 16) for x in truth["comms"]] == wanted
