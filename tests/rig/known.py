"""`rigcall`: one process whose NCCL calls are known exactly, and its rates for benchmarks.

`known_calls` runs every kind of call and returns how often each was made. Two things make a
probe's count differ from it, as with the real library: ncclBcast calls ncclBroadcast through the
PLT (`seen_by_probes` adds that), and ncclCommInitAll does not call ncclCommInitRank.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.rig.build import RigPaths, build

# ncclFunc_t and exported name of what goes through ncclEnqueueCheck, once a call.
ENQUEUED = (
    "ncclAllReduce", "ncclBroadcast", "ncclBcast", "ncclReduce", "ncclAllGather",
    "ncclReduceScatter", "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend", "ncclRecv",
)  # fmt: skip


def seen_by_probes(calls: Mapping[str, int]) -> dict[str, int]:
    """What probes on the exports and on ncclEnqueueCheck count for these calls."""
    out = dict(calls)
    out["ncclBroadcast"] = calls["ncclBroadcast"] + calls["ncclBcast"]
    out["ncclEnqueueCheck"] = sum(calls[name] for name in ENQUEUED)
    return out


def known_calls(ranks: int = 2, repeat: int = 1, paths: RigPaths | None = None,
                timeout: float = 60.0) -> dict[str, int]:  # fmt: skip
    """Runs the known sequence, each rank on a thread of one process, and returns its calls."""
    with start_calls("--known", f"--ranks={ranks}", f"--repeat={repeat}", paths=paths) as process:
        return {name: int(count) for name, count in result(process, timeout)["calls"].items()}


def start_calls(*arguments: str, paths: RigPaths | None = None,
                start_file: Path | None = None) -> subprocess.Popen[str]:  # fmt: skip
    """`rigcall` with these arguments; it goes on when `start_file` exists."""
    paths = paths or build()
    command = [str(paths.call), *arguments]
    if start_file is not None:
        command.append(f"--start-file={start_file}")
    return subprocess.Popen(
        command, env=dict(os.environ) | paths.env(), stdout=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen[str], timeout: float = 60.0) -> dict[str, dict[str, int]]:
    """The JSON that `rigcall` prints at its end; kills it when it takes too long."""
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(f"rigcall ended with {process.returncode}")
    found: dict[str, dict[str, int]] = json.loads(text)
    return found
