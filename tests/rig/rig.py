"""The rig: a CPU stand-in for a GPU host.

Shared libraries with the ABI of NCCL, the CUDA driver, the CUDA runtime and NVML, and `rigjob`,
one process per rank of an expert-parallel job. Only processes started here are ended here.

    from tests.rig.rig import Job, JobConfig

    with Job(JobConfig(ranks=4, steps=20, faults=("slow-rank:2:2",))) as job:
        job.wait()
        print(job.truth(0)["calls"])
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from tests.rig.build import VARIANTS, RigPaths, build
from tests.rig.config import JobConfig
from tests.rig.job import Job, running
from tests.rig.known import known_calls, start_calls
from tests.rig.routing import dispatch_rows, expected_bytes, expected_calls, expert_counts

__all__ = [
    "VARIANTS",
    "Job",
    "JobConfig",
    "RigPaths",
    "build",
    "dispatch_rows",
    "expected_bytes",
    "expected_calls",
    "expert_counts",
    "known_calls",
    "running",
    "start_calls",
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rig.rig",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="normal")
    parser.add_argument("--build-only", action="store_true", help="compile and print the folder")
    parser.add_argument("--keep", type=Path, help="folder for logs and truth (kept)")
    for item in fields(JobConfig):
        flag = "--" + item.name.replace("_", "-").removesuffix("s" if item.name == "faults" else "")
        if item.default is False:
            parser.add_argument(flag, dest=item.name, action="store_true")
        elif item.name == "faults":
            parser.add_argument(flag, dest=item.name, action="append", default=[], metavar="F")
        else:
            parser.add_argument(flag, dest=item.name, type=type(item.default), default=item.default)
    given = parser.parse_args(arguments)
    paths = build(given.variant)
    if given.build_only:
        print(paths.root)
        return 0
    options = {item.name: getattr(given, item.name) for item in fields(JobConfig)}
    config = JobConfig(**(options | {"faults": tuple(options["faults"])}))
    with Job(config, paths=paths, workdir=given.keep) as job:
        codes = _until_over(job)
        for line in _report(job, codes):
            print(line)
    return max((abs(code) for code in codes if code is not None), default=0)


def _until_over(job: Job) -> list[int | None]:
    try:
        while any(process.poll() is None for process in job.processes):
            time.sleep(0.1)
    except KeyboardInterrupt:
        return job.stop()
    return [process.returncode for process in job.processes]


def _report(job: Job, codes: Iterable[int | None]) -> Iterator[str]:
    for rank, code in enumerate(codes):
        if not job.truth_file(rank).exists():
            yield f"rank {rank}: exit {code}, no truth: {job.log(rank).strip()}"
            continue
        truth = job.truth(rank)
        waits = {k: round(v["sum_ns"] / 1e6, 1) for k, v in truth["waits"].items() if v["count"]}
        state, steps = truth["state"], truth["steps"]
        yield f"rank {rank}: exit {code}, {state}, {steps} steps, waits ms {waits}"


if __name__ == "__main__":
    sys.exit(main())
