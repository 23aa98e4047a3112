"""Starts and stops the ranks of `tests/torch_moe.py`; only processes it started are ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.stack import free_port

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-torch" / "bin" / "python"


class TorchJob:
    """`n_ranks` processes of the PyTorch MoE; a context manager.

    The first step is taken only after `go()`, so that probes can be in place before.
    """

    def __init__(self, n_ranks: int, folder: Path, *, steps: int = 200, slow_rank: int = -1,
                 slow_ms: float = 5.0, workload: str = "torch-moe", extra: tuple[str, ...] = ()
                 ) -> None:  # fmt: skip
        self.n_ranks = n_ranks
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start = folder / "start"
        self._ready = folder / "ready"
        self._args = ["--steps", str(steps), "--slow-rank", str(slow_rank)]
        self._args += ["--slow-ms", str(slow_ms), "--start-file", str(self._start)]
        self._args += ["--ready-file", str(self._ready), "--out", str(folder / "rank"), *extra]
        self._workload = workload

    def __enter__(self) -> TorchJob:
        port = free_port()
        for rank in range(self.n_ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(self.n_ranks))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            env |= {"LANTERNE_WORKLOAD": self._workload, "GLOO_SOCKET_IFNAME": "lo"}
            command = [str(PYTHON), str(ROOT / "tests" / "torch_moe.py"), *self._args]
            with (self.folder / f"torch-{rank}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return self

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def wait_ready(self, timeout: float = 120.0) -> None:
        end = time.monotonic() + timeout
        while not all(Path(f"{self._ready}.{r}").exists() for r in range(self.n_ranks)):
            dead = [r for r, p in enumerate(self._processes) if p.poll() is not None]
            if dead or time.monotonic() > end:
                log = (self.folder / f"torch-{dead[0] if dead else 0}.log").read_text()[-2000:]
                raise RuntimeError(f"ranks {dead} ended, or no start in {timeout:.0f} s: {log}")
            time.sleep(0.05)

    def go(self) -> None:
        self._start.touch()

    def alive(self) -> bool:
        return all(p.poll() is None for p in self._processes)

    def wait(self, timeout: float = 120.0) -> None:
        end = time.monotonic() + timeout
        for rank, process in enumerate(self._processes):
            if process.wait(max(0.1, end - time.monotonic())) != 0:
                log = (self.folder / f"torch-{rank}.log").read_text()[-2000:]
                raise RuntimeError(f"rank {rank} failed: {log}")

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def truth(self) -> list[dict[str, Any]]:
        """What each rank saw, by rank."""
        found = [json.loads(p.read_text()) for p in self.folder.glob("rank.*.json")]
        return sorted(found, key=lambda row: int(row["rank"]))

    def own_waits(self) -> npt.NDArray[np.float64]:
        """Seconds each rank waited by its own measure: sum over calls of d_r - min_q d_q."""
        durations = np.array(
            [[end - start for _, start, end in row["calls"]] for row in self.truth()], float
        )
        waits: npt.NDArray[np.float64] = (durations - durations.min(axis=0)).sum(axis=1) / 1e9
        return waits
