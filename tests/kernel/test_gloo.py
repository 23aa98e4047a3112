"""Gloo's option structs and pairs: entry and return in one record."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lanterne.probes import catalog
from lanterne.probes.layout import CommFlag, CommKind, Flag, Func
from lanterne.probes.rows import Field, SourceKind

pytestmark = pytest.mark.kernel

BY_FUNC = {
    Func(row.func): row
    for row in catalog.ROWS
    if row.library is catalog.Library.GLOO and row.program is catalog.Program.PAIR
}


def context(caller: Any, rank: int, size: int, *, table: bool = False) -> int:
    head = struct.pack("<Q", 0x7FD0A120D1B0) if table else b""
    return int(caller.memory(head + struct.pack("<iii", rank, size, 2).ljust(64, b"\0")))


def options(caller: Any, row: catalog.Row, comm: int, **values: int) -> int:
    """An options struct with these values where the row looks for them."""
    block = bytearray(192)
    for name, value in {"comm": comm, **values}.items():
        source = row.fields[Field[name.upper()]].x86_64
        if source.kind is SourceKind.CHAIN:
            inner = bytearray(32)
            struct.pack_into("<Q", inner, source.second, value)
            value = caller.memory(bytes(inner))
        if source.kind in (SourceKind.MEMORY, SourceKind.CHAIN):
            struct.pack_into("<I" if source.width == 4 else "<Q", block, source.first, value)
    return int(caller.memory(bytes(block)))


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_rows(gloo: Any) -> None:
    comm = context(gloo.caller, 1, 4)
    expected = {
        Func.ALL_REDUCE: ({"count": 100, "scale": 4}, 400, -1),
        Func.ALL_GATHER: ({"count": 120}, 120, -1),
        Func.ALL_GATHER_V: ({}, 0, -1),
        Func.ALL_TO_ALL: ({"count": 4000}, 1000, -1),  # per peer
        Func.BROADCAST: ({"count": 10, "scale": 8, "peer": 3}, 80, 3),
        Func.BARRIER: ({}, 0, -1),
        Func.REDUCE: ({"count": 10, "scale": 2, "peer": 2}, 20, 2),
        Func.GATHER: ({"count": 33, "peer": 1}, 33, 1),
        Func.SCATTER: ({"count": 44, "peer": 2}, 44, 2),
    }
    for seq, (func, (values, count, peer)) in enumerate(expected.items()):
        row = BY_FUNC[func]
        gloo.caller.call(row.symbol, options(gloo.caller, row, comm, **values))
        (record,) = gloo.records()
        assert (record["func"], record["comm"], record["seq"]) == (func, comm, seq)
        assert (record["count"], record["peer"]) == (count, peer), func
        assert record["dtype"] == 255
        flags = Flag.PAIR | Flag.BLOCKING | Flag.BYTES | (Flag.FIRST if seq == 0 else 0)
        assert record["flags"] == flags
        assert record["duration_ns"] > 0
    (event,) = gloo.events()
    assert (event["kind"], event["comm"]) == (CommKind.FIRST_USE, comm)
    assert (event["rank"], event["n_ranks"], event["flags"]) == (1, 4, CommFlag.RANK)


def test_context_with_a_virtual_table(gloo: Any) -> None:
    row = BY_FUNC[Func.BARRIER]
    comm = context(gloo.caller, 2, 3, table=True)
    gloo.caller.call(row.symbol, options(gloo.caller, row, comm))
    (event,) = gloo.events()
    assert (event["rank"], event["n_ranks"]) == (2, 3)


def test_unreadable_context_has_no_rank(gloo: Any) -> None:
    row = BY_FUNC[Func.BARRIER]
    gloo.caller.call(row.symbol, options(gloo.caller, row, 0x1000))
    (event,) = gloo.events()
    assert not event["flags"] & CommFlag.RANK
    assert len(gloo.records()) == 1


@pytest.mark.parametrize(("ranks", "told"), [(4, 4), (100, 64)])
def test_vector_all_to_all(gloo: Any, ranks: int, told: int) -> None:
    """Two records per peer (64 at most), then the call's own, all with one number and group."""
    caller, row = gloo.caller, BY_FUNC[Func.ALL_TO_ALL_V]
    comm = context(caller, 1, ranks)
    lengths = [1000 + i for i in range(ranks)]
    back = [7 * i for i in range(ranks)]
    vector, receive = (caller.memory(struct.pack(f"<{ranks}Q", *v)) for v in (lengths, back))
    values = {"count": sum(lengths), "vector": vector, "receive_vector": receive}
    caller.call(row.symbol, options(caller, row, comm, **values))
    records = gloo.records()
    assert len(records) == 2 * told + 1
    parts, call = records[:-1], records[-1]
    for half, func, expected in ((0, Func.SEND, lengths), (1, Func.RECV, back)):
        mine = parts[half * told : (half + 1) * told]
        assert (mine["func"] == func).all()
        assert mine["peer"].tolist() == list(range(told))
        assert mine["count"].tolist() == expected[:told]
    assert (parts["flags"] == Flag.P2P | Flag.BYTES | Flag.BLOCKING).all()
    assert (call["func"], call["count"]) == (Func.ALL_TO_ALL_V, sum(lengths))
    assert set(records["group"].tolist()) == {int(call["group"])} != {0}
    assert set(records["seq"].tolist()) == {0}
    assert (records["probe"] == row.id).all()


def test_nested_call_is_not_recorded(gloo: Any) -> None:
    caller = gloo.caller
    outer, inner = BY_FUNC[Func.REDUCE], BY_FUNC[Func.BARRIER]
    block = options(caller, outer, context(caller, 0, 2), count=1, scale=1, peer=0)
    before = gloo.loaded.programs.counters()
    caller.call(outer.symbol, block)
    assert gloo.records()["func"].tolist() == [Func.REDUCE]
    caller.set("stub_nested", caller.address("stub_nested_target"))
    caller.call(outer.symbol, block)
    assert gloo.records()["func"].tolist() == [Func.REDUCE]
    after = gloo.loaded.programs.counters()
    assert after["nested"] - before["nested"] == 1
    assert after["orphan_return"] == before["orphan_return"]
    caller.call(inner.symbol, block)
    assert gloo.records()["func"].tolist() == [Func.BARRIER]


def test_call_left_by_an_exception_goes_out_without_a_duration(gloo: Any) -> None:
    caller, row = gloo.caller, BY_FUNC[Func.BARRIER]
    block = options(caller, row, context(caller, 0, 2))
    assert caller.call("call_and_leave", caller.address(row.symbol), block) == 77
    assert not len(gloo.records())
    caller.call(row.symbol, block)
    left, normal = gloo.records()
    assert (left["seq"], normal["seq"]) == (0, 1)
    assert not left["flags"] & Flag.PAIR
    assert left["duration_ns"] == 0
    assert normal["flags"] & Flag.PAIR


def std_string(caller: Any, text: bytes) -> bytes:
    return struct.pack("<QQ", caller.memory(text + b"\0"), len(text))


def store_chain(caller: Any, prefixes: list[bytes], *, port: int = 29505) -> int:
    """Address of the shared_ptr that connectFullMesh gets; prefixes from root to leaf."""
    table = 0x7F0000AAA0
    tcp = struct.pack("<QQQ", 0x7F0000BBB0, 1, 300000) + std_string(caller, b"10.1.2.3")
    store = caller.memory(tcp.ljust(56, b"\0") + struct.pack("<Q", port))
    for prefix in prefixes:
        head = struct.pack("<QQQ", table, 1, 300000) + std_string(caller, prefix)
        store = caller.memory(head.ljust(56, b"\0") + struct.pack("<Q", store))
    gloo_store = caller.memory(struct.pack("<QQ", 0x7F0000CCC0, store))
    outer = struct.pack("<Q", 0x7F0000DDD0) + std_string(caller, b"0")
    outer = caller.memory(outer.ljust(40, b"\0") + struct.pack("<QQ", gloo_store, 0))
    return int(caller.memory(struct.pack("<QQ", outer, 0)))


def connect(gloo: Any, prefixes: list[bytes], **options: int) -> Any:
    caller = gloo.caller
    this = caller.memory(struct.pack("<Qii", 0x7FD0A120D1B0, 1, 2).ljust(64, b"\0"))
    caller.call(catalog.BY_ID[80].symbol, this, store_chain(caller, prefixes, **options))
    (event,) = gloo.events()
    assert event["kind"] == CommKind.CONNECT
    assert event["comm"] == this + 8  # what later calls have in their options
    assert (event["rank"], event["n_ranks"]) == (1, 2)
    return event


def test_connect_tells_the_prefix_and_the_store(gloo: Any) -> None:
    event = connect(gloo, [b"default_pg", b"0/", b"1/", b"cpu/"])
    assert event["name"] == b"default_pg/0//1//cpu/"
    assert event["id"].tobytes().rstrip(b"\0") == b"10.1.2.3"
    assert event["key"] == 29505
    assert event["flags"] == CommFlag.NAME | CommFlag.RANK


def test_connect_with_a_name_too_long_tells_none(gloo: Any) -> None:
    event = connect(gloo, [b"x" * 24, b"y" * 24, b"z" * 24])
    assert not event["flags"] & CommFlag.NAME


def test_connect_without_a_tcp_store(gloo: Any) -> None:
    event = connect(gloo, [b"default_pg", b"cpu/"], port=1 << 40)
    assert event["name"] == b"default_pg/cpu/"
    assert event["key"] == 0
    assert not event["id"].any()
