"""Records to operation columns: bytes, errors, evidence."""

from __future__ import annotations

import numpy as np
import pytest
from agent_arrays import record, records, slots, table

from lanterne.agent import events
from lanterne.agent.events import BLOCKING, ENQUEUE, ORDER, Rules
from lanterne.probes.layout import Flag, Func

RULES = Rules(max_launches=2, max_sync_age_us=1000)


def bytes_of(**fields: object) -> int:
    ops = events.collectives(record(**fields), slots(1), RULES)
    known = table(n_ranks=4, rank=1)
    return int(events.scaled_bytes(ops, known.n_ranks[ops.slot], known.rank[ops.slot]).bytes[0])


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (Func.ALL_REDUCE, 40),
        (Func.BROADCAST, 40),
        (Func.REDUCE, 40),
        (Func.ALL_GATHER, 40),
        (Func.GATHER, 40),
        (Func.REDUCE_SCATTER, 160),
        (Func.ALL_TO_ALL, 160),
    ],
)
def test_bytes_follow_what_count_means(func: Func, expected: int) -> None:
    assert bytes_of(func=func, count=10, dtype=7) == expected


def test_only_the_root_of_a_scatter_sends() -> None:
    assert bytes_of(func=Func.SCATTER, count=10, dtype=7, peer=1) == 160
    assert bytes_of(func=Func.SCATTER, count=10, dtype=7, peer=0) == 0


def test_every_dtype_has_its_size() -> None:
    sizes = [bytes_of(count=1, dtype=dtype) for dtype in range(12)]
    assert sizes == [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]
    assert bytes_of(count=5, dtype=255) == 5
    assert bytes_of(count=5, dtype=8, flags=Flag.BYTES) == 5


def test_a_nonsensical_count_has_no_bytes() -> None:
    assert bytes_of(count=2**64 - 1, dtype=8) == 0
    assert bytes_of(count=2**61, dtype=8) == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"flags": 0}, ORDER),
        ({"flags": Flag.SYNCED, "launches": 2, "sync_age_us": 1000}, ENQUEUE),
        ({"flags": Flag.SYNCED, "launches": 3, "sync_age_us": 10}, ORDER),
        ({"flags": Flag.SYNCED, "launches": 0, "sync_age_us": 1001}, ORDER),
        ({"flags": Flag.SYNCED | Flag.CAPTURE}, ORDER),
        ({"flags": Flag.BLOCKING | Flag.PAIR}, BLOCKING),
        ({"flags": Flag.BLOCKING}, ORDER),
        ({"flags": Flag.PAIR}, ORDER),
        ({"flags": Flag.BLOCKING | Flag.PAIR | Flag.CAPTURE}, ORDER),
    ],
)
def test_evidence(fields: dict[str, int], expected: int) -> None:
    assert events.evidence_of(record(**fields), RULES)[0] == expected


def test_a_launch_of_an_expert_library_is_no_arrival() -> None:
    fresh = {"flags": Flag.SYNCED | Flag.BYTES, "launches": 0, "sync_age_us": 1}
    waited = {"flags": Flag.BYTES | Flag.PAIR | Flag.BLOCKING, "duration_ns": 5}
    graph = {"flags": Flag.BYTES | Flag.PAIR | Flag.BLOCKING | Flag.CAPTURE, "duration_ns": 5}
    for func in (Func.DISPATCH, Func.COMBINE):
        for fields, expected in ((fresh, ORDER), (waited, BLOCKING), (graph, ORDER)):
            row = record(func=func, count=64, **fields)
            ops = events.collectives(row, slots(1), Rules())
            assert ops.evidence[0] == expected
            assert ops.duration_ns[0] == (5 if expected == BLOCKING else 0)
            assert ops.bytes[0] == (0 if fields is graph else 64)


def test_a_duration_counts_only_where_the_call_waits() -> None:
    rows = records(
        record(flags=Flag.PAIR, duration_ns=5),
        record(flags=Flag.PAIR | Flag.BLOCKING, duration_ns=6),
    )
    assert events.collectives(rows, slots(2), RULES).duration_ns.tolist() == [0, 6]


def test_errors_move_no_bytes_and_gloo_has_no_return_code() -> None:
    rows = records(
        record(flags=Flag.PAIR, rc=5),
        record(flags=Flag.PAIR, rc=7),
        record(flags=0, rc=5),
        record(flags=Flag.PAIR | Flag.BLOCKING, rc=5),
    )
    ops = events.collectives(rows, slots(4), RULES)
    assert ops.error.tolist() == [True, False, False, False]
    assert ops.bytes.tolist() == [0, 32, 32, 32]


def test_what_goes_into_a_graph_does_not_run_now() -> None:
    ops = events.collectives(record(flags=Flag.CAPTURE | Flag.FIRST), slots(1), RULES)
    assert ops.bytes[0] == 0
    assert ops.flags[0] == events.CAPTURED | events.FIRST


def test_rows_of_equals_plain_indexing() -> None:
    rows = records(*(record(seq=i) for i in range(9)))
    mask = rows["seq"] % 3 == 0
    assert (events.rows_of(rows, mask) == rows[mask]).all()
    order = np.arange(8, -1, -1)
    assert (events.rows_of(rows, order) == rows[order]).all()
    assert len(events.rows_of(rows, np.zeros(9, bool))) == 0
