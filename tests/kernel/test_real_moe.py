"""The real wheels of DeepEP and NCCL EP, no GPU: which functions are found, and what is read there.

`make test-nccl` fetches them into build/wheels and names that folder in LANTERNE_WHEELS_DIR. Their
libraries need CUDA, NVSHMEM and PyTorch, which are not there: nothing is run, files are read.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.discover import kind_of
from lanterne.agent.elf import open_regular
from lanterne.agent.kernel import load
from lanterne.agent.library import AttachedLibrary, examine
from lanterne.probes import deepep
from lanterne.probes.catalog import Arch, Program, pack_row
from lanterne.probes.layout import Func
from lanterne.probes.rows import Field
from tests.kernel.stub import Caller

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(300)]

FOLDER = Path(os.environ.get("LANTERNE_WHEELS_DIR", "build/wheels"))


def examined(pattern: str) -> AttachedLibrary:
    found = sorted(FOLDER.glob(pattern))
    if not found:
        pytest.skip(f"{FOLDER}/{pattern} is not there: make test-nccl fetches it")
    kind = kind_of(str(found[0]))
    assert kind is not None
    fd = open_regular(found[0])
    try:
        return examine(fd, kind, str(found[0]), str(found[0]))
    finally:
        os.close(fd)


def test_sgl_deep_ep() -> None:
    library = examined("sgl_deep_ep/deep_ep/_C*.so")
    assert (library.kind, library.state) == ("deepep", "attached")
    names = {
        f"{scope} {function}"
        for site in library.sites
        for scope in ("internode_ll", "intranode", "internode", "elastic")
        for function in ("notify_dispatch", "dispatch", "combine", "combine_overlappable",
                         "DispatchRuntime", "CombineRuntime")
        if f"{len(scope)}{scope}{len(function)}{function}" in site.symbol
    }  # fmt: skip
    assert names == {
        "internode_ll dispatch", "internode_ll combine", "internode_ll combine_overlappable",
        "intranode notify_dispatch", "intranode dispatch", "intranode combine",
        "internode notify_dispatch", "internode dispatch", "internode combine",
        "elastic DispatchRuntime", "elastic CombineRuntime",
    }  # fmt: skip
    assert len(library.sites) == len(names)  # and none of the kernels' stubs
    assert len({site.offset for site in library.sites}) == len(names)
    programs = [site.what.program for site in library.sites]
    assert programs.count(Program.MOE_NOTIFY) == 2


# Byte offsets from the stack pointer at entry, counted by hand in this build's declarations.
SGL_PLACES = {
    "12internode_ll8dispatchE": {"COUNT": 88, "SCALE": 96, "TOP_K": 112, "RANK": 128,
                                 "N_RANKS": 136, "STREAM": 192, "PHASES": 200},
    "12internode_ll7combineE": {"COUNT": 64, "SCALE": 72, "TOP_K": 88, "RANK": 104,
                                "N_RANKS": 112, "STREAM": 144, "PHASES": 152},
    "9intranode8dispatchE": {"COUNT": 64, "WORST": 72, "SCALE": 80, "TOP_K": 88, "RANK": 136,
                             "N_RANKS": 144, "STREAM": 152},
    "9intranode7combineE": {"COUNT": 48, "SCALE": 64, "TOP_K": 72, "RANK": 88, "N_RANKS": 96,
                            "STREAM": 104},
    "9internode8dispatchE": {"COUNT": 104, "WORST": 112, "SCALE": 120, "TOP_K": 136, "RANK": 216,
                             "N_RANKS": 224, "STREAM": 240},
    "9internode7combineE": {"COUNT": 72, "SCALE": 88, "TOP_K": 96, "RANK": 152, "N_RANKS": 160,
                            "STREAM": 168},
}  # fmt: skip


@pytest.mark.parametrize("launcher", SGL_PLACES)
def test_sgl_deep_ep_places(launcher: str) -> None:
    library = examined("sgl_deep_ep/deep_ep/_C*.so")
    (site,) = [one for one in library.sites if launcher in one.symbol]
    row = deepep.derive(site.symbol)
    assert row is not None
    packed = pack_row(row, Arch.X86_64)
    for name, offset in SGL_PLACES[launcher].items():
        assert packed["source"][Field[name]]["first"] == offset, name


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_nccl_extensions(cuda: str) -> None:
    library = examined(f"nccl_extensions/nccl/ep/lib/{cuda}/libnccl_ep.so")
    assert (library.kind, library.state) == ("nccl_ep", "attached")
    found = {site.symbol: site.what.func for site in library.sites}
    assert found == {"ncclEpDispatch": Func.DISPATCH, "ncclEpCombine": Func.COMBINE}


OTHERS = {
    "nixl_cu12/nixl_ep_cu12/nixl_ep_cpp_torch*.so": "ep_kernels",
    "mooncake_transfer_engine/mooncake/libmooncake_ep_device.so": "8mooncake",
}


@pytest.mark.parametrize("pattern", OTHERS)
def test_libraries_that_are_launched_as_deepep_is(pattern: str) -> None:
    """`make test-nccl ALL=1` fetches them."""
    library = examined(pattern)
    assert (library.kind, library.state) == ("deepep", "attached")
    assert sorted(site.what.func for site in library.sites) == [Func.DISPATCH, Func.COMBINE]
    for site in library.sites:
        assert OTHERS[pattern] in site.symbol
        assert {Field.COUNT, Field.RANK, Field.N_RANKS, Field.PHASES} <= set(site.what.fields)


@pytest.mark.kernel
def test_attached_for_real(tmp_path: Path) -> None:
    """Both libraries are mapped by a process, as data: the kernel takes every probe."""
    names = {
        "deep_ep/_C.cpython-311-x86_64-linux-gnu.so": "sgl_deep_ep/deep_ep/_C*.so",
        "libnccl_ep.so.0": "nccl_extensions/nccl/ep/lib/cu13/libnccl_ep.so",
    }
    with Caller() as caller, load() as programs:
        for name, pattern in names.items():
            found = sorted(FOLDER.glob(pattern))
            if not found:
                pytest.skip(f"{FOLDER}/{pattern} is not there: make test-nccl fetches it")
            copy = tmp_path / name
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(found[0], copy)
            caller.ask(map=str(copy))
        with Attacher(programs, include=[f"{tmp_path}/*"]) as attacher:
            scan = attacher.scan()
            assert not scan.failed
            assert {one.kind: len(one.sites) for one in scan.new_libraries} == {
                "deepep": 11,
                "nccl_ep": 2,
            }
            assert {one.state for one in scan.new_libraries} == {"attached"}
