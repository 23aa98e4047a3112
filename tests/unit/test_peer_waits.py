"""Sums of waits by peer on the agent: from the plugin's rows to the columns beside the traffic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from agent_arrays import BASE_NS, comm_event, exchange, record, table

from lanterne.agent import peer_waits
from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head
from lanterne.agent.events import Rules
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.process import Processes
from lanterne.agent.vectors import PeerBytes, empty_peers
from lanterne.collector.decode import decode
from lanterne.probes.layout import DEVICE, CommFlag, CommKind
from lanterne.probes.nccl_profiler.usdt import PEER_WAIT


def sums(*rows: tuple[int, int, int], comm_hash: int = 0xABC) -> np.ndarray:
    """(peer, receives, ns) of rank 1 of 4."""
    found = np.zeros(len(rows), DEVICE)
    found["tgid"], found["comm_hash"], found["rank"], found["n_ranks"] = 10, comm_hash, 1, 4
    found["func"], found["version"] = PEER_WAIT, 1
    for row, (peer, receives, ns) in zip(found, rows, strict=True):
        row["peer"], row["seq"], row["bytes_received"] = peer, receives, ns
    return found


def of(*rows: tuple[int, int, int], slot: int = 0) -> peer_waits.PeerWaits:
    records = sums(*rows)
    return peer_waits.of_records(records, np.full(len(records), slot, np.uint16))


def peers(*rows: tuple[int, int, int, int]) -> PeerBytes:
    slot, peer, sent, received = np.array(rows, np.uint64).reshape(-1, 4).T
    return PeerBytes(slot.astype(np.uint16), peer.astype(np.uint32), sent, received)


def told(traffic: PeerBytes, receives: np.ndarray, ns: np.ndarray) -> dict[tuple[int, int], tuple]:
    rows = zip(traffic.slot, traffic.peer, traffic.sent, receives, ns, strict=True)
    return {(int(s), int(p)): (int(b), int(r), int(w)) for s, p, b, r, w in rows}


def test_nonsense_is_left_out() -> None:
    found = of((-1, 1, 10), (2, 0, 10), (3, 1, 1 << 63), (2, 3, 40))
    assert (found.peer.tolist(), found.receives.tolist(), found.wait_ns.tolist()) == (
        [2],
        [3],
        [40],
    )


def test_waits_stand_beside_the_bytes_of_their_pair() -> None:
    traffic = peers((0, 2, 100, 1), (0, 3, 50, 1), (1, 2, 7, 1))
    parts = [of((2, 5, 500), (0, 1, 9)), of((2, 1, 100)), of((3, 2, 8), slot=1)]
    found = told(*peer_waits.beside(traffic, parts, table()))
    assert found == {
        (0, 2): (100, 6, 600),
        (0, 3): (50, 0, 0),
        (1, 2): (7, 0, 0),
        (0, 0): (0, 1, 9),
        (1, 3): (0, 2, 8),
    }


def test_unknown_communicators_and_peers_are_left_out() -> None:
    known = table()
    known = replace(known, resolved=np.array([True] + [False] * 7))
    parts = [of((4, 1, 1), (1, 1, 1)), of((1, 1, 1), slot=3)]
    found = told(*peer_waits.beside(empty_peers(), parts, known))
    assert found == {(0, 1): (0, 1, 1)}
    assert peer_waits.left_out(parts, known) == 2


def test_without_waits_nothing_changes() -> None:
    traffic = peers((0, 2, 100, 1))
    same, receives, ns = peer_waits.beside(traffic, [], table())
    assert same is traffic
    assert receives.tolist() == ns.tolist() == [0]


def test_the_whole_way_to_what_the_collector_reads(tmp_path: Path) -> None:
    registry = Registry(libraries=lambda _: (), processes=Processes(tmp_path))
    pipe = Pipeline(registry, Rules(), Head("node", 1, "0", "b"), BASE_NS, grace_ns=1000)
    known = {"id": b"u" * 128, "n_ranks": 4, "rank": 1, "flags": CommFlag.ID | CommFlag.RANK}
    created = comm_event(CommKind.INIT, **known)
    pipe.feed(exchange([1, 2, 3, 4], [4, 3, 2, 1], group=1, seq=0), created, BASE_NS)
    (comm,) = registry.alive()
    pipe.feed_device(sums((0, 10, 1000), (2, 12, 99), comm_hash=comm.comm_hash))
    pipe.feed_device(sums((2, 1, 1), comm_hash=comm.comm_hash))
    pipe.feed_device(sums((2, 1, 1), (0, 1, 1), comm_hash=0))  # nobody's
    pipe.feed_device(sums((2, 0, 1), (9, 1, 1), comm_hash=comm.comm_hash))  # none, and no such peer
    device = pipe.windows.device
    assert device.operations == device.unmatched == 0  # sums are no operations
    ((_, data),) = pipe.close(BASE_NS + 10**9, 1, Context, final=True)
    t = decode(data).traffic
    rows = zip(t.peer, t.sent_bytes, t.receives, t.wait_ns, strict=True)
    assert {int(p): (int(b), int(r), int(w)) for p, b, r, w in rows} == {
        0: (1, 10, 1000), 1: (2, 0, 0), 2: (3, 13, 100), 3: (4, 0, 0),
    }  # fmt: skip
    pipe.feed(record(seq=9), comm_event(CommKind.INIT)[:0], BASE_NS)
    ((_, data),) = pipe.close(BASE_NS + 2 * 10**9, 1, Context, final=True)
    assert not decode(data).traffic.waits.size  # told once
    assert pipe.windows.waits_left_out == 4
