"""What agents read beside the operations: processes on their CPUs, and GPUs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lanterne.proto import telemetry_pb2 as pb
from tests.bench.detect.cases import Case
from tests.bench.detect.job import Job

F64 = npt.NDArray[np.float64]

NS = 10**9
THROTTLED = ("sw_thermal",)
CLOCK_HZ, THROTTLED_HZ = 1.98e9, 1.4e9
BUSY = {"blocking": 1.0}  # share of own time on a CPU; elsewhere the GPU works
BUSY_WITH_GPU = 0.1


def bus_id(rank: int) -> str:
    return f"0000:{rank % 32:02x}:00.0"


class Context:
    """Readings of a run's ranks; `before_ns`: what the run's clock read at its start."""

    def __init__(self, case: Case, job: Job, before_ns: int) -> None:
        self._case, self._job = case, job
        self._waited, self._ran = self._totals(before_ns)

    def add(self, batch: pb.Batch, ranks: npt.NDArray[np.int64], second: int) -> None:
        """The readings at the end of that second."""
        for rank in ranks.tolist():
            batch.processes.add(
                pid=1000 + rank,
                pid_start_ticks=7,
                command="python",
                cpu_seconds=float(self._ran[second, rank]),
                run_queue_seconds=float(self._waited[second, rank]),
            )
            hot = self._throttled(rank, second)
            batch.gpus.add(
                index=rank % 32,
                uuid=f"GPU-{rank}",
                bus_id=bus_id(rank),
                utilization_ratio=1.0,
                sm_clock_hertz=THROTTLED_HZ if hot else CLOCK_HZ,
                sm_clock_max_hertz=CLOCK_HZ,
                throttle_reasons=THROTTLED if hot else (),
            )

    def _totals(self, before_ns: int) -> tuple[F64, F64]:
        """[second, rank] seconds each process waited for a CPU and ran on one, totals."""
        job = self._job
        second = np.minimum(job.step_end // NS, job.seconds - 1).astype(np.int64)
        waited, ran = np.zeros((2, job.seconds, job.ranks))
        np.add.at(waited, second, job.host_wait / 1e9)
        computed = np.zeros((len(second), job.ranks))
        for stage in job.stages:
            computed[:, job.groups[stage.group].ranks] += stage.own
        share = BUSY.get(self._case.evidence, BUSY_WITH_GPU)
        np.add.at(ran, second, share * (computed - job.host_wait) / 1e9)
        return np.cumsum(waited, axis=0), share * before_ns / 1e9 + np.cumsum(ran, axis=0)

    def _throttled(self, rank: int, second: int) -> bool:
        if self._case.kind != "throttled":
            return False
        ends = self._job.step_end
        return any(
            rank in e.ranks and ends[e.first - 1] <= (second + 0.5) * NS < ends[e.last - 1]
            for e in self._job.faults.episodes
        )
