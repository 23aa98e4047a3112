"""Rows of PyTorch's calls and bytes of their transport, brought together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lanterne.agent.events import Operations, empty_operations
from lanterne.agent.splits import KEPT_ROUNDS, Splits
from lanterne.agent.summaries import summarize
from lanterne.probes.layout import RECORD, Func

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
