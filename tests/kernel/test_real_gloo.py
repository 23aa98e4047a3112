"""Gloo in the real libtorch_cpu.so: what the option structs hold, and who is in which group.

Two jobs run at once on this host, one with subgroups of equal size.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lanterne.agent import identity, roles
from lanterne.agent.attach import Attacher
from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head
from lanterne.agent.events import BLOCKING, Rules
from lanterne.agent.identity import Communicator
from lanterne.agent.kernel import Programs, load
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.process import Processes
from lanterne.agent.ring import Ring
from lanterne.probes import catalog
from lanterne.probes.layout import COMM_EVENT, RECORD, CommFlag, CommKind, Flag, Func
from lanterne.proto import telemetry_pb2 as pb
from tests.stack import free_port

pytestmark = [pytest.mark.torch, pytest.mark.kernel, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("LANTERNE_TORCH_PYTHON", ROOT / ".venv-torch/bin/python"))
STEPS = 3
FLOAT = 4


class Job:
    """The ranks of one `gloo_job.py`; a context manager."""

    def __init__(self, folder: Path, name: str, ranks: int) -> None:
        self.port = free_port()
        self._start = folder / f"{name}.start"
        self._told = folder / f"{name}.json"
        env = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("gloo_job.py"), str(ranks), str(self.port),
             self._start, self._told],
            env=env | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def wait_ready(self) -> None:
        end = time.monotonic() + 120
        while not (self._told.exists() and self._told.read_text()):
            assert self._process.poll() is None, "the job has ended"
            assert time.monotonic() < end, "torch was not imported in time"
            time.sleep(0.05)
        told = json.loads(self._told.read_text())
        self.pids: list[int] = told["pids"]
        self.sends: list[list[int]] = told["sends"]

    def go(self) -> None:
        self._start.touch()

    def finish(self) -> None:
        self._told.with_suffix(".read").touch()
        assert self._process.wait(60) == 0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in getattr(self, "pids", []):
            if self._process.poll() is None and Path(f"/proc/{pid}").exists():
                os.kill(pid, 9)
        self._process.kill()
        self._process.wait(30)


@dataclass
class Seen:
    jobs: list[Job]
    records: np.ndarray
    events: np.ndarray
    registry: Registry
    batches: list[pb.Batch]

    def comms(self, job: Job, ranks: int, library: int = identity.GLOO) -> list[Communicator]:
        return [
            comm
            for comm in self.registry.describe(self.registry._comms)
            if comm.tgid in job.pids and comm.n_ranks == ranks and comm.library == library
        ]


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with load() as found:
        yield found


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    if not PYTHON.exists():
        pytest.fail(f"no PyTorch at {PYTHON}: run make setup-torch")
    folder = tmp_path_factory.mktemp("gloo")
    ring = Ring(programs.ring_fd, programs.ring_bytes, RECORD)
    news = Ring(programs.comm_ring_fd, programs.comm_ring_bytes, COMM_EVENT)
    with (
        Job(folder, "four", 4) as four,
        Job(folder, "two", 2) as two,
        Attacher(programs, include=[f"{PYTHON.parents[1]}/*"]) as attacher,
    ):
        jobs = [four, two]
        pids = []
        for job in jobs:
            job.wait_ready()
            pids += job.pids
        scan = attacher.scan()
        assert not scan.failed
        (library,) = [one for one in scan.new_libraries if one.kind == "gloo"]
        assert library.state == "attached", library.error
        for job in jobs:
            job.go()
        calls = sum(len(job.pids) for job in jobs) * (4 * STEPS + 1)
        records, events = wait_for_calls(ring, news, pids, calls)
        seen = pipe(jobs, records, events)
        for job in jobs:
            job.finish()
        yield seen


def wait_for_calls(
    ring: Ring, news: Ring, pids: list[int], calls: int
) -> tuple[np.ndarray, np.ndarray]:
    records, events = [], []
    end = time.monotonic() + 90
    while sum(np.count_nonzero(part["flags"] & Flag.PAIR) for part in records) < calls:
        assert time.monotonic() < end, "not all calls were seen"
        time.sleep(0.05)
        for part in (ring.drain(),):
            records.append(part[np.isin(part["tgid"], pids)])
        part = news.drain()
        events.append(part[np.isin(part["tgid"], pids)])
    return np.concatenate(records), np.concatenate(events)


def pipe(jobs: list[Job], records: np.ndarray, events: np.ndarray) -> Seen:
    """Everything through the agent's own stages, as one window."""
    registry = Registry(
        libraries=lambda _: (),
        processes=Processes(),
        gloo_probes=[row.id for row in catalog.ROWS if row.library is catalog.Library.GLOO],
    )
    now = time.monotonic_ns()
    pipeline = Pipeline(registry, Rules(), Head("n", 1, "0", ""), 0, grace_ns=10**8)
    pipeline.feed(records, events, now)
    encoded = pipeline.close(now, 1, Context, final=True)
    return Seen(jobs, records, events, registry, [pb.Batch.FromString(b) for _, b in encoded])


def test_vectors_are_what_each_rank_sends_and_gets(seen: Seen) -> None:
    for job in seen.jobs:
        for rank, pid in enumerate(job.pids):
            mine = seen.records[seen.records["tgid"] == pid]
            calls = mine[mine["func"] == Func.ALL_TO_ALL_V]
            assert len(calls) == 2 * STEPS
            out = [FLOAT * n for n in job.sends[rank]]
            inward = [FLOAT * sends[rank] for sends in job.sends]
            for index, call in enumerate(np.sort(calls, order="seq")):
                group = mine[(mine["group"] == call["group"]) & (mine["flags"] & Flag.P2P != 0)]
                told = {
                    func: group[group["func"] == func]["count"].tolist()
                    for func in (Func.SEND, Func.RECV)
                }
                # Even ones are the dispatch, odd ones bring everything back.
                here, there = (out, inward) if index % 2 == 0 else (inward, out)
                assert told == {Func.SEND: here, Func.RECV: there}
                assert call["count"] == sum(here)


def test_dispatch_and_combine_are_told_apart(seen: Seen) -> None:
    ranks = sum(len(job.pids) for job in seen.jobs)
    counts: dict[tuple[int, int], int] = {}
    for batch in seen.batches:
        table = batch.summaries
        role, evidence = (np.frombuffer(c, np.uint8) for c in (table.role, table.evidence))
        for key, n in zip(
            zip(role.tolist(), evidence.tolist(), strict=True),
            np.frombuffer(table.count, "<u8").tolist(),
            strict=True,
        ):
            counts[key] = counts.get(key, 0) + n
    assert counts[roles.DISPATCH, BLOCKING] == STEPS * ranks
    assert counts[roles.COMBINE, BLOCKING] == STEPS * ranks


def test_connect_tells_the_port_of_the_store(seen: Seen) -> None:
    for job in seen.jobs:
        mine = seen.events[np.isin(seen.events["tgid"], job.pids)]
        connects = mine[mine["kind"] == CommKind.CONNECT]
        assert len(connects) == 2 * len(job.pids)  # the whole job and one subgroup each
        assert (connects["flags"] & CommFlag.NAME != 0).all()
        assert set(connects["key"].tolist()) == {job.port}
        assert {bytes(one).rstrip(b"\0") for one in connects["id"]} == {b"127.0.0.1"}


def test_jobs_and_subgroups_of_equal_size_are_kept_apart(seen: Seen) -> None:
    four, two = seen.jobs
    hashes: dict[int, list[tuple[int, int]]] = {}  # hash -> (pid, rank) of its members
    for job in seen.jobs:
        for size in (2, 4):
            for comm in seen.comms(job, size):
                assert comm.resolved, comm.reason
                assert comm.identity == identity.STORE
                assert comm.complete
                hashes.setdefault(comm.comm_hash, []).append((comm.tgid, comm.rank))
    groups = sorted(sorted(members) for members in hashes.values())
    pair = [(pid, rank) for rank, pid in enumerate(two.pids)]
    expected = [
        [(pid, rank) for rank, pid in enumerate(four.pids)],
        [(pid, rank) for rank, pid in enumerate(four.pids[:2])],
        [(pid, rank) for rank, pid in enumerate(four.pids[2:])],
        pair,  # the whole second job ...
        pair,  # ... and its only subgroup
    ]
    assert groups == sorted(sorted(members) for members in expected)


def test_split_sizes_above_the_transport(seen: Seen) -> None:
    """Every unequal exchange is told once, out and back; the exchange of counts has equal parts."""
    for job in seen.jobs:
        size = len(job.pids)
        for rank, pid in enumerate(job.pids):
            mine = seen.records[
                (seen.records["tgid"] == pid) & (seen.records["func"] == Func.SPLITS)
            ]
            out, back = sum(job.sends[rank]), sum(sends[rank] for sends in job.sends)
            assert mine["count"].tolist() == [out, back] * STEPS
            assert mine["stream"].tolist() == [back, out] * STEPS
            assert set(mine["peer"].tolist()) == {rank}
            assert set(mine["seq"].tolist()) == {size}
            assert len(set(mine["comm"].tolist())) == 1


def test_bytes_of_a_token_from_rows_and_bytes(seen: Seen) -> None:
    """A row of these tensors is one float. The group of two ranks has subgroups like itself: which
    one was called cannot be known there."""
    told: dict[int, set[int]] = {4: set(), 2: set()}
    for batch in seen.batches:
        sums = batch.summaries
        if not sums.token_bytes:
            continue
        rows = zip(
            np.frombuffer(sums.communicator, "<u4").tolist(),
            np.frombuffer(sums.op, "u1").tolist(),
            np.frombuffer(sums.token_bytes, "<u4").tolist(),
            strict=True,
        )
        for comm, op, size in rows:
            if op == Func.ALL_TO_ALL_V:
                told[batch.communicators[comm].n_ranks].add(size)
    assert told == {4: {FLOAT}, 2: {0}}
