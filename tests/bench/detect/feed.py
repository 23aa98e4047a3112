"""Batches -> decode -> engine -> snapshots, in virtual time: what the collector said, by second."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from lanterne.collector.snapshot import Snapshot
from tests.bench.detect.context import NS
from tests.bench.detect.job import Job
from tests.bench.detect.wire import HASH, T0, Wire

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

WINDOW_SECONDS = EngineConfig().window_seconds
# What is used is the default; only the room is less.
CONFIG = dataclasses.replace(
    EngineConfig(),
    cells=1 << 20,
    rows=1 << 16,
    communicators=64,
    members=4096,
    processes=2048,
    own_cells=1 << 20,
)


@dataclass
class Said:
    """After every second, of every rank of the job; a rank has the worst that any of its
    communicators says. own, ratio: of the communicator of all ranks; NaN unknown.
    """

    named: Bool  # [second, rank]
    klass: I64  # [second, rank] index into snapshot.CLASSES
    own: F64  # [second, rank] seconds
    ratio: F64  # [second, rank]
    reasons: list[str]  # [second] why nothing is known, of the communicator of all ranks


def run(wire: Wire, job: Job, config: EngineConfig = CONFIG) -> Said:
    """Feeds the whole run. A second's batches are there at its end, and so is the snapshot."""
    engine = Engine(config, boot_id="collector")
    shape = (job.seconds, job.ranks)
    said = Said(
        named=np.zeros(shape, bool),
        klass=np.zeros(shape, np.int64),
        own=np.full(shape, np.nan),
        ratio=np.full(shape, np.nan),
        reasons=[],
    )
    for second in range(job.seconds):
        now_ns = T0 + (second + 1) * NS
        for exchange in wire.clocks(second):
            engine.apply(exchange)
        for data in wire.batches(second):
            engine.apply(decode(data, received_ns=now_ns))
        _note(said, second, engine.snapshot(now_ns / NS, now_ns=now_ns), job)
    return said


def _note(said: Said, second: int, snapshot: Snapshot, job: Job) -> None:
    found = snapshot.ranks
    world = ""
    for number, comm in enumerate(snapshot.communicators):
        group = comm.comm_hash - HASH
        rows = np.flatnonzero(found.comm == number)
        rank = job.groups[group].ranks[found.rank[rows]]
        named = rank[found.straggler[rows] == 1]
        said.named[second, named] = True
        klass = np.zeros(job.ranks, np.int64)
        klass[rank] = found.klass[rows]
        said.klass[second] = np.maximum(said.klass[second], klass)
        if group == 0:
            said.own[second, rank] = found.own_seconds[rows]
            said.ratio[second, rank] = found.straggler_ratio[rows]
            world = comm.absent_reason
    said.reasons.append(world)


def window_ends(seconds: int) -> I64:
    """Seconds after which a window's verdicts are there: the first begins with the first batch."""
    return np.arange(1 + int(WINDOW_SECONDS), seconds + 1, int(WINDOW_SECONDS))
