"""Alignment tables: cells, laps, growth, and the allocator under them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.align import PRESENT, Events, Extents, Tables


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.randoms())
def test_extents_never_overlap_and_merge(sizes: list[int], random: object) -> None:
    extents, held = Extents(256), []
    for size in sizes:
        start = extents.take(size)
        if start < 0 or random.random() < 0.3:  # type: ignore[attr-defined]
            if start >= 0:
                held.append((start, size))
            if held:
                extents.give(*held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        held.append((start, size))
        taken = [cell for s, n in held for cell in range(s, s + n)]
        assert len(taken) == len(set(taken))
        assert extents.used == len(taken)
    for start, size in held:
        extents.give(start, size)
    assert extents.take(256) == 0


def make(ranks: int = 3, width: int = 31) -> Tables:
    tables = Tables(cells=4096, rows=512, tables=4)
    assert tables.open(1, ranks, width)
    return tables


def cell_of(tables: Tables, table: int, rank: int, seq: int) -> int:
    cell, _ = tables.cell_index(np.array([table], np.int32), np.array([rank]), np.array([seq]))
    return int(cell[0])


def put(tables: Tables, *events: tuple[int, int, int], now: int = 1) -> np.ndarray:
    """(rank, seq, arrival) on table 1 -> sequence numbers of the rows now complete."""
    rank, seq, arrival = np.array(events).T
    n = len(rank)
    f4 = np.zeros(n, np.float32)
    e = Events(
        table=np.ones(n, np.int32),
        rank=rank,
        seq=seq,
        arrival=arrival,
        duration=f4,
        own=f4,
        prev=np.full(n, -1, np.int32),
        sync=f4,
        size=f4,
        meta=np.full(n, PRESENT, np.uint32),
    )
    cell, row = tables.cell_index(e.table, e.rank, e.seq)
    rows = tables.scatter(e, cell, row, now)
    return np.sort(tables.tag[rows])


def test_row_is_complete_when_all_ranks_are_in() -> None:
    tables = make()
    assert put(tables, (0, 5, 10), (1, 5, 11)).tolist() == []
    assert put(tables, (2, 5, 12), (0, 6, 20)).tolist() == [5]
    rows = np.flatnonzero(tables.tag == 5)
    assert tables.arrival[tables.cells_of(rows, 3)][:, 0].tolist() == [10, 11, 12]


def test_duplicates_and_late_events_are_counted_once_each() -> None:
    tables = make()
    put(tables, (0, 5, 10))
    put(tables, (0, 5, 99))
    assert tables.counts.duplicate == 1
    assert put(tables, (1, 5, 11), (2, 5, 12)).tolist() == [5]
    tables.done(np.flatnonzero(tables.tag == 5))
    put(tables, (1, 5, 13))
    assert (tables.counts.duplicate, tables.counts.late) == (2, 0)
    put(tables, (0, 5 + 31, 40))
    put(tables, (2, 5, 14))  # its row belongs to a newer one by now
    assert tables.counts.late == 1
    rows = np.flatnonzero(tables.tag == 5 + 31)
    assert tables.arrival[tables.cells_of(rows, 3)][0, 0] == 40


def test_rows_are_reused_without_clearing() -> None:
    tables = make()
    for lap in range(4):
        seq = 7 + lap * 31
        assert put(tables, (0, seq, lap), (1, seq, lap)).tolist() == []
        rows = np.flatnonzero(tables.tag == seq)
        present = tables.meta[tables.cells_of(rows, 3)] >> 16 == tables.laps_of(rows)
        assert present[:, 0].tolist() == [True, True, not lap]
        assert tables.filled[rows] == 2
        assert put(tables, (2, seq, lap)).tolist() == [seq]
        tables.done(rows)


def test_overrun_within_one_scatter_is_counted() -> None:
    tables = make()
    put(tables, (0, 1, 1), (0, 32, 2), (1, 32, 2))
    assert tables.counts.overrun == 1
    assert put(tables, (2, 32, 3)).tolist() == [32]


def test_displaced_rows_are_told_before_they_are_lost() -> None:
    tables = make()
    put(tables, (0, 1, 1), (1, 2, 1))
    _, row = tables.cell_index(np.ones(2, np.int32), np.zeros(2, np.int64), np.array([32, 33]))
    rows = tables.displaced(row, np.array([32, 33]))
    assert sorted(tables.tag[rows]) == [1, 2]


@pytest.mark.parametrize("stride", [1, 2, 4, 64])
def test_every_sampled_number_has_its_own_row(stride: int) -> None:
    tables = make()
    seq = np.arange(31) * stride
    _, row = tables.cell_index(np.ones(31, np.int32), np.zeros(31, np.int64), seq)
    assert len(np.unique(row)) == 31


def test_growing_keeps_open_rows() -> None:
    tables = make()
    put(tables, *[(r, s, 100 * r + s) for r in (0, 2) for s in range(20, 50)])
    assert tables.crowded(np.ones(2, np.int32), np.array([20, 90])) == [(1, 70)]
    assert tables.grow(1, 140)
    assert tables.width[1] == 141
    assert put(tables, *[(1, s, 100 + s) for s in range(20, 50)]).tolist() == list(range(20, 50))
    rows = np.flatnonzero(tables.tag == 33)
    assert tables.arrival[tables.cells_of(rows, 3)][:, 0].tolist() == [33, 133, 233]
    assert not tables.grow(1, 100_000)
    tables.close(1)
    assert tables.cells.used == tables.rows.used == 0


def test_no_room_gives_a_narrower_table_or_none() -> None:
    tables = Tables(cells=1000, rows=512, tables=4)
    assert tables.open(0, 10, 511)
    assert tables.width[0] == 63
    assert not tables.open(1, 100, 511)


def test_deadline_counts_from_the_first_event() -> None:
    tables = make()
    put(tables, (0, 1, 1), now=100)
    put(tables, (1, 1, 1), (0, 2, 1), now=200)
    assert tables.tag[tables.expire(101)].tolist() == [1]
    assert sorted(tables.tag[tables.expire(201)]) == [1, 2]


def test_what_names_cells_follows_them() -> None:
    """Tables grow: each previous operation is where it is now, or is not known any more."""
    tables = make()
    assert tables.open(2, 2, 31)
    put(tables, *[(r, s, 10 * s) for r in range(3) for s in range(20, 50)])
    old = {s: cell_of(tables, 1, 2, s) for s in (19, 33, 34, 49)}
    later, other = cell_of(tables, 1, 0, 35), cell_of(tables, 2, 1, 3)
    tables.prev[[later, other, cell_of(tables, 1, 1, 35)]] = old[34], old[33], old[19]
    tables.own[:] = 7.0
    named = np.array([old[49], old[19], other, 1 << 19])
    assert tables.grow(1, 140)
    assert tables.grow(2, 70)
    assert tables.rename(named).tolist() == [1, 2]
    assert named.tolist() == [cell_of(tables, 1, 2, 49), -1, -1, 1 << 19]
    later = cell_of(tables, 1, 0, 35)
    assert (tables.prev[later], tables.own[later]) == (cell_of(tables, 1, 2, 34), 7.0)
    unknown = cell_of(tables, 1, 1, 35)
    assert tables.prev[unknown] == -1
    assert np.isnan(tables.own[unknown])
    assert tables.rename(named).tolist() == []  # once is enough
