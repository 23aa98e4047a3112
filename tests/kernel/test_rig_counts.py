"""The rig's known calls: every count, number and group exact, on both kinds of probe."""

from __future__ import annotations

import mmap
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import load
from lanterne.agent.ring import Ring
from lanterne.probes import catalog, layout
from lanterne.probes.layout import CommFlag, CommKind, Flag, Func
from tests.kernel.stub import Caller
from tests.rig.build import build
from tests.rig.known import result, seen_by_probes, start_calls

pytestmark = pytest.mark.kernel

TINY = mmap.PAGESIZE

NAMES = {
    Func.ALL_REDUCE: "ncclAllReduce",
    Func.BROADCAST: "ncclBroadcast",
    Func.REDUCE: "ncclReduce",
    Func.ALL_GATHER: "ncclAllGather",
    Func.REDUCE_SCATTER: "ncclReduceScatter",
    Func.ALL_TO_ALL: "ncclAlltoAll",
    Func.GATHER: "ncclGather",
    Func.SCATTER: "ncclScatter",
    Func.SEND: "ncclSend",
    Func.RECV: "ncclRecv",
}
INITS = ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable")
ENDS = {
    CommKind.SHRINK: "ncclCommShrink",
    CommKind.FINALIZE: "ncclCommFinalize",
    CommKind.DESTROY: "ncclCommDestroy",
    CommKind.ABORT: "ncclCommAbort",
}


def told_events(events: np.ndarray) -> Counter[CommKind]:
    """Calls by kind; a communicator of a group is told twice, with one time of creation."""
    _, once = np.unique(events[["slot", "tid", "time_ns", "comm", "kind"]], return_index=True)
    first = {
        (e["slot"].item(), e["tid"].item(), e["time_ns"].item(), e["kind"].item())
        for e in events[once]
        if e["kind"] not in (CommKind.INIT_ALL, CommKind.FIRST_USE)
    }
    return Counter(CommKind(key[3]) for key in first) | Counter(
        {CommKind.INIT_ALL: int((events["kind"] == CommKind.INIT_ALL).sum())}
    )


@pytest.mark.parametrize("variant", ["normal", "stripped", "old"])
def test_every_count(either: Any, variant: str) -> None:
    paths = build(variant)
    with Caller(paths.nccl), either.attacher(paths.root) as attacher:
        attacher.scan()
        (library,) = [one for one in attacher.libraries.values() if one.kind == "nccl"]
        assert library.nccl_version == (22105 if variant == "old" else 22809)
        by_check = catalog.ENQUEUE_CHECK_ID in {site.row for site in library.sites}
        assert by_check == (variant != "stripped")
        # Without debugging information they are in the getters' machine code, read on x86-64 only.
        if variant != "stripped" or platform.machine() == "x86_64":
            assert library.comm_offsets is not None
        either.ring.drain(1 << 20)
        either.comm_ring.drain(1 << 20)
        before = either.programs.counters()
        with start_calls("--known", "--ranks=3", "--repeat=4", paths=paths) as process:
            calls = result(process)["calls"]
            records, events = either.records(process.pid), either.events(process.pid)
    seen = seen_by_probes(calls)
    found = Counter(Func(int(func)) for func in records["func"])
    assert {NAMES[func]: count for func, count in found.items()} == {
        name: seen[name] for name in NAMES.values() if seen[name]
    }
    assert len(records) == seen["ncclEnqueueCheck"]
    after = either.programs.counters()
    for cause in ("lost_ring", "lost_comm_ring", "lost_scratch", "lost_state", "lost_read"):
        assert after[cause] == before[cause]
    told = told_events(events)
    assert told[CommKind.INIT] == sum(calls[name] for name in INITS)
    for kind, name in ENDS.items():
        assert told[kind] == calls.get(name, 0), name
    check_numbers(records)


def check_numbers(records: np.ndarray) -> None:
    """Per communicator the collectives count from 0 without a gap, sends and receives by group."""
    for comm in np.unique(records["comm"]):
        mine = records[records["comm"] == comm]
        restart = np.flatnonzero(mine["flags"] & Flag.FIRST)
        for life in np.split(mine, restart[1:]):
            p2p = (life["flags"] & Flag.P2P) != 0
            assert life["seq"][~p2p].tolist() == list(range(int((~p2p).sum())))
            grouped = life[p2p & ((life["flags"] & Flag.GROUP) != 0)]
            for group in np.unique(grouped["group"]):
                assert len(set(grouped["seq"][grouped["group"] == group].tolist())) == 1


def test_identity_of_every_communicator(either: Any) -> None:
    """What the init calls tell is what the ranks know of themselves."""
    paths = build("normal")
    with Caller(paths.nccl), either.attacher(paths.root) as attacher:
        attacher.scan()
        either.events(0)
        with start_calls("--known", "--ranks=3", paths=paths) as process:
            result(process)
            events = either.events(process.pid)
    inits = events[(events["kind"] == CommKind.INIT) & (events["comm"] != 0)]
    assert len(inits) >= 3
    assert ((inits["flags"] & CommFlag.ID) != 0).all()
    for key in np.unique(inits["id"], axis=0):
        mine = inits[(inits["id"] == key).all(axis=1)]
        ranks = {int(e["comm"]): int(e["rank"]) for e in mine}
        assert sorted(ranks.values()) == list(range(int(mine["n_ranks"][0])))


def test_tiny_ring(tmp_path: Path) -> None:
    """submitted = read + lost, on a job whose number of calls is known."""
    paths = build("normal")
    with (
        load(ring_bytes=TINY, comm_ring_bytes=TINY) as programs,
        Ring(programs.ring_fd, TINY, layout.RECORD) as ring,
        Attacher(programs, include=[f"{paths.root}/*"]) as attacher,
        Caller(paths.nccl),
    ):
        attacher.scan()
        with start_calls("--known", "--ranks=3", f"--repeat={TINY // 200}", paths=paths) as process:
            calls = result(process)["calls"]
        read = len(ring.drain())
        counts = programs.counters()
        assert counts["lost_ring"] > 0
        assert read == counts["submitted"]
        assert read + counts["lost_ring"] == seen_by_probes(calls)["ncclEnqueueCheck"]
