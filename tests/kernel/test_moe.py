"""Dispatch and combine of DeepEP and NCCL EP: what the programs read at the launchers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.library import AttachedLibrary
from lanterne.probes import catalog
from lanterne.probes.layout import CommFlag, CommKind, Flag, Func
from lanterne.probes.rows import DERIVED_ROWS, Field, SourceKind
from tests.kernel.conftest import Loaded, Scene
from tests.kernel.stub import Caller
from tests.rig.moe.build import BUILDS, build_deepep, build_nccl_ep

pytestmark = pytest.mark.kernel

GARBAGE = 0xDEAD_BEEF << 32  # what may stand above a 4-byte argument in its 8-byte slot
SEND, RECEIVE, BOTH = 1, 2, 3


class Experts(Scene):
    """A calling process with one build of DeepEP, and the launchers by scope and function."""

    library: AttachedLibrary

    def row(self, scope: str, function: str) -> catalog.Row:
        found = [
            site.what
            for site in self.library.sites
            if f"{len(scope)}{scope}{len(function)}{function}E" in site.symbol
        ]
        assert len(found) == 1, (scope, function)
        return found[0]

    def call(self, scope: str, function: str, *, eight_bit: bool = False, **values: int) -> None:
        """Calls a launcher with these values where its parameters stand, and garbage elsewhere."""
        row = self.row(scope, function)
        self.caller.call(row.symbol, *arguments(row, values | {"halved": int(eight_bit)}))


def arguments(row: catalog.Row, values: Mapping[str, int]) -> list[int]:
    """Six registers and 34 slots: more than any launcher has."""
    filled = [GARBAGE | 7] * 40
    for name, value in values.items():
        place = row.fields.get(Field[name.upper()])
        if place is None:
            continue
        source = place.x86_64
        index = source.reg if source.kind is SourceKind.REGISTER else source.first // 8 + 5
        wide = value if source.width == 8 else GARBAGE | value & 0xFFFFFFFF
        filled[index] = wide
    return filled


def scene(loaded: Loaded, folder: Path, build: str) -> Iterator[Experts]:
    library = build_deepep(folder, build)
    with Caller(library) as caller, loaded.attacher(folder) as attacher:
        scan = attacher.scan()
        assert not scan.failed
        (found,) = scan.new_libraries
        assert (found.kind, found.state) == ("deepep", "attached")
        experts = Experts(loaded, attacher, caller)
        experts.library = found
        experts.records()
        experts.events()
        yield experts


@pytest.fixture(params=list(BUILDS))
def experts(request: pytest.FixtureRequest, loaded: Loaded, tmp_path: Path) -> Iterator[Experts]:
    yield from scene(loaded, tmp_path, request.param)


@pytest.fixture
def sgl(loaded: Loaded, tmp_path: Path) -> Iterator[Experts]:
    yield from scene(loaded, tmp_path, "sgl")


PLACE = {"rank": 5, "n_ranks": 16, "top_k": 8, "stream": 0x7F00_1234_5670}
CASES = [
    ("internode_ll", "dispatch", {"count": 128, "scale": 7168, "phases": BOTH}, 128 * 7168 * 2),
    ("internode_ll", "combine", {"count": 96, "scale": 7168, "phases": BOTH}, 96 * 7168 * 2),
    ("intranode", "dispatch", {"count": 4096, "scale": 896, "worst": 0}, 4096 * 896 * 16),
    ("intranode", "combine", {"count": 5000, "scale": 7168}, 5000 * 7168 * 2),
    ("internode", "dispatch", {"count": 4096, "scale": 448, "worst": 0}, 4096 * 448 * 16),
    ("internode", "combine", {"count": 6000, "scale": 7168}, 6000 * 7168 * 2),
]


def test_every_launcher_is_attached_and_no_stub(experts: Experts) -> None:
    rows = [site.what for site in experts.library.sites]
    programs = [row.program for row in rows]
    assert programs.count(catalog.Program.MOE_NOTIFY) == 2
    elastic = [row for row in rows if row.id]
    assert programs.count(catalog.Program.MOE) == 6 + len(elastic)
    assert len(elastic) in (0, 2)
    assert not [site for site in experts.library.sites if "ILi8E" in site.symbol]


@pytest.mark.parametrize(("scope", "function", "values", "size"), CASES)
def test_arguments(
    experts: Experts, scope: str, function: str, values: dict[str, int], size: int
) -> None:
    experts.call(scope, function, **values, **PLACE)
    (record,) = experts.records()
    expected = Func.DISPATCH if function == "dispatch" else Func.COMBINE
    assert (record["func"], record["count"], record["top_k"]) == (expected, size, 8)
    token = size // values["count"]
    assert (record["stream"], record["peer"], record["dtype"]) == (PLACE["stream"], token, 255)
    assert record["flags"] == Flag.BYTES | Flag.FIRST
    assert record["probe"] >= DERIVED_ROWS
    assert record["duration_ns"] == 0
    (event,) = experts.events()
    assert (event["kind"], event["flags"]) == (CommKind.FIRST_USE, CommFlag.RANK)
    assert (event["rank"], event["n_ranks"], event["comm"]) == (5, 16, record["comm"])


def test_eight_bit_tokens_are_half_as_many_bytes(experts: Experts) -> None:
    experts.call(
        "internode_ll", "dispatch", eight_bit=True, count=128, scale=7168, phases=BOTH, **PLACE
    )
    assert experts.records()["count"].tolist() == [128 * 7168]


def test_sending_and_receiving_are_one_operation(experts: Experts) -> None:
    for function in ("dispatch", "combine"):
        for phases in (SEND, RECEIVE):
            experts.call("internode_ll", function, count=8, scale=64, phases=phases, **PLACE)
    records = experts.records()
    assert records["func"].tolist() == [Func.DISPATCH, Func.COMBINE]
    assert records["seq"].tolist() == [0, 1]


@pytest.mark.parametrize("scope", ["intranode", "internode"])
def test_the_wait_for_the_counts_of_the_others(experts: Experts, scope: str) -> None:
    """From the return of notify_dispatch to the launcher; once, and on the same thread only."""
    values = {"count": 16, "scale": 8, "worst": 0, **PLACE}
    experts.caller.call(experts.row(scope, "notify_dispatch").symbol, *[0] * 40)
    experts.call(scope, "dispatch", **values)
    experts.call(scope, "dispatch", **values)  # cached: no counts are exchanged
    waited, cached = experts.records()
    assert waited["flags"] == Flag.BYTES | Flag.FIRST | Flag.PAIR | Flag.BLOCKING
    assert waited["duration_ns"] > 0
    assert waited["enter_ns"] + waited["duration_ns"] < cached["enter_ns"]
    assert (cached["flags"], cached["duration_ns"]) == (Flag.BYTES, 0)
    notify = experts.row(scope, "notify_dispatch").symbol
    experts.caller.call(notify, *[0] * 40, thread=1)
    experts.call(scope, "dispatch", **values)
    assert experts.records()["flags"].tolist() == [Flag.BYTES]


def test_no_wait_where_the_caller_gives_the_worst_case(sgl: Experts) -> None:
    for scope in ("intranode", "internode"):
        sgl.caller.call(sgl.row(scope, "notify_dispatch").symbol, *[0] * 40)
        sgl.call(scope, "dispatch", count=16, scale=8, worst=4096, **PLACE)
        (record,) = sgl.records()
        assert not record["flags"] & (Flag.PAIR | Flag.BLOCKING)
        assert record["duration_ns"] == 0


def test_senseless_ranks_are_counted_and_not_told(sgl: Experts) -> None:
    before = sgl.loaded.programs.counters()["lost_read"]
    for rank, size in ((16, 16), (-1, 16), (0, 0), (0, 1 << 20)):
        values = PLACE | {"rank": rank, "n_ranks": size}
        sgl.call("intranode", "combine", count=1, scale=1, **values)
    assert not len(sgl.records())
    assert sgl.loaded.programs.counters()["lost_read"] == before + 4


def test_sizes_are_numbered_apart(sgl: Experts) -> None:
    for size in (8, 16, 8, 16):
        sgl.call("intranode", "combine", count=1, scale=1, **PLACE | {"n_ranks": size})
    records = sgl.records()
    assert records["seq"].tolist() == [0, 0, 1, 1]
    assert len(set(records["comm"].tolist())) == 2
    assert (records["comm"] >> np.uint64(48) == 0xDEE9).all()


def test_elastic_arguments_by_value(sgl: Experts) -> None:
    def members(size: int, **values: tuple[int, int]) -> int:
        block = bytearray(b"\xee" * size)
        for offset, value in values.values():
            struct.pack_into("<i", block, offset, value)
        return int(sgl.caller.memory(bytes(block)))

    stream = 0x7F00_4444_0000
    config = sgl.caller.memory(struct.pack("<7IxxxxQQI", *range(7), stream, 0, 0))
    dispatch = members(
        240, out=(20, 4), up=(24, 8), hidden=(28, 7168), top_k=(44, 6), tokens=(152, 300),
        out_rank=(208, 3), rank=(212, 2),
    )  # fmt: skip
    combine = members(
        168, out=(12, 4), up=(16, 8), hidden=(20, 7168), top_k=(32, 6), out_rank=(128, 3),
        rank=(132, 2), tokens=(136, 300),
    )  # fmt: skip
    sgl.caller.call("call_elastic_dispatch", dispatch, config)
    sgl.caller.call("call_elastic_combine", combine, config)
    records = sgl.records()
    assert records["func"].tolist() == [Func.DISPATCH, Func.COMBINE]
    assert records["count"].tolist() == [300 * 7168, 300 * 7168 * 2]
    assert records["top_k"].tolist() == [6, 6]
    assert records["stream"].tolist() == [stream, stream]
    (event,) = sgl.events()
    assert (event["rank"], event["n_ranks"]) == (3 * 8 + 2, 32)


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_nccl_ep(loaded: Loaded, tmp_path: Path) -> None:
    library = build_nccl_ep(tmp_path)
    with Caller(library) as caller, loaded.attacher(tmp_path) as attacher:
        (found,) = attacher.scan().new_libraries
        assert (found.kind, found.state) == ("nccl_ep", "attached")
        assert {site.symbol for site in found.sites} == {"ncclEpDispatch", "ncclEpCombine"}

        def tensor(*sizes: int, dtype: int) -> int:
            extents = caller.memory(struct.pack(f"<{len(sizes)}Q", *sizes))
            return int(
                caller.memory(
                    struct.pack("<IIIIQQQQ", 48, 0xCAFECAFE, len(sizes), dtype, 0, 0, 0, extents)
                )
            )

        def named(tokens: int) -> int:
            return int(caller.memory(struct.pack("<IIQQQQ", 40, 0xC00FFFEE, tokens, 0, 0, 0)))

        comm, stream = 0x7F10_0000_1000, 0x7F10_2222_0000
        config = caller.memory(b"\0" * 112 + struct.pack("<ii", 16, 5))
        group, handle = caller.memory(b"\0" * 8), caller.memory(b"\0" * 8)
        caller.call("ncclEpCreateGroup", group, comm, config)
        group_at = pointer(caller, group)
        caller.call("ncclEpCreateHandle", handle, group_at, 1, tensor(200, 8, dtype=2), 0, 0, 0)
        at = pointer(caller, handle)
        inputs, outputs = named(tensor(200, 7168, dtype=9)), named(tensor(200, 7168, dtype=9))
        received = named(tensor(4, 512, 7168, dtype=9))
        staged = caller.memory(struct.pack("<III", 12, 0xC00FFFEE, 1))
        loaded.records(caller.pid)
        caller.call("ncclEpDispatch", at, inputs, received, 0, staged, stream)
        caller.call("ncclEpComplete", at, 0, stream)  # the second half of the same exchange
        caller.call("ncclEpCombine", at, received, outputs, 0, stream)
        records = loaded.records(caller.pid)
    assert records["func"].tolist() == [Func.DISPATCH, Func.COMBINE]
    assert records["comm"].tolist() == [comm, comm]
    assert records["seq"].tolist() == [0, 1]
    assert records["count"].tolist() == [200 * 7168] * 2
    assert (records["dtype"] == 9).all()
    assert (records["top_k"] == 8).all()
    assert records["stream"].tolist() == [stream, stream]
    assert (records["flags"] & (Flag.BYTES | Flag.PAIR | Flag.BLOCKING) == 0).all()


def pointer(caller: Any, address: int) -> int:
    return int.from_bytes(bytes.fromhex(caller.ask(peek=[address, 8])), "little")
