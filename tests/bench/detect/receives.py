"""How long each rank waited for each other's sends: what a GPU's times of single receives tell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.proto import telemetry_pb2 as pb
from tests.bench.detect.cases import PATH_KINDS, Case
from tests.bench.detect.job import BYTES, Job

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

LARGEST = 64  # ranks: agents tell no pairs of larger communicators
SHARE, SIGMA, JITTER = 0.6, 0.1, 0.1  # of an operation's transfer: one pair's, usually


def told(case: Case) -> bool:
    """Whether the wire has the times of single receives in this case."""
    return case.kind in PATH_KINDS and case.evidence == "device" and case.size <= LARGEST


class Receives:
    """Of the groups of sends and receives of a run."""

    def __init__(self, case: Case, job: Job, rng: np.random.Generator) -> None:
        self._case, self._job, self._rng = case, job, rng
        shape = (case.size, case.size)
        self._usual = SHARE * job.transfer_ns * np.exp(rng.normal(0, SIGMA, shape))

    def window(self, start_ns: int, end_ns: int) -> tuple[I64, I64]:
        """-> [receiver, sender] receives that ended in it, and their time since the receiver's
        group began, ns, summed.
        """
        n = self._case.size
        count, waited = np.zeros((n, n), np.int64), np.zeros((n, n))
        stages = [s for s in self._job.stages if s.group == 0]
        for number, stage in enumerate(stages):
            done = stage.end.max(axis=1)
            steps = np.flatnonzero((done >= start_ns) & (done < end_ns))
            if not len(steps):
                continue
            at = stage.arrival[steps]
            # A transfer begins when both are there.
            waited += np.maximum(at[:, None, :] - at[:, :, None], 0.0).sum(axis=0)
            few = JITTER / np.sqrt(len(steps))
            waited += len(steps) * self._usual * np.exp(self._rng.normal(0, few, (n, n)))
            if number == len(stages) - 1:
                waited += self._slow(steps)
            count += len(steps)
        np.fill_diagonal(count, 0)
        return count, waited.astype(np.int64)

    def _slow(self, steps: I64) -> F64:
        """[receiver, sender] ns that a fault adds in these steps."""
        more = np.zeros((self._case.size, self._case.size))
        for e in self._job.faults.episodes:
            hit = int(((steps >= e.first) & (steps < e.last)).sum())
            delay = hit * (self._case.slowdown - 1) * self._job.own_ns
            if e.klass == "slow_sender":
                more[:, list(e.ranks)] += delay
            elif e.klass == "slow_receiver":
                more[list(e.ranks)] += delay
            else:
                more[list(e.ranks), list(e.also)] += delay
        return more

    def traffic(self, ranks: I64, pairs: tuple[I64, I64]) -> pb.Traffic:
        """Of the ranks of a node, in its order; pairs: as from `window`."""
        count, waited = pairs
        place, peer = np.nonzero(count[ranks])
        cells = (ranks[place], peer)
        size = (count[cells] * BYTES // self._case.size).astype("<u8").tobytes()
        return pb.Traffic(
            rows=len(place),
            communicator=place.astype("<u4").tobytes(),
            peer=peer.astype("<u4").tobytes(),
            sent_bytes=size,
            received_bytes=size,
            receives=count[cells].astype("<u8").tobytes(),
            wait_ns=waited[cells].astype("<u8").tobytes(),
        )
