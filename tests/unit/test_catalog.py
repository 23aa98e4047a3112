"""The catalog's rows as data: ids, no double counting, and both architectures' argument places.

aarch64 cannot run here: its places are compared with the procedure call standard's rules (x0 to
x7, then the stack from the stack pointer on), written down by hand for each prototype.
"""

from __future__ import annotations

import pytest

from lanterne.probes import catalog
from lanterne.probes.catalog import Arch, Library, Program
from lanterne.probes.layout import Func
from lanterne.probes.rows import MAX_ROWS, Field, SourceKind

# symbol: field -> (x86-64, aarch64); "r3" is the fourth argument register, "s16" the stack slot
# 16 bytes above the stack pointer at entry.
PLACES = {
    "pncclAllReduce": {"count": "r2 r2", "dtype": "r3 r3", "comm": "r5 r5", "stream": "s8 r6"},
    "pncclReduceScatter": {"count": "r2 r2", "comm": "r5 r5", "stream": "s8 r6"},
    "pncclBroadcast": {"peer": "r4 r4", "comm": "r5 r5", "stream": "s8 r6"},
    "pncclGather": {"peer": "r4 r4", "comm": "r5 r5", "stream": "s8 r6"},
    "pncclScatter": {"peer": "r4 r4", "comm": "r5 r5", "stream": "s8 r6"},
    "pncclReduce": {"peer": "r5 r5", "comm": "s8 r6", "stream": "s16 r7"},
    "pncclReduceConfig": {"peer": "r5 r5", "comm": "s8 r6", "stream": "s16 r7"},
    "pncclAllGather": {"count": "r2 r2", "comm": "r4 r4", "stream": "r5 r5"},
    "pncclAlltoAll": {"count": "r2 r2", "comm": "r4 r4", "stream": "r5 r5"},
    "pncclSend": {"count": "r1 r1", "dtype": "r2 r2", "peer": "r3 r3", "comm": "r4 r4"},
    "pncclRecv": {"count": "r1 r1", "dtype": "r2 r2", "peer": "r3 r3", "stream": "r5 r5"},
    "pncclPutSignal": {"count": "r1 r1", "comm": "s32 s8", "stream": "s40 s16"},
    "pncclSignal": {"peer": "r0 r0", "comm": "r4 r4", "stream": "r5 r5"},
    "pncclWaitSignal": {"comm": "r2 r2", "stream": "r3 r3"},
    "pncclCommInitRank": {"slot": "r0 r0", "n_ranks": "r1 r1", "id": "a8 r2", "rank": "r2 r3"},
    "pncclCommInitRankConfig": {"id": "a8 r2", "rank": "r2 r3", "config": "r3 r4"},
    "pncclCommInitRankScalable": {"rank": "r2 r2", "id": "r4 r4", "config": "r5 r5"},
    "pncclCommInitAll": {"slot": "r0 r0", "n_ranks": "r1 r1"},
    "pncclCommSplit": {"comm": "r0 r0", "color": "r1 r1", "key": "r2 r2", "slot": "r3 r3"},
    "pncclCommShrink": {"comm": "r0 r0", "color": "r2 r2", "slot": "r3 r3", "config": "r4 r4"},
    "pncclCommGrow": {"n_ranks": "r1 r1", "id": "r2 r2", "rank": "r3 r3", "slot": "r4 r4"},
    "pncclCommDestroy": {"comm": "r0 r0"},
}
LETTERS = {"r": SourceKind.REGISTER, "s": SourceKind.STACK, "a": SourceKind.STACK_ADDRESS}
BY_SYMBOL = {row.symbol: row for row in catalog.ROWS}
ALL_NCCL = {row.symbol for row in catalog.ROWS if row.library is Library.NCCL}
ENQUEUE = "_Z16ncclEnqueueCheckP8ncclInfo"


@pytest.mark.parametrize("symbol", PLACES)
@pytest.mark.parametrize("arch", list(Arch))
def test_argument_places(symbol: str, arch: Arch) -> None:
    packed = catalog.pack(arch)
    row = BY_SYMBOL[symbol]
    for name, places in PLACES[symbol].items():
        text = places.split()[list(Arch).index(arch)]
        source = packed[row.id]["source"][Field[name.upper()]]
        kind, number = LETTERS[text[0]], int(text[1:])
        assert source["kind"] == kind, name
        assert (source["reg"] if kind is SourceKind.REGISTER else source["first"]) == number, name


def test_gloo_places_are_the_same_on_both() -> None:
    x86, arm = (catalog.pack(arch) for arch in Arch)
    for row in catalog.ROWS:
        if row.library is Library.GLOO:
            assert x86[row.id] == arm[row.id]


def test_ids_and_limits() -> None:
    ids = [row.id for row in catalog.ROWS]
    assert len(set(ids)) == len(ids)
    assert min(ids) > 0
    assert max(ids) < MAX_ROWS
    for row in catalog.ROWS:
        assert set(catalog.PROGRAMS[row.program]) != {None}
        for place in row.fields.values():
            for source in (place.x86_64, place.aarch64):
                assert source.width in (4, 8)
                assert source.reg < 8


def test_enqueue_check_excludes_every_exported_collective() -> None:
    chosen = {row.symbol for row in catalog.select(Library.NCCL, ALL_NCCL)}
    assert ENQUEUE in chosen
    assert not chosen & {row.symbol for row in catalog.COLLECTIVES}
    assert {"pncclGroupStart", "pncclGroupEnd", "pncclCommInitRank"} <= chosen


def test_without_it_the_exports_are_taken() -> None:
    chosen = {row.symbol for row in catalog.select(Library.NCCL, ALL_NCCL - {ENQUEUE})}
    assert {row.symbol for row in catalog.COLLECTIVES} <= chosen


def test_exports_can_be_preferred() -> None:
    rows = catalog.select(Library.NCCL, ALL_NCCL, prefer_enqueue_check=False)
    assert ENQUEUE not in {row.symbol for row in rows}
    rows = catalog.select(Library.NCCL, {ENQUEUE}, prefer_enqueue_check=False)
    assert [row.symbol for row in rows] == [ENQUEUE]


def test_nothing_is_counted_twice() -> None:
    symbols = {row.symbol for row in catalog.ROWS}
    assert "pncclBcast" not in symbols  # calls ncclBroadcast
    # ncclX and pncclX are one address.
    assert not [one for one in symbols if one.startswith("nccl") and not one.startswith("ncclEp")]
    # cudart calls libcuda: one layer only.
    assert not [symbol for symbol in symbols if symbol.startswith("cuda")]


@pytest.mark.parametrize(("offset", "row"), [(None, 80), (0, 80), (8, 81)])
def test_one_connect_row(offset: int | None, row: int) -> None:
    found = [one.symbol for one in catalog.ROWS if one.library is Library.GLOO]
    chosen = catalog.select(Library.GLOO, found, gloo_rank_offset=offset)
    assert [one.id for one in chosen if one.program is Program.CONNECT] == [row]


def test_calls_that_are_made_of_sends_and_receives_have_no_row() -> None:
    """RCCL's ncclAllToAllv and ncclAllToAll, spelled so, call its own ncclSend and ncclRecv."""
    found = {"pncclAllToAllv", "pncclAllToAll", "pncclSend", "pncclRecv"}
    rows = catalog.select(Library.NCCL, found)
    assert {row.symbol for row in rows} == {"pncclSend", "pncclRecv"}


def test_functions_are_those_of_nccl() -> None:
    assert {row.func for row in catalog.COLLECTIVES} <= {f.value for f in Func if f < 15}


def test_symbols_to_look_for() -> None:
    exported, local = catalog.symbols(Library.NCCL)
    assert local == {ENQUEUE}
    assert "pncclAllReduce" in exported
    assert catalog.GLOO_CONSTRUCTOR in catalog.symbols(Library.GLOO)[0]
