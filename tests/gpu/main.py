"""The check: what is asked of it, in which order, and the report. See docs/gpu-check.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import check_cost, check_cuda, check_nccl, check_nvml, host
from tests.gpu.context import Context
from tests.gpu.result import Report, Result, failed
from tests.gpu.runtime import MANIFEST, unpack
from tests.gpu.watch import Watch

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("doctor", "addresses", "cuda_counts", "torch_counts", "nccl_early", "nccl_late",
          "nccl_plugin", "device_times", "nvml", "launch_cost")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="tests/gpu/check", description=__doc__)
    top.add_argument("out", nargs="?", type=Path, default=Path("gpu-check.json"), metavar="OUT")
    top.add_argument("--bundle", type=Path, help="folder made by make gpu-bundle")
    top.add_argument("--only", action="append", choices=CHECKS, help="this check (repeatable)")
    top.add_argument("--rig", type=Path, help="folder of the CPU stand-ins: tries the check itself")
    top.add_argument("--python", default="", help="with a bundle that has no Python: this one")
    return top


def find_bundle(given: Path | None) -> Path:
    """The one named, the one this file is in, or the one in the source tree."""
    for folder in (given, ROOT, ROOT / "build" / "gpu-bundle"):
        if folder is not None and (folder / MANIFEST).exists():
            return folder.resolve()
    raise SystemExit("gpu check: no bundle; make one with make gpu-bundle, or name it by --bundle")


def rig_host(root: Path) -> host.Host:
    """The stand-ins, loaded by path; only they are watched, so that no job here is touched."""
    return host.Host(
        libcuda=str(root / "libcuda.so.1"),
        libnccl=str(root / "libnccl.so.2"),
        smi=(sys.executable, str(Path(__file__).with_name("start.py")), "rig_smi"),
        torch=False,
        include=(f"{root}/*",),
    )


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if os.geteuid() != 0:
        raise SystemExit("gpu check: run it as root; probes need it")
    bundle = find_bundle(options.bundle)
    if options.rig is not None:
        os.environ["LD_LIBRARY_PATH"] = str(options.rig)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    report = Report(lambda line: print(line, flush=True))
    with tempfile.TemporaryDirectory(prefix="lanterne-gpu-") as name:
        folder = Path(name)
        found = rig_host(options.rig) if options.rig else host.look()
        report.host = host.describe(found)
        try:
            runtime = unpack(bundle, folder / "prefix", python=options.python,
                             driver_folders=found.driver_folders)  # fmt: skip
            report.host["bundle"] = dict(runtime.versions)
            with Watch(folder, runtime, found) as watch:
                context = Context(folder, found, runtime, watch, options.rig is not None)
                run_checks(report, context, options.only or CHECKS)
        except Exception as error:  # the report is written in any case
            why = f"{type(error).__name__}: {error}"
            report.run("setup", partial(failed, why))
    report.write(options.out)
    count = {status: sum(check["status"] == status for check in report.checks)
             for status in ("passed", "failed", "skipped")}  # fmt: skip
    print(f"{options.out}: " + ", ".join(f"{number} {status}" for status, number in count.items()))
    return 0 if report.passed else 1


def run_checks(report: Report, context: Context, wanted: Collection[str]) -> None:
    """In order; two checks judge what the one before them has found."""
    simple: dict[str, Callable[[Context], Result]] = {
        "doctor": check_cuda.doctor,
        "cuda_counts": check_cuda.counts,
        "torch_counts": check_cuda.torch_counts,
        "nccl_early": check_nccl.early,
        "nccl_late": check_nccl.late,
        "nccl_plugin": check_nccl.plugin,
        "nvml": check_nvml.nvml,
        "launch_cost": check_cost.cost,
    }
    found: dict[str, Mapping[str, Any]] = {}
    for name in CHECKS:
        if name not in wanted:
            continue
        if name == "addresses":
            symbols = check_cuda.probed(found.get("doctor", {}))
            result = report.run(name, partial(check_cuda.addresses, context, symbols))
        elif name == "device_times":
            numbers = found.get("nccl_plugin", {})
            result = report.run(name, partial(check_nccl.device_times, numbers))
        else:
            result = report.run(name, partial(simple[name], context))
        found[name] = result.numbers
