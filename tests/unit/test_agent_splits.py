"""Rows of PyTorch's calls and bytes of their transport, brought together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lanterne.agent.events import CAPTURED, NO_SLOT, Operations, empty_operations
from lanterne.agent.splits import KEPT_ROUNDS, Splits
from lanterne.agent.summaries import summarize
from lanterne.probes.layout import RECORD, Flag, Func

SLOT = 3


def calls(*rows: tuple[int, int, int], slot: int = SLOT) -> tuple[np.ndarray, np.ndarray]:
    """(time, rows sent, rows received)."""
    records = np.zeros(len(rows), RECORD)
    records["func"] = Func.SPLITS
    for record, (enter, sent, received) in zip(records, rows, strict=True):
        record["enter_ns"], record["count"], record["stream"] = enter, sent, received
    return records, np.full(len(rows), slot, np.uint16)


def operations(*rows: tuple[int, int], first: int = 0, slot: int = SLOT) -> Operations:
    """(arrival, bytes sent)."""
    one = empty_operations()
    n = len(rows)
    filled = {name: np.zeros(n, getattr(one, name).dtype) for name in one.__dataclass_fields__}
    made = Operations(**filled)
    arrival, size = np.array(rows, np.uint64).reshape(n, 2).T
    return replace(
        made,
        slot=np.full(n, slot, np.uint16),
        seq=np.arange(first, first + n, dtype=np.uint32),
        op=np.full(n, Func.ALL_TO_ALL_V, np.uint8),
        root=np.full(n, -1, np.int32),
        arrival_ns=arrival,
        bytes=size,
    )


def test_bytes_of_a_row() -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6), (20, 6, 4), (30, 0, 5)))
    found = splits.attach(operations((11, 4 * 96), (21, 6 * 96), (31, 0)))
    assert found.root.tolist() == [96, 96, 0]
    assert splits.unmatched == 0
    sums = summarize(found, np.zeros(3, np.uint8))
    assert sums.token_bytes.tolist() == [96]  # the empty one carries nothing


def test_sizes_that_differ_are_not_one() -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6), (20, 6, 4)))
    found = splits.attach(operations((11, 4 * 96), (21, 6 * 48)))
    assert found.root.tolist() == [96, 48]
    assert summarize(found, np.zeros(2, np.uint8)).token_bytes.tolist() == [0]


def test_operations_from_before_the_first_call_are_left_out() -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6), (20, 6, 4)))
    found = splits.attach(operations((5, 700), (11, 4 * 96), (21, 6 * 96)))
    assert found.root.tolist() == [-1, 96, 96]
    assert splits.unmatched == 0


def test_an_operation_may_come_a_window_later() -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6), (20, 6, 4)))
    assert splits.attach(operations((11, 4 * 8))).root.tolist() == [8]
    assert splits.attach(operations((40, 6 * 8), first=1)).root.tolist() == [8]
    assert splits.unmatched == 0


def test_what_does_not_fit_tells_nothing_and_is_counted() -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6), (20, 6, 4), (30, 0, 4)))
    found = splits.attach(operations((11, 97), (21, 6 * 8), (31, 8)))
    assert found.root.tolist() == [-1, 8, -1]
    assert splits.unmatched == 2


def test_communicators_are_apart() -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6), slot=1))
    splits.add(*calls((10, 2, 6), slot=2))
    first, second = operations((11, 40), slot=1), operations((11, 40), slot=2)
    assert splits.attach(first).root.tolist() == [10]
    assert splits.attach(second).root.tolist() == [20]
    splits.add(*calls((50, 2, 6), slot=2))
    splits.forget(np.array([2], np.uint16))
    assert splits.attach(operations((51, 40), slot=2)).root.tolist() == [-1]


@pytest.mark.parametrize("rounds", [KEPT_ROUNDS - 1, KEPT_ROUNDS])
def test_a_call_whose_operation_never_comes_is_given_up(rounds: int) -> None:
    splits = Splits()
    splits.add(*calls((10, 4, 6)))
    for _ in range(rounds + 1):
        splits.attach(empty_operations())
    assert splits.unmatched == int(rounds == KEPT_ROUNDS)


def made(*rows: tuple[int, int, int], slot: int = SLOT) -> tuple[np.ndarray, np.ndarray]:
    """Drained sends and receives: (thread, time, number of their group)."""
    records = np.zeros(len(rows), RECORD)
    records["func"], records["flags"] = Func.SEND, Flag.P2P | Flag.GROUP
    for record, (thread, enter, seq) in zip(records, rows, strict=True):
        record["tid"], record["enter_ns"], record["seq"] = thread, enter, seq
    return records, np.full(len(rows), slot, np.uint16)


def waiting(*rows: tuple[int, int, int], thread: int = 7) -> np.ndarray:
    records, _ = calls(*rows)
    records["tid"], records["peer"] = thread, -1
    return records


def groups(*rows: tuple[int, int], first: int = 0, root: int = -1) -> Operations:
    """Groups of sends as they come out of `classify`: (arrival, bytes sent)."""
    of = operations(*rows, first=first)
    n = len(rows)
    return replace(
        of,
        lane=np.ones(n, np.uint8),
        op=np.full(n, Func.P2P_GROUP, np.uint8),
        root=np.full(n, root, np.int32),
    )


def test_sends_of_the_same_thread_tell_the_communicator() -> None:
    splits = Splits()
    splits.wait(waiting((10, 4, 6), (20, 6, 4)))
    # Another thread's group in between, and one of this thread before the first call.
    splits.place(*made((7, 9, 4), (7, 11, 5), (8, 12, 6), (7, 13, 5), (7, 21, 7)))
    found = splits.attach(groups((9, 32), (11, 4 * 96), (12, 40), (21, 6 * 96), first=4))
    assert found.root.tolist() == [-1, 96, -1, 96]
    p2p, exchange = Func.P2P_GROUP, Func.ALL_TO_ALL_V
    assert found.op.tolist() == [p2p, exchange, p2p, exchange]
    assert splits.unmatched == 0


def test_sends_may_come_in_a_later_drain_and_window() -> None:
    splits = Splits()
    splits.wait(waiting((10, 4, 6)))
    splits.place(*made((7, 5, 2), (8, 12, 3)))
    splits.attach(empty_operations())
    splits.place(*made((7, 11, 4), (7, 12, 4)))
    splits.attach(empty_operations())
    assert splits.attach(groups((11, 4 * 96), first=4)).root.tolist() == [96]
    assert splits.unmatched == 0


def test_calls_that_share_a_group_tell_nothing() -> None:
    splits = Splits()
    splits.wait(waiting((10, 4, 6), (20, 4, 6)))
    splits.place(*made((7, 11, 5), (7, 21, 5)))
    assert splits.attach(groups((11, 8 * 96), first=5)).root.tolist() == [-1]
    assert splits.unmatched == 2


def test_a_call_without_sends_does_not_take_those_of_the_next() -> None:
    splits = Splits()
    splits.wait(waiting((10, 4, 6), (20, 6, 4)))
    splits.place(*made((7, 21, 5)))
    assert splits.attach(groups((21, 6 * 96), first=5)).root.tolist() == [96]
    assert splits.unmatched == 1


def test_what_goes_into_a_graph_or_to_nobody_known_tells_nothing() -> None:
    splits = Splits()
    splits.wait(waiting((10, 4, 6), (20, 6, 4)))
    splits.place(*made((7, 11, 5)))
    splits.place(*made((7, 21, 6), slot=NO_SLOT))
    captured = groups((11, 0), first=5, root=3)
    captured.flags[:] = CAPTURED
    found = splits.attach(captured)
    assert found.op.tolist() == [Func.ALL_TO_ALL_V]
    assert summarize(found, np.zeros(1, np.uint8)).token_bytes.tolist() == [0]
    assert splits.unmatched == 1


def test_the_peer_of_a_group_with_one_send_is_no_token() -> None:
    one = replace(groups((11, 300), root=3), op=np.full(1, Func.ALL_TO_ALL_V, np.uint8))
    found = Splits().attach(one)
    assert summarize(found, np.zeros(1, np.uint8)).token_bytes.tolist() == [0]


@pytest.mark.parametrize("rounds", [KEPT_ROUNDS - 1, KEPT_ROUNDS])
def test_a_call_whose_sends_never_come_is_given_up(rounds: int) -> None:
    splits = Splits()
    splits.wait(waiting((10, 4, 6)))
    for _ in range(rounds + 1):
        splits.attach(empty_operations())
    assert splits.unmatched == int(rounds == KEPT_ROUNDS)
