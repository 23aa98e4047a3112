"""Groups of sends and receives: one operation each, whatever the drains."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from agent_arrays import BASE_NS, exchange, p2p, record, records, slots
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.agent import events
from lanterne.agent.events import ENQUEUE, Operations, Records, Rules
from lanterne.agent.groups import Groups
from lanterne.agent.vectors import PeerBytes, merge_peers
from lanterne.probes.layout import Flag, Func

NOW = BASE_NS + 1


def assemble(*rows: Records, close: bool = True) -> tuple[Operations, PeerBytes]:
    joined = records(*rows)
    return Groups(Rules()).add(joined, slots(len(joined)), NOW, close=close)


def test_a_group_is_one_operation_with_a_vector_per_peer() -> None:
    ops, peers = assemble(exchange([0, 30, 10], [5, 0, 25], group=7, seq=4))
    assert (len(ops), ops.seq[0], ops.lane[0], ops.bytes[0]) == (1, 4, 1, 40)
    assert (ops.send_peers[0], ops.receive_peers[0]) == (2, 2)
    assert ops.flags[0] == events.GROUPED
    rows = zip(peers.peer.tolist(), peers.sent.tolist(), peers.received.tolist(), strict=True)
    assert sorted(rows) == [(0, 0, 5), (1, 30, 0), (2, 10, 25)]


def test_single_calls_are_operations_of_their_own() -> None:
    ops, _ = assemble(p2p(Func.SEND, 1, 8, seq=0), p2p(Func.RECV, 2, 8, seq=1))
    assert ops.seq.tolist() == [0, 1]
    assert ops.bytes.tolist() == [8, 0]
    assert ops.root.tolist() == [1, 2]


def test_the_newest_group_stays_open_until_the_next_or_silence() -> None:
    groups = Groups(Rules(), grace_ns=1000)
    first, second = exchange([1, 1], [1, 1], group=1), exchange([2, 2], [2, 2], group=2, seq=1)
    assert len(groups.add(first, slots(4), BASE_NS)[0]) == 0
    ops, _ = groups.add(second, slots(4), BASE_NS)
    assert ops.seq.tolist() == [0]
    assert groups.held == 4
    ops, _ = groups.add(first[:0], slots(0), BASE_NS + 1001)
    assert ops.seq.tolist() == [1]
    assert groups.held == 0


def test_memory_held_is_bounded() -> None:
    groups = Groups(Rules(), max_records=3)
    ops, _ = groups.add(exchange([1, 1], [1, 1], group=1), slots(4), BASE_NS)
    assert (len(ops), groups.held, groups.forced) == (1, 0, 1)


def test_arrival_and_evidence_are_those_of_the_first_call() -> None:
    rows = exchange([1, 1], [1, 1], group=1, flags=Flag.SYNCED)
    rows["launches"] = np.arange(4) + 1
    rows["enter_ns"] += np.arange(4, dtype=np.uint64)
    rows["sync_blocked_us"][0] = 3
    ops, _ = assemble(rows)
    assert ops.evidence[0] == ENQUEUE
    assert ops.arrival_ns[0] == BASE_NS
    assert ops.sync_blocked_ns[0] == 3000


def test_bad_peers_and_failed_calls_move_nothing() -> None:
    ops, peers = assemble(
        p2p(Func.SEND, -1, 8, group=1),
        p2p(Func.SEND, 1 << 20, 8, group=1),
        p2p(Func.SEND, 1, 8, group=1, rc=5, flags=Flag.PAIR),
        p2p(Func.SEND, 2, 8, group=1),
    )
    assert (ops.bytes[0], ops.error[0]) == (8, True)
    assert (peers.peer.tolist(), peers.sent.tolist()) == ([2], [8])


def test_captured_groups_move_nothing_now() -> None:
    ops, peers = assemble(exchange([1, 1], [1, 1], group=1, flags=Flag.CAPTURE))
    assert (ops.bytes[0], len(peers)) == (0, 0)


def test_proportional_vectors_have_one_shape() -> None:
    shapes = [
        assemble(exchange(sends, [9, 9, 9], group=1))[0].send_shape[0]
        for sends in ([1, 2, 3], [2, 4, 6], [7, 14, 21], [3, 2, 1], [1, 2, 4], [1, 2, 0])
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({int(shape) for shape in shapes}) == 4


def test_two_sends_to_one_peer_add_up() -> None:
    rows = [p2p(Func.SEND, peer, n, group=1) for peer, n in ((0, 1), (1, 1), (1, 1))]
    twice, _ = assemble(*rows)
    once, _ = assemble(exchange([1, 2], [0, 0], group=1))
    assert twice.send_shape[0] == once.send_shape[0]


def test_uniform_means_the_same_with_the_same_peers() -> None:
    cases = [([4, 4], [4, 4], True), ([4, 4], [8, 8], True), ([4, 0], [0, 4], False)]
    cases.append(([4, 5], [4, 5], False))
    for sends, receives, expected in cases:
        ops, _ = assemble(exchange(sends, receives, group=1))
        assert bool(ops.uniform[0]) is expected, (sends, receives)


def test_few_peers_of_many_cost_no_dense_matrix() -> None:
    rows = records(
        *(p2p(Func.SEND, peer, 3, group=i, seq=i) for i, peer in enumerate((60_000, 5) * 40, 1))
    )
    ops, peers = assemble(rows)
    assert len(ops) == 80
    assert peers.peer.tolist() == [5, 60_000]
    assert peers.sent.tolist() == [120, 120]


def gloo_call(sends: list[int], receives: list[int], *, group: int, seq: int, took: int) -> Records:
    """What the probe tells of gloo::alltoallv: bytes to and from each peer, then the call."""
    flags = Flag.BYTES | Flag.BLOCKING
    told = [
        p2p(func, peer, n, group=group, seq=seq, flags=flags)
        for func, amounts in ((Func.SEND, sends), (Func.RECV, receives))
        for peer, n in enumerate(amounts)
    ]
    for row in told:
        row["flags"] &= ~np.uint8(Flag.GROUP)
    call = record(
        func=Func.ALL_TO_ALL_V, count=sum(sends), seq=seq, group=group, duration_ns=took,
        flags=flags | Flag.PAIR, rc=77,
    )  # fmt: skip
    return records(*told, call)


def test_a_gloo_call_with_its_vector_is_one_collective() -> None:
    groups = Groups(Rules(), grace_ns=1)
    rows = gloo_call([3, 0, 7], [1, 5, 0], group=5, seq=2, took=900)
    assert events.point_to_point(rows).all()
    # The call blocks longer than the grace of a group: it stays open until it returns.
    assert len(groups.add(rows[:-1], slots(6), BASE_NS + 10**9)[0]) == 0
    ops, peers = groups.add(rows[-1:], slots(1), BASE_NS + 2 * 10**9)
    assert (len(ops), ops.lane[0], ops.op[0], ops.seq[0]) == (1, 0, Func.ALL_TO_ALL_V, 2)
    assert (ops.bytes[0], ops.duration_ns[0], ops.error[0]) == (10, 900, False)
    assert ops.evidence[0] == events.BLOCKING
    assert peers.sent.tolist() == [3, 0, 7]
    assert peers.received.tolist() == [1, 5, 0]


def test_gloo_dispatch_and_combine_mirror_each_other() -> None:
    there, back = [3, 0, 7], [1, 5, 2]
    ops, _ = assemble(
        records(
            gloo_call(there, back, group=5, seq=2, took=900),
            gloo_call([2 * n for n in back], [2 * n for n in there], group=6, seq=3, took=900),
        )
    )
    assert ops.send_shape[0] == ops.receive_shape[1] != 0
    assert ops.receive_shape[0] == ops.send_shape[1] != 0
    assert not ops.uniform.any()


def test_gloo_calls_of_two_threads_that_overlap() -> None:
    """Their records come mixed, and the first call returns after the second has begun."""
    groups = Groups(Rules(), grace_ns=1)
    one = gloo_call([3, 0, 7], [1, 5, 0], group=5, seq=2, took=900)
    two = gloo_call([4, 4, 1], [2, 2, 2], group=6, seq=3, took=500)
    mixed = records(one[:2], two[:3], one[2:6], two[3:6])
    assert len(groups.add(mixed, slots(12), BASE_NS)[0]) == 0
    done = records(two[6:], one[6:])
    ops, peers = groups.add(done, slots(2), BASE_NS + 10**9)
    assert sorted(zip(ops.seq, ops.bytes, ops.duration_ns, strict=True)) == [
        (2, 10, 900),
        (3, 9, 500),
    ]
    assert peers.sent.tolist() == [7, 4, 8]
    assert peers.received.tolist() == [3, 7, 2]
    assert groups.held == 0


def test_a_part_of_a_gloo_vector_has_no_shape() -> None:
    rows = gloo_call([3, 4], [5, 6], group=5, seq=2, took=900)
    rows["count"][-1] = 100
    ops, _ = assemble(rows)
    assert (ops.bytes[0], ops.send_shape[0], ops.receive_shape[0]) == (100, 0, 0)


def test_merging_adds_rows_of_one_cell() -> None:
    rows = PeerBytes(
        np.array([1, 0, 1], np.uint16), np.array([9, 9, 9], np.uint32),
        np.array([1, 2, 3], np.uint64), np.array([4, 5, 6], np.uint64),
    )  # fmt: skip
    merged = merge_peers(rows)
    assert merged.slot.tolist() == [0, 1]
    assert merged.sent.tolist() == [2, 4]
    assert merged.received.tolist() == [5, 10]


@st.composite
def streams(draw: st.DrawFn) -> tuple[Records, list[int]]:
    """Interleaved groups of several communicators, and where the drains cut."""
    per_comm = []
    number = 0
    for comm in range(draw(st.integers(1, 3))):
        rows = []
        for seq in range(draw(st.integers(0, 5))):
            number += 1
            sends = draw(st.lists(st.integers(0, 50), min_size=3, max_size=3))
            receives = draw(st.lists(st.integers(0, 50), min_size=3, max_size=3))
            group = number if draw(st.booleans()) else 0
            calls = exchange(sends, receives, group=group, seq=seq, comm=comm)
            rows.append(calls)
        per_comm.append(list(records(*rows)))
    merged = []
    while any(per_comm):
        chosen = draw(st.sampled_from([i for i, rows in enumerate(per_comm) if rows]))
        merged.append(per_comm[chosen].pop(0))
    cuts = draw(st.lists(st.integers(0, len(merged)), max_size=6))
    return records(*(np.array([row]) for row in merged)), sorted(cuts)


@settings(max_examples=150, deadline=None)
@given(streams())
def test_drain_boundaries_change_nothing(stream: tuple[Records, list[int]]) -> None:
    rows, cuts = stream
    whole, whole_peers = feed(rows, [])
    parts, parts_peers = feed(rows, cuts)
    assert int(whole.bytes.sum()) == int(rows["count"][rows["func"] == Func.SEND].sum())
    assert rows_of_operations(whole) == rows_of_operations(parts)
    for name in ("slot", "peer", "sent", "received"):
        assert (getattr(whole_peers, name) == getattr(parts_peers, name)).all()


def rows_of_operations(ops: Operations) -> list[tuple[int, ...]]:
    columns = (ops.slot, ops.seq, ops.bytes, ops.send_shape, ops.receive_shape)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def feed(rows: Records, cuts: list[int]) -> tuple[Operations, PeerBytes]:
    groups = Groups(Rules())
    found = []
    edges = [0, *cuts, len(rows)]
    for start, end in pairwise(edges):
        piece = rows[start:end]
        found.append(groups.add(piece, piece["comm"].astype(np.uint16), BASE_NS))
    found.append(groups.add(rows[:0], slots(0), BASE_NS, close=True))
    peers = [part for _, part in found]
    joined = PeerBytes(
        *(np.concatenate([getattr(p, n) for p in peers]) for n in PeerBytes.__dataclass_fields__)
    )
    return events.concatenate([ops for ops, _ in found]), merge_peers(joined)
