"""The life of communicators, as the programs tell it."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lanterne.probes.layout import CommFlag, CommKind, Flag

pytestmark = pytest.mark.kernel

COMM = 0x7000000010  # what the stub hands out
ID = bytes((37 * i + 11) & 255 for i in range(128))
FILLER = 0xBAD0BAD0BAD0


def config(caller: Any, name: bytes, *, size: int = 80) -> int:
    text = caller.memory(name + b"\0")
    head = struct.pack("<QII", size, 0xCAFEBEEF, 22800).ljust(48, b"\0")
    return int(caller.memory(head + struct.pack("<Q", text).ljust(64, b"\0")))


def test_init_rank(exported: Any) -> None:
    """The 128-byte id travels on the stack, and rank in the register behind it."""
    slot = exported.caller.memory(bytes(8))
    exported.caller.call("pncclCommInitRank", slot, 16, ID.hex(), 11, FILLER)
    (event,) = exported.events()
    assert event["kind"] == CommKind.INIT
    assert event["id"].tobytes() == ID
    assert (event["n_ranks"], event["rank"], event["rc"]) == (16, 11, 0)
    assert (event["comm"], event["slot"], event["probe"]) == (COMM, slot, 50)
    assert event["flags"] == CommFlag.ID | CommFlag.RANK
    assert event["tgid"] == exported.caller.pid
    assert event["duration_ns"] > 0
    assert not event["name"]


def test_init_that_fails_is_told(exported: Any) -> None:
    exported.caller.set("stub_rc", 3)
    slot = exported.caller.memory(bytes(8))
    exported.caller.call("pncclCommInitRank", slot, 16, ID.hex(), 11, FILLER)
    (event,) = exported.events()
    assert event["rc"] == 3
    assert event["comm"] == 0
    assert event["id"].tobytes() == ID


@pytest.mark.parametrize(("size", "name"), [(80, b"experts"), (48, b"")])
def test_config_name_only_where_the_struct_has_it(exported: Any, size: int, name: bytes) -> None:
    caller = exported.caller
    slot = caller.memory(bytes(8))
    caller.call(
        "pncclCommInitRankConfig", slot, 4, ID.hex(), 3, config(caller, b"experts", size=size)
    )
    (event,) = exported.events()
    assert event["name"] == name
    assert bool(event["flags"] & CommFlag.NAME) == bool(name)


def test_scalable(exported: Any) -> None:
    caller = exported.caller
    slot, ids = caller.memory(bytes(8)), caller.memory(ID + bytes(128))
    caller.call("pncclCommInitRankScalable", slot, 8, 5, 2, ids, config(caller, b"ep"))
    (event,) = exported.events()
    assert event["id"].tobytes() == ID
    assert (event["n_ranks"], event["rank"], event["name"]) == (8, 5, b"ep")


def test_init_all(exported: Any) -> None:
    slots = exported.caller.memory(bytes(64))
    exported.caller.call("pncclCommInitAll", slots, 3, 0)
    events = exported.events()
    assert events["kind"].tolist() == [CommKind.INIT_ALL] * 3
    assert events["comm"].tolist() == [COMM + 4096 * i for i in range(3)]
    assert events["rank"].tolist() == events["key"].tolist() == [0, 1, 2]
    assert events["n_ranks"].tolist() == [3] * 3
    assert events["slot"].tolist() == [slots + 8 * i for i in range(3)]


def test_split_shrink_grow(exported: Any) -> None:
    caller = exported.caller
    slot = caller.memory(bytes(8))
    caller.call("pncclCommSplit", 0x4560, 2, 7, slot, config(caller, b"tp"))
    caller.call("pncclCommShrink", 0x4560, 0, 3, slot, 0, 0)
    caller.call("pncclCommGrow", 0x4560, 9, caller.memory(ID), 8, slot, 0)
    split, shrink, grow = exported.events()
    assert (split["kind"], split["color"], split["key"]) == (CommKind.SPLIT, 2, 7)
    assert (split["parent"], split["comm"], split["name"]) == (0x4560, COMM, b"tp")
    assert (shrink["kind"], shrink["color"], shrink["parent"]) == (CommKind.SHRINK, 3, 0x4560)
    assert (grow["kind"], grow["n_ranks"], grow["rank"]) == (CommKind.GROW, 9, 8)
    assert grow["id"].tobytes() == ID


def test_no_color_is_not_pending(exported: Any) -> None:
    exported.caller.set("stub_comm", 0)
    slot = exported.caller.memory(bytes(8))
    exported.caller.call("pncclCommSplit", 0x4560, -1, 0, slot, 0)
    (event,) = exported.events()
    assert (event["comm"], event["color"]) == (0, -1)
    assert not event["flags"] & CommFlag.PENDING


def test_created_inside_a_group(exported: Any) -> None:
    """The variable is written late: told at once as pending, and again at the group's end."""
    caller = exported.caller
    slot = caller.memory(bytes(8))
    caller.call("pncclGroupStart")
    caller.set("stub_comm", 0)
    caller.call("pncclCommInitRank", slot, 2, ID.hex(), 1, FILLER)
    (event,) = exported.events()
    assert event["flags"] & CommFlag.PENDING
    assert (event["comm"], event["slot"]) == (0, slot)
    caller.set("stub_comm", COMM)
    caller.set("stub_later", slot)
    caller.call("pncclGroupEnd")
    (event,) = exported.events()
    assert (event["comm"], event["rank"], event["n_ranks"]) == (COMM, 1, 2)
    assert not event["flags"] & CommFlag.PENDING
    assert event["id"].tobytes() == ID
    caller.call("pncclGroupStart")
    caller.call("pncclGroupEnd")
    assert not len(exported.events())


def test_ends(exported: Any) -> None:
    for symbol, kind in (
        ("pncclCommFinalize", CommKind.FINALIZE),
        ("pncclCommRevoke", CommKind.REVOKE),
        ("pncclCommDestroy", CommKind.DESTROY),
        ("pncclCommAbort", CommKind.ABORT),
    ):
        exported.caller.call(symbol, 0x4560, 0)
        (event,) = exported.events()
        assert (event["kind"], event["comm"]) == (kind, 0x4560)


@pytest.mark.parametrize("symbol", ["pncclCommDestroy", "pncclCommAbort"])
def test_numbers_start_again_at_a_reused_pointer(exported: Any, symbol: str) -> None:
    call = exported.caller.call
    call("call_all_gather", 3, 0x4560)
    call(symbol, 0x4560)
    call("call_all_gather", 2, 0x4560)
    records = exported.records()
    assert records["seq"].tolist() == [0, 1, 2, 0, 1]
    assert ((records["flags"] & Flag.FIRST) != 0).tolist() == [True, False, False, True, False]
