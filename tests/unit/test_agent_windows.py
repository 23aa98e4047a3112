"""Windows: nothing is lost or counted twice, roles are told or left unknown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from agent_arrays import BASE_NS, exchange, record, records, slots, table
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.agent import events
from lanterne.agent.events import Records, Rules
from lanterne.agent.groups import Groups
from lanterne.agent.roles import COMBINE, DISPATCH, UNKNOWN
from lanterne.agent.summaries import histogram_bin
from lanterne.agent.windows import WindowColumns, Windows
from lanterne.probes.layout import Flag, Func


def fill(windows: Windows, rows: Records, slot: int = 0, groups: Groups | None = None) -> None:
    """Feed records of one communicator; open groups are closed unless `groups` is given."""
    grouped = events.point_to_point(rows)
    alone, pairs = rows[~grouped], rows[grouped]
    windows.add(events.collectives(alone, slots(len(alone), slot), Rules()))
    assembler = groups or Groups(Rules())
    windows.add(*assembler.add(pairs, slots(len(pairs), slot), BASE_NS, close=groups is None))


def closed(rows: Records, **known: object) -> WindowColumns:
    windows = Windows(8, BASE_NS)
    fill(windows, rows)
    return windows.close(BASE_NS + 10**9, 1, replace(table(), **known), final=True)


def roles_by_seq(*windows: WindowColumns) -> dict[int, int]:
    found: dict[int, int] = {}
    for window in windows:
        seq = window.instances.operations.seq.tolist()
        assert not set(seq) & set(found), "an operation went out twice"
        found |= dict(zip(seq, window.instances.role.tolist(), strict=True))
    return found


# -- sums and samples ----------------------------------------------------------------------


def test_summaries_count_every_operation() -> None:
    waits = Flag.BLOCKING | Flag.PAIR
    window = closed(
        records(
            record(seq=0, flags=waits, duration_ns=5),
            record(seq=1, flags=waits, duration_ns=9),
            record(seq=2, flags=Flag.PAIR, rc=5),
            record(seq=3, func=Func.BARRIER, count=0),
        )
    )
    s = window.summaries
    rows = zip(s.op.tolist(), s.evidence.tolist(), s.count.tolist(), strict=True)
    assert list(rows) == [(4, 0, 1), (4, 2, 2), (33, 0, 1)]
    assert s.errors.tolist() == [1, 0, 0]
    assert s.bytes.tolist() == [0, 64, 0]
    assert s.duration_sum_ns.tolist() == [0, 14, 0]
    assert (s.duration_min_ns.tolist(), s.duration_max_ns.tolist()) == ([0, 5, 0], [0, 9, 0])
    assert s.histogram[1, 2] == 1
    assert s.histogram[1, 3] == 1
    assert s.histogram.sum() == 2


def test_failed_calls_are_counted_and_not_aligned() -> None:
    window = closed(records(record(seq=0, flags=Flag.PAIR, rc=5), record(seq=1)))
    assert window.instances.operations.seq.tolist() == [1]
    assert window.summaries.count.sum() == 2


def test_the_stride_thins_instances_and_nothing_else() -> None:
    windows = Windows(8, BASE_NS)
    fill(windows, records(*(record(seq=i) for i in range(10))))
    window = windows.close(BASE_NS + 1, 4, table())
    assert window.instances.operations.seq.tolist() == [0, 4, 8]
    assert window.summaries.count.tolist() == [10]


@pytest.mark.parametrize(
    ("duration", "expected"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (2**47 - 1, 46), (2**47, 47), (2**63, 47)],
)
def test_histogram_bins(duration: int, expected: int) -> None:
    assert histogram_bin(np.array([duration], np.uint64))[0] == expected


def test_an_equal_split_is_traffic_to_every_rank() -> None:
    traffic = closed(record(func=Func.ALL_TO_ALL, count=10, dtype=7)).traffic
    assert traffic.peer.tolist() == [0, 1, 2, 3]
    assert traffic.sent.tolist() == traffic.received.tolist() == [40] * 4


def test_a_peer_beyond_the_communicator_is_no_traffic() -> None:
    traffic = closed(exchange([1, 0, 0, 0, 9], [0] * 5, group=1)).traffic
    assert traffic.peer.tolist() == [0]


def test_operations_of_an_unknown_communicator_wait_and_then_count_as_lost() -> None:
    windows = Windows(8, BASE_NS, patience=2)
    unknown = replace(table(), resolved=np.zeros(8, bool))
    fill(windows, records(record(seq=0), *exchange_rows()))
    for step in (1, 2):
        window = windows.close(BASE_NS + step, 1, unknown)
        assert len(window.instances.operations) == 0
        assert windows.unresolved == 0
    windows.close(BASE_NS + 3, 1, unknown)
    assert windows.unresolved == 2
    assert len(windows.close(BASE_NS + 4, 1, table()).summaries.count) == 0


def test_they_go_out_with_their_traffic_once_it_is_known() -> None:
    windows = Windows(8, BASE_NS, patience=2)
    unknown = replace(table(), resolved=np.zeros(8, bool))
    fill(windows, records(record(seq=0), *exchange_rows()))
    windows.close(BASE_NS + 1, 1, unknown)
    fill(windows, record(seq=1))
    window = windows.close(BASE_NS + 2, 1, table(), final=True)
    assert sorted(window.instances.operations.seq.tolist()) == [0, 0, 1]
    assert window.traffic.sent.tolist() == [1, 2]
    assert windows.unresolved == 0


def exchange_rows() -> list[Records]:
    return [exchange([1, 2], [2, 1], group=1)]


def test_waiting_rows_are_bounded() -> None:
    windows = Windows(8, BASE_NS, max_waiting=3)
    fill(windows, records(*(record(seq=i) for i in range(4))))
    windows.close(BASE_NS + 1, 1, replace(table(), resolved=np.zeros(8, bool)))
    assert windows.unresolved == 4


# -- kinds of groups -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sends", "receives", "n_ranks", "expected"),
    [
        ([1, 1, 0, 0], [0, 0, 1, 1], 4, Func.ALL_TO_ALL_V),
        ([1, 0, 0, 0], [1, 1, 0, 0], 4, Func.P2P_GROUP),
        ([1, 1, 1, 1], [0, 0, 0, 0], 4, Func.P2P_GROUP),
        ([1, 0], [1, 0], 2, Func.ALL_TO_ALL_V),
        ([0, 1, 0, 0], [0, 0, 0, 1], 4, Func.P2P_GROUP),
    ],
)
def test_which_groups_are_all_to_alls(
    sends: list[int], receives: list[int], n_ranks: int, expected: Func
) -> None:
    window = closed(exchange(sends, receives, group=1), n_ranks=np.full(8, n_ranks, np.uint32))
    assert window.summaries.op.tolist() == [expected]


def test_a_lone_send_is_none() -> None:
    rows = exchange([1, 0], [0, 0], group=0)
    assert closed(rows, n_ranks=np.full(8, 2, np.uint32)).summaries.op[0] == Func.P2P_GROUP


def test_once_every_rank_was_reached_sparse_groups_count_too() -> None:
    windows = Windows(8, BASE_NS)
    fill(windows, exchange([1, 2, 3, 4], [1, 1, 1, 1], group=1))
    windows.close(BASE_NS + 1, 1, table())
    fill(windows, exchange([1, 0, 0, 0], [0, 0, 0, 0], group=2, seq=1))
    window = windows.close(BASE_NS + 2, 1, table(), final=True)
    assert set(window.summaries.op.tolist()) == {Func.ALL_TO_ALL_V}


# -- roles ---------------------------------------------------------------------------------

ROUTES = [([5, 1, 2, 9], [3, 3, 8, 1]), ([7, 7, 1, 2], [4, 6, 6, 1]), ([1, 9, 2, 2], [8, 1, 1, 3])]


def layer(number: int, *, route: int | None = None, factor: int = 1, first: int = 0) -> Records:
    """Dispatch and its combine, the combine `factor` times as large."""
    sends, receives = ROUTES[number % 3 if route is None else route]
    seq = 2 * number - first
    back = [factor * n for n in receives], [factor * n for n in sends]
    return records(
        exchange(sends, receives, group=2 * number + 1, seq=seq),
        exchange(*back, group=2 * number + 2, seq=seq + 1),
    )


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_combine_returns_what_its_dispatch_sent(factor: int) -> None:
    rows = records(*(layer(i, factor=factor) for i in range(6)))
    assert roles_by_seq(closed(rows)) == {i: 1 + i % 2 for i in range(12)}


def test_a_late_start_in_the_middle_of_a_pair_is_found_out() -> None:
    rows = records(*(layer(i) for i in range(6)))[8:]
    window = closed(rows, complete=np.zeros(8, bool))
    assert roles_by_seq(window) == {1: UNKNOWN} | {i: 1 + i % 2 for i in range(2, 12)}


def test_unchanging_routing_needs_a_beginning() -> None:
    rows = records(*(layer(i, route=0) for i in range(4)))
    assert roles_by_seq(closed(rows)) == {i: 1 + i % 2 for i in range(8)}
    late = closed(rows[8:], complete=np.zeros(8, bool))
    assert set(roles_by_seq(late).values()) == {UNKNOWN}


def test_a_lost_operation_breaks_the_chain_and_not_the_roles() -> None:
    rows = records(*(layer(i, route=0) for i in range(4)))
    window = closed(rows[rows["seq"] != 3])
    found = roles_by_seq(window)
    assert found[0] == DISPATCH
    assert found[1] == COMBINE
    # 2 lost its combine. What follows the gap is never the opposite of the truth.
    assert found[2] == UNKNOWN
    assert all(found[i] in (UNKNOWN, 1 + i % 2) for i in (4, 5, 6, 7))


def test_pairs_survive_any_window_boundary() -> None:
    rows = records(*(layer(i) for i in range(5)))
    for cut in range(0, len(rows) + 1, 8):
        windows = Windows(8, BASE_NS)
        parts = []
        for i, piece in enumerate((rows[:cut], rows[cut:])):
            fill(windows, piece)
            parts.append(windows.close(BASE_NS + i + 1, 1, table(), final=i == 1))
        assert roles_by_seq(*parts) == {i: 1 + i % 2 for i in range(10)}, cut


def test_unchanging_routing_survives_any_window_boundary() -> None:
    rows = records(*(layer(i, route=0) for i in range(5)))
    for cut in range(0, len(rows) + 1, 8):
        windows = Windows(8, BASE_NS)
        parts = []
        for i, piece in enumerate((rows[:cut], rows[cut:])):
            fill(windows, piece)
            parts.append(windows.close(BASE_NS + i + 1, 1, table(), final=i == 1))
        assert roles_by_seq(*parts) == {i: 1 + i % 2 for i in range(10)}, cut


def test_an_operation_is_held_for_one_window_at_most() -> None:
    windows = Windows(8, BASE_NS)
    fill(windows, layer(0)[:8])
    assert len(windows.close(BASE_NS + 1, 1, table()).instances.operations) == 0
    window = windows.close(BASE_NS + 2, 1, table())
    assert roles_by_seq(window) == {0: UNKNOWN}
    assert window.summaries.count.tolist() == [1]


def test_equal_splits_alternate_where_the_gaps_tell() -> None:
    def step(i: int, gap: int) -> Records:
        at = BASE_NS + i * 1_000_000
        return records(
            record(func=Func.ALL_TO_ALL, seq=2 * i, enter_ns=at),
            record(func=Func.ALL_TO_ALL, seq=2 * i + 1, enter_ns=at + gap),
        )

    told = records(*(step(i, 200_000) for i in range(6)))
    assert roles_by_seq(closed(told)) == {i: 1 + i % 2 for i in range(12)}
    same = records(*(step(i, 500_000) for i in range(6)))
    assert set(roles_by_seq(closed(same)).values()) == {UNKNOWN}
    late = closed(told, complete=np.zeros(8, bool))
    assert set(roles_by_seq(late).values()) == {UNKNOWN}
    mixed = records(told, record(func=Func.ALL_REDUCE, seq=12))
    assert set(roles_by_seq(closed(mixed)).values()) == {UNKNOWN}
    gap = closed(told[told["seq"] != 4])
    assert set(roles_by_seq(gap).values()) == {UNKNOWN}


def test_a_slot_used_anew_starts_from_nothing() -> None:
    windows = Windows(8, BASE_NS)
    fill(windows, layer(0))
    windows.close(BASE_NS + 1, 1, table(complete=False))
    windows.forget(np.array([0], np.uint16))
    fill(windows, records(*(layer(i, route=0) for i in range(3))))
    window = windows.close(BASE_NS + 2, 1, table(complete=False), final=True)
    assert set(roles_by_seq(window).values()) == {UNKNOWN}


# -- conservation --------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Records], list[bool]]:
    """Pieces of one communicator's records, and after which a window closes."""
    pieces = []
    seq, p2p_seq = 0, 0
    for _ in range(draw(st.integers(1, 8))):
        rows = []
        for kind in draw(
            st.lists(st.sampled_from(["reduce", "equal", "group", "bad"]), max_size=6)
        ):
            if kind == "group":
                vector = st.lists(st.integers(0, 3), min_size=4, max_size=4)
                p2p_seq += 1
                rows.append(exchange(draw(vector), draw(vector), group=p2p_seq, seq=p2p_seq - 1))
                continue
            func = Func.ALL_TO_ALL if kind == "equal" else Func.ALL_REDUCE
            failed = {"flags": Flag.PAIR, "rc": 5} if kind == "bad" else {}
            rows.append(record(func=func, seq=seq, **failed))
            seq += 1
        pieces.append(records(*rows))
    return pieces, [draw(st.booleans()) for _ in pieces]


@settings(max_examples=200, deadline=None)
@given(histories(), st.booleans())
def test_sums_are_conserved(history: tuple[list[Records], list[bool]], known: bool) -> None:
    pieces, closes = history
    windows, groups = Windows(8, BASE_NS, patience=100), Groups(Rules())
    unknown = replace(table(), resolved=np.zeros(8, bool))
    parts = []
    for i, (piece, close) in enumerate(zip(pieces, closes, strict=True)):
        fill(windows, piece, groups=groups)
        if close:
            parts.append(windows.close(BASE_NS + i, 1, table() if known else unknown))
    windows.add(*groups.add(pieces[0][:0], slots(0), BASE_NS, close=True))
    parts.append(windows.close(BASE_NS + 99, 1, table(), final=True))
    whole = closed(records(*pieces))
    for name in ("count", "errors", "bytes"):
        assert sum(int(getattr(p.summaries, name).sum()) for p in parts) == int(
            getattr(whole.summaries, name).sum()
        )
    for name in ("sent", "received"):
        assert sum(int(getattr(p.traffic, name).sum()) for p in parts) == int(
            getattr(whole.traffic, name).sum()
        )
    assert sum(len(p.instances.operations) for p in parts) == len(whole.instances.operations)
    assert windows.unresolved == 0
