"""Every collective row: the record has what the caller passed."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lanterne.probes import catalog
from lanterne.probes.layout import Flag, Func
from lanterne.probes.rows import Field, SourceKind

pytestmark = pytest.mark.kernel

both_methods = pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)

VALUES = {
    Field.COMM: 0x7F1200345670,
    Field.COUNT: 0x1_2345_6789,
    Field.DTYPE: 7,
    Field.PEER: 5,
    Field.STREAM: 0x7F9900001230,
}


def arguments(row: catalog.Row) -> list[int]:
    """The C arguments, by position, that put VALUES where the x86-64 row looks for them."""
    placed: dict[int, int] = {}
    for which, place in row.fields.items():
        source = place.x86_64
        if source.kind is SourceKind.REGISTER:
            placed[source.reg] = VALUES[which]
        elif source.kind is SourceKind.STACK:
            placed[6 + (source.first - 8) // 8] = VALUES[which]
    filler = 0xBAD0_BAD0_BAD0
    # Upper halves of 32-bit arguments may hold anything.
    return [placed.get(index, filler) for index in range(max(placed) + 1)]


@both_methods
def test_exported_rows(exported: Any) -> None:
    for row in catalog.COLLECTIVES:
        exported.caller.call(row.symbol, *arguments(row))
        (record,) = exported.records()
        assert record["probe"] == row.id, row.symbol
        assert record["func"] == row.func
        assert record["comm"] == VALUES[Field.COMM], row.symbol
        assert record["tid"] == exported.caller.pid
        absent_count = row.fields[Field.COUNT].x86_64.kind is SourceKind.CONSTANT
        assert record["count"] == (0 if absent_count else VALUES[Field.COUNT]), row.symbol
        assert record["dtype"] == (VALUES[Field.DTYPE] if Field.DTYPE in row.fields else 255)
        assert record["peer"] == (VALUES[Field.PEER] if Field.PEER in row.fields else -1)
        assert record["stream"] == VALUES[Field.STREAM], row.symbol
        assert record["enter_ns"] > 0
        assert record["duration_ns"] == 0
        assert not record["flags"] & (Flag.PAIR | Flag.GROUP)


def info(func: int, *, comm: int = 0x7F1200345670, root: int = 5) -> bytes:
    """The first 80 bytes of ncclInfo."""
    return struct.pack("<IxxxxQQQQIIiIQQII", func, 0, 0, 0, 96, 7, 0, root, 0, comm, 0x99, 1, 1)


def test_enqueue_check(enqueue: Any) -> None:
    rooted = {Func.BROADCAST, Func.REDUCE, Func.SEND, Func.RECV, Func.SCATTER, Func.GATHER}
    rooted |= {Func.PUT_SIGNAL, Func.SIGNAL}
    p2p = {Func.SEND_RECV, Func.SEND, Func.RECV, Func.PUT_SIGNAL, Func.SIGNAL, Func.WAIT_SIGNAL}
    for func in [f for f in Func if f < 15]:
        enqueue.caller.call("call_enqueue", enqueue.caller.memory(info(func)), 1)
        (record,) = enqueue.records()
        assert record["probe"] == catalog.ENQUEUE_CHECK_ID
        assert record["func"] == func
        assert (record["count"], record["dtype"], record["stream"]) == (96, 7, 0x99)
        assert record["comm"] == 0x7F1200345670
        assert record["peer"] == (5 if func in rooted else -1)
        assert bool(record["flags"] & Flag.P2P) == (func in p2p)


def test_enqueue_check_excludes_the_exports(enqueue: Any) -> None:
    enqueue.caller.call("pncclAllReduce", 0, 0, 1, 7, 0, 0x1230, 0)
    assert not len(enqueue.records())


def test_unreadable_info_is_counted_and_not_recorded(enqueue: Any) -> None:
    before = enqueue.loaded.programs.counters()
    enqueue.caller.call("call_enqueue", 8, 3)
    after = enqueue.loaded.programs.counters()
    assert not len(enqueue.records())
    assert after["lost_read"] - before["lost_read"] == 3


def test_sequence_numbers_per_communicator_and_lane(exported: Any) -> None:
    call = exported.caller.call
    for _ in range(3):
        call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0)
    call("pncclAllGather", 0, 0, 1, 7, 0x2000, 0)
    for peer in range(2):  # outside a group every send is an operation
        call("pncclSend", 0, 1, 7, peer, 0x1000, 0)
    call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0)
    records = exported.records()
    assert records["seq"].tolist() == [0, 1, 2, 0, 0, 1, 3]
    first = (records["flags"] & Flag.FIRST) != 0
    assert first.tolist() == [True, False, False, True, False, False, False]
    events = exported.events()
    assert events["comm"].tolist() == [0x1000, 0x2000]


@both_methods
def test_groups(exported: Any) -> None:
    call = exported.caller.call
    call("pncclGroupStart")
    call("pncclGroupStart")
    for peer in range(3):
        call("pncclSend", 0, 1, 7, peer, 0x1000, 0)
        call("pncclRecv", 0, 1, 7, peer, 0x1000, 0)
    call("pncclGroupEnd")
    call("pncclSend", 0, 1, 7, 9, 0x1000, 0)  # still inside the outer group
    call("pncclGroupEnd")
    call("pncclGroupStart")
    call("pncclSend", 0, 1, 7, 1, 0x1000, 0)
    call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0)
    call("pncclGroupEnd")
    call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0)
    records = exported.records()
    groups = records["group"]
    assert len(set(groups[:7].tolist())) == 1
    assert groups[0] != 0
    assert groups[7] == groups[8] != groups[0]
    assert groups[9] == 0
    assert records["seq"].tolist() == [0] * 7 + [1, 0, 1]
    grouped = (records["flags"] & Flag.GROUP) != 0
    assert grouped.tolist() == [True] * 9 + [False]


def test_an_end_without_a_start_does_no_harm(exported: Any) -> None:
    """As when the agent attaches inside a group."""
    exported.caller.call("pncclGroupEnd")
    exported.caller.call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0)
    (record,) = exported.records()
    assert record["group"] == 0
    assert not record["flags"] & Flag.GROUP


def test_groups_belong_to_threads(exported: Any) -> None:
    call = exported.caller.call
    call("pncclGroupStart")
    call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0, thread=1)
    call("pncclGroupStart", thread=1)
    call("pncclAllGather", 0, 0, 1, 7, 0x2000, 0)
    call("pncclAllGather", 0, 0, 1, 7, 0x1000, 0, thread=1)
    records = exported.records()
    assert records["group"][0] == 0
    assert 0 != records["group"][1] != records["group"][2] != 0
    assert records["tid"][0] == records["tid"][2] != records["tid"][1]


@both_methods
@pytest.mark.parametrize("calls", [1, 1000])
def test_every_call_is_seen_once(exported: Any, calls: int) -> None:
    before = exported.loaded.programs.counters()
    exported.caller.call("call_all_gather", calls, 0x5550)
    records = exported.records()
    after = exported.loaded.programs.counters()
    assert records["seq"].tolist() == list(range(calls))
    assert (records["count"] == 64).all()
    assert after["submitted"] - before["submitted"] >= calls
    assert after["lost_ring"] == before["lost_ring"]
