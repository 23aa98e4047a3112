"""Kill -9 of either program, hostile files: the job goes on, nothing is lost or counted twice."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.agent import bpf
from tests.proc import each
from tests.rig.rig import Job, JobConfig, RigPaths, build, expected_calls
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

BPF_PROG_GET_NEXT_ID = 11
RANKS = 4
BASE = {"ranks": RANKS, "tokens": 32, "hidden": 64, "layers": 2, "attn_us": 3000, "mode": "eager"}


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths) -> Iterator[Stack]:
    keep = {"analysis": {"ended_seconds": 600}}
    with Stack(tmp_path, [f"{paths.root}/*", "*/hostile/*"], collector=keep) as stack:
        yield stack.start()


def run_job(stack: Stack, paths: RigPaths, workload: str, steps: int, seen_before: float) -> int:
    """Runs a whole job under the probes; returns how many operations it made, over all ranks."""
    config = JobConfig(**BASE, steps=steps)  # type: ignore[arg-type]
    with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": workload}, hold="start") as job:
        wait_for(
            lambda: stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2,
            30,
            f"libraries attached\n{stack.logs()}",
        )
        job.release()
        assert job.wait(120) == [0] * RANKS
        assert all(truth["data_errors"] == 0 for truth in job.truths())
    wanted = ("ncclSend", "ncclRecv", "ncclAllReduce")
    calls = sum(expected_calls(config, steps, r)[name] for r in range(RANKS) for name in wanted)
    wait_for(
        lambda: (
            stack.agent_metrics().total("lanterne_agent_events_read_total") >= seen_before + calls
        ),
        30,
        f"{calls} events at the agent",
    )
    return steps * (2 * config.layers + 1) * RANKS


def counted(stack: Stack, workload: str) -> float:
    return stack.collector_metrics().total("lanterne_collective_calls_total", workload=workload)


def test_killed_collector_gets_everything_once(stack: Stack, paths: RigPaths) -> None:
    before = run_job(stack, paths, "before", 40, 0)
    wait_for(lambda: counted(stack, "before") >= before, 20, "the first job at the collector")
    assert counted(stack, "before") == before
    # What the agent has sent is acknowledged before the kill, so nothing of it may come again.
    wait_for(lambda: acknowledged(stack), 10, "acknowledgements")
    stack.kill("collector")
    down = time.monotonic()
    read = stack.agent_metrics().total("lanterne_agent_events_read_total")
    during = run_job(stack, paths, "during", 400, read)
    time.sleep(max(0.0, 20 - (time.monotonic() - down)))
    stack.start_collector()
    wait_for(lambda: counted(stack, "during") >= during, 40, "the second job at the collector")
    time.sleep(3)
    assert counted(stack, "during") == during
    assert counted(stack, "before") == 0, "acknowledged batches came twice"
    agent = stack.agent_metrics()
    assert agent.total("lanterne_agent_batches_dropped_total") == 0
    assert agent.total("lanterne_agent_events_lost_total") == 0
    refused = stack.collector_metrics().total("lanterne_collector_batches_refused_total")
    assert refused == 0


def acknowledged(stack: Stack) -> bool:
    """At most the newest window waits for its answer."""
    return stack.agent_metrics().total("lanterne_agent_queue_batches") <= 1


def programs_of(pid: int) -> set[int]:
    """Ids of the BPF programs that a process holds."""
    found = set()
    for _, info in each(Path(f"/proc/{pid}/fdinfo")):
        fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
        if "prog_id" in fields:
            found.add(int(fields["prog_id"]))
    return found


def loaded_programs() -> set[int]:
    """Ids of all BPF programs in the kernel."""
    found: set[int] = set()
    at = 0
    while True:
        try:
            _, answer = bpf.bpf(BPF_PROG_GET_NEXT_ID, struct.pack("<4I", at, 0, 0, 0))
        except OSError:  # ENOENT: that was the last
            return found
        at = struct.unpack_from("<4I", answer)[1]
        found.add(at)


def test_killed_agent_leaves_job_and_kernel_alone(stack: Stack, paths: RigPaths) -> None:
    config = JobConfig(**BASE, seconds=60)  # type: ignore[arg-type]
    with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "w"}, hold="start") as job:
        wait_for(
            lambda: stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2,
            30,
            "libraries attached",
        )
        job.release()
        job.wait_ready()
        wait_for(lambda: counted(stack, "w") > 0, 30, "operations at the collector")
        assert stack.agent is not None
        ours = programs_of(stack.agent.pid)
        assert ours
        assert ours <= loaded_programs()
        stack.kill("agent")
        wait_for(lambda: not ours & loaded_programs(), 10, "none of its programs is loaded")
        assert all(process.poll() is None for process in job.processes)
        # Back again: the communicators are older than the agent now, and are still named.
        stack.start_agent()
        wait_for(
            lambda: stack.agent_metrics().total("lanterne_agent_events_read_total") > 0,
            30,
            f"events after the restart\n{stack.logs()}",
        )
        job.stop()
        assert [truth["state"] for truth in job.truths()] == ["stopped"] * RANKS
        assert all(truth["data_errors"] == 0 for truth in job.truths())


HOLDER = """
import mmap, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        kept = globals().setdefault("kept", [])
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
print("ready", flush=True)
sys.stdin.read()
"""


def test_hostile_libraries_are_reported_and_the_rest_goes_on(
    stack: Stack, paths: RigPaths, tmp_path: Path
) -> None:
    good = paths.nccl.read_bytes()
    folder = tmp_path / "hostile"
    files = {
        "truncated": good[:5000],
        "garbage": b"\x7fELF" + bytes(range(256)) * 40,
        "text": b"not a library at all, " * 300,
        "sections": good[:0x3C] + b"\xff\xff" + good[0x3E:],
        "machine": good[:0x12] + b"\xb7\x00" + good[0x14:],  # EM_AARCH64
    }
    targets = []
    for name, content in files.items():
        path = folder / name / "libnccl.so.2"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        assert len(content) > mmap.PAGESIZE
        targets.append(str(path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *targets], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        try:
            assert holder.stdout.readline() == b"ready\n"
            wait_for(
                lambda: (
                    stack.agent_metrics().total("lanterne_agent_libraries", state="failed")
                    >= len(files)
                ),
                30,
                f"{len(files)} failed libraries\n{stack.logs()}",
            )
            operations = run_job(stack, paths, "beside", 40, 0)
            wait_for(lambda: counted(stack, "beside") == operations, 20, "the job beside them")
            failed = [t for node in stack.snapshot()["nodes"] for t in node["libraries_failed"]]
            for path in targets:
                assert any(path in text for text in failed), (path, failed)
        finally:
            holder.stdin.close()
            holder.wait(10)
