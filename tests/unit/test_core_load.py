"""The spread of tokens over ranks, from the bytes that combines send back."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.collector.analyse import ops
from lanterne.collector.analyse.load import Loads, figures, shares

MEMBERS = np.arange(4)


def add(loads: Loads, op: int, role: int, size: list[int], *, evidence: int = 0, n: int = 10,
        token: int = 0) -> None:  # fmt: skip
    rows = [np.full(4, value) for value in (op, role, evidence, n, token)]
    loads.add(MEMBERS, rows[0], rows[1], rows[2], rows[3], np.array(size), rows[4])


def test_all_to_alls_tell_it_by_their_combines_alone() -> None:
    loads = Loads(8)
    add(loads, ops.ALL_TO_ALL_V, ops.DISPATCH, [9, 9, 9, 9])
    add(loads, ops.ALL_TO_ALL_V, ops.COMBINE, [1, 2, 3, 4])
    add(loads, ops.ALL_TO_ALL_V, 0, [50, 0, 0, 0])
    found = loads.of(0, 4)
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4]
    assert loads.of(4, 4) is None


def test_reduce_scatters_do_not() -> None:
    loads = Loads(4)
    add(loads, 3, ops.COMBINE, [7, 7, 7, 7])
    add(loads, 37, ops.COMBINE, [7, 7, 7, 7])
    assert loads.of(0, 4) is None


@pytest.mark.parametrize(("waited", "known"), [(10, True), (6, False), (0, False)])
def test_a_library_does_where_its_host_waits(waited: int, known: bool) -> None:
    loads = Loads(4)
    add(loads, ops.COMBINE_CALL, ops.COMBINE, [5, 6, 7, 8])
    if waited:
        add(loads, ops.DISPATCH_CALL, ops.DISPATCH, [1] * 4, evidence=ops.BLOCKING, n=waited)
    found = loads.of(0, 4)
    assert (found is not None) is known
    if found is not None:
        assert found.tolist() == [5, 6, 7, 8]


def test_a_rank_that_is_missing_leaves_it_unknown() -> None:
    loads = Loads(4)
    ones = np.ones(3, np.int64)
    code, calls = np.full(3, ops.COMBINE_CALL), ones * 10
    loads.add(np.array([0, 1, -1]), code, ones * ops.COMBINE, ones * 0, calls, ones * 100, ones * 0)
    assert loads.of(0, 2) is None  # nobody waited
    code = np.full(3, ops.DISPATCH_CALL)
    loads.add(np.array([0, 1, -1]), code, ones, ones * ops.BLOCKING, calls, ones * 100, ones * 0)
    assert loads.of(0, 2) is not None
    assert loads.of(0, 4) is None


def test_the_span_slides_and_is_forgotten() -> None:
    loads = Loads(4)
    add(loads, ops.ALL_TO_ALL, ops.COMBINE, [1, 2, 3, 4])
    loads.close(4)
    add(loads, ops.ALL_TO_ALL, ops.COMBINE, [1, 1, 1, 1])
    found = loads.of(0, 4)
    assert found is not None
    assert found.tolist() == [2, 3, 4, 5]
    loads.close(4)
    found = loads.of(0, 4)
    assert found is not None
    assert found.tolist() == [1, 1, 1, 1]
    loads.forget(0, 4)
    assert loads.of(0, 4) is None


def tokens(loads: Loads) -> list[int] | None:
    found = loads.tokens(0, 4)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("op", [ops.ALL_TO_ALL, ops.ALL_TO_ALL_V, ops.COMBINE_CALL])
def test_tokens_where_their_bytes_are_known(op: int) -> None:
    loads = Loads(4)
    if op == ops.COMBINE_CALL:
        add(loads, ops.DISPATCH_CALL, ops.DISPATCH, [1] * 4, evidence=ops.BLOCKING, n=20)
    add(loads, op, ops.COMBINE, [512, 0, 256, 1024], token=256)
    add(loads, op, ops.COMBINE, [768, 256, 0, 0], token=256)
    assert tokens(loads) == [5, 1, 1, 4]
    loads.close(4)
    assert tokens(loads) == [5, 1, 1, 4]  # the span is two windows
    loads.close(4)
    assert tokens(loads) is None


def test_layers_of_several_sizes_add_up() -> None:
    loads = Loads(4)
    add(loads, ops.ALL_TO_ALL_V, ops.COMBINE, [512, 0, 256, 1024], token=256)
    add(loads, ops.ALL_TO_ALL_V, ops.COMBINE, [100, 200, 300, 400], token=100)
    assert tokens(loads) == [3, 2, 4, 8]


def test_one_unknown_size_leaves_only_shares() -> None:
    loads = Loads(4)
    add(loads, ops.ALL_TO_ALL_V, ops.COMBINE, [512, 256, 256, 1024], token=256)
    add(loads, ops.ALL_TO_ALL_V, ops.COMBINE, [0, 0, 0, 2048])
    assert tokens(loads) is None
    share = shares(loads.of(0, 4), None)
    assert share is not None
    assert share.tolist() == [512 / 4096, 256 / 4096, 256 / 4096, 3072 / 4096]


def test_shares_without_combines_are_those_of_the_matrix() -> None:
    matrix = np.array([[0, 30], [10, 0]])
    share = shares(None, matrix)
    assert share is not None
    assert share.tolist() == [0.25, 0.75]
    assert figures(None, matrix)["skew"] == pytest.approx(1.5)
    assert shares(None, np.zeros((2, 2), np.int64)) is None
    assert shares(None, None) is None
    assert figures(None, None) == {}
