"""Starts the rank processes of a job, and ends only those."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rig.build import RigPaths, build
from tests.rig.config import JobConfig

SHM = Path("/dev/shm")


@dataclass
class Job:
    """N rank processes of one job, as a context manager.

    `hold` keeps the ranks before communicator init ("start") or after it ("init") until
    `release()`. `env` reaches every rank, `rank_env` single ones.
    """

    config: JobConfig
    paths: RigPaths | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    rank_env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    hold: str = ""
    workdir: Path | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __enter__(self) -> Job:
        self._own = self.workdir is None
        self.folder = (
            Path(tempfile.mkdtemp(prefix="rig-")) if self._own else Path(str(self.workdir))
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.paths = self.paths or build()
        self.shm_prefix = f"rig-{uuid.uuid4().hex[:12]}"
        try:
            for rank in range(self.config.ranks):
                self.processes.append(self._start(rank, self.paths))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def _start(self, rank: int, paths: RigPaths) -> subprocess.Popen[bytes]:
        command = [
            str(paths.job), f"--rank={rank}", *self.config.arguments(),
            f"--uid-file={self.folder}/uid", f"--truth={self.truth_file(rank)}",
        ]  # fmt: skip
        if self.hold:
            command.append(f"--start-file={self.folder}/start")
        if self.hold == "init":
            command.append("--init-first")
        env = dict(os.environ) | paths.env() | {"RIG_SHM_PREFIX": self.shm_prefix}
        env |= dict(self.env) | dict(self.rank_env.get(rank, {}))
        with (self.folder / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=log, start_new_session=True)  # fmt: skip

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def truth_file(self, rank: int) -> Path:
        return self.folder / f"truth-{rank}.json"

    def truth(self, rank: int) -> dict[str, Any]:
        """The newest truth that the rank has written."""
        found: dict[str, Any] = json.loads(self.truth_file(rank).read_text())
        return found

    def truths(self) -> list[dict[str, Any]]:
        return [self.truth(rank) for rank in range(self.config.ranks)]

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text(errors="replace")

    def release(self) -> None:
        """Lets ranks go that are held at their start file."""
        (self.folder / "start").touch()

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Returns when every rank has its communicators."""
        end = time.monotonic() + timeout
        while not all(self.truth_file(rank).exists() for rank in range(self.config.ranks)):
            if time.monotonic() > end or any(p.poll() not in (None, 0) for p in self.processes):
                logs = [self.log(rank) for rank in range(self.config.ranks)]
                raise RuntimeError(f"the job did not come up: {logs}")
            time.sleep(0.01)

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Exit codes of all ranks, negative for a signal; TimeoutError if some go on."""
        end = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                alive = [r for r, p in enumerate(self.processes) if p.poll() is None]
                raise TimeoutError(f"ranks {alive} go on after {timeout} s") from None
        return [process.returncode for process in self.processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)

    def stop(self, timeout: float | None = None) -> list[int | None]:
        """SIGTERM, then SIGKILL for whoever has not reached a step boundary in time."""
        limit = self.config.grace + 3.0 if timeout is None else timeout
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + limit
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.processes:
            process.wait()
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        """Stops what still runs, and removes shared memory and files."""
        self.stop()
        for left in SHM.glob(f"{self.shm_prefix}-*"):
            left.unlink(missing_ok=True)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cpu_seconds(self) -> list[float]:
        """CPU time of each living rank so far."""
        tick = os.sysconf("SC_CLK_TCK")
        out = []
        for pid in self.pids:
            try:
                rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            out.append((int(rest[11]) + int(rest[12])) / tick)
        return out


@contextmanager
def running(config: JobConfig, **options: Any) -> Iterator[Job]:
    """A job whose ranks have their communicators and run."""
    with Job(config, **options) as job:
        job.wait_ready()
        yield job
