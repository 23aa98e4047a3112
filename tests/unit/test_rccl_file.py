"""RCCL in a file: names without p, no call counted twice, the layout by version."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from lanterne.agent.library import AttachedLibrary, examine

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads machine code")

RANK = 0x4008
CODE = """
#define EXPORT __attribute__((visibility("default"), noinline))
EXPORT int NAME(GetVersion)(int *v) { *v = %(version)d; return 0; }
EXPORT int NAME(CommUserRank)(char *c, int *r) { *r = *(int *)(c + %(rank)d); return 0; }
EXPORT int NAME(CommCount)(char *c, int *r) { *r = *(int *)(c + %(rank)d + 4); return 0; }
EXPORT int NAME(CommCuDevice)(char *c, int *r) { *r = *(int *)(c + %(rank)d + 8); return 0; }
static __attribute__((noinline)) int check(volatile int *info) { return *info; }
EXPORT int NAME(Broadcast)(void) { volatile int info = 1; return check(&info) + 1; }
EXPORT int NAME(Bcast)(void) { volatile int info = 2; return %(bcast)s + 2; }
EXPORT int NAME(AllReduce)(void) { volatile int info = 3; return check(&info) + 3; }
EXPORT int NAME(Send)(void) { volatile int info = 4; return check(&info) + 4; }
EXPORT int NAME(Gather)(void) { return NAME(Send)() + 1; }
EXPORT int NAME(AlltoAll)(void) { return NAME(Send)() + 2; }
"""
KERNELS = '__attribute__((section("%s"))) int kernels[4] = {1};'
OWN = "check(&info)"
THROUGH = "NAME(Broadcast)()"


def built(
    folder: Path, *, version: int = 22105, prefix: str = "", bcast: str = OWN,
    section: str = ".hip_fatbin",
) -> AttachedLibrary:  # fmt: skip
    source, target = folder / "r.c", folder / "librccl.so.1"
    text = CODE % {"version": version, "rank": RANK, "bcast": bcast}
    source.write_text(f"#define NAME(x) {prefix}nccl##x\n{text}{KERNELS % section}")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-Wl,--build-id", "-s"]
    command += ["-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=60)
    with target.open("rb") as file:
        return examine(file.fileno(), "nccl", str(target), str(target))


def names(library: AttachedLibrary) -> set[str]:
    return {site.symbol for site in library.sites}


@pytest.mark.parametrize("prefix", ["", "p"])
def test_either_name_and_nothing_that_is_made_of_sends(tmp_path: Path, prefix: str) -> None:
    found = names(built(tmp_path, prefix=prefix))
    assert found == {"pncclAllReduce", "pncclBroadcast", "pncclBcast", "pncclSend"}


def test_a_broadcast_that_calls_the_other_is_counted_there(tmp_path: Path) -> None:
    found = names(built(tmp_path, bcast=THROUGH))
    assert found == {"pncclAllReduce", "pncclBroadcast", "pncclSend"}


def test_a_wrapper_of_nccl_is_not_probed_under_its_names(tmp_path: Path) -> None:
    """Without kernels for AMD it is no RCCL."""
    assert not built(tmp_path, section=".other").sites
    found = names(built(tmp_path, section=".other", prefix="p"))
    assert {"pncclGather", "pncclAlltoAll"} <= found


@pytest.mark.parametrize(
    ("version", "bus_id", "magic"),
    [(21304, None, None), (21701, None, None), (21803, 24, False), (22005, 24, False),
     (22105, 32, True)],
)  # fmt: skip
def test_layout_by_version(
    tmp_path: Path, version: int, bus_id: int | None, magic: bool | None
) -> None:
    found = built(tmp_path, version=version)
    assert found.nccl_version == version
    if bus_id is None:
        assert found.comm_offsets is None
        return
    assert found.comm_offsets is not None
    assert found.comm_offsets.source == "getters"
    assert (found.comm_offsets.rank, found.comm_offsets.comm_hash) == (RANK, RANK - 8)
    assert (found.comm_offsets.bus_id, found.comm_offsets.has_magic) == (RANK + bus_id, magic)
