"""`make test-kernel-vm`: the kernel tests on other kernels and on aarch64, under emulation.

Every machine boots with an image of the project's own; results come back on a disk of the guest.
Ends with a summary; status 1 where anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.vm import image, payload
from tests.vm.image import BUILD, VmError
from tests.vm.machines import Machine, chosen

SELECTION = (
    "tests/kernel",
    "tests/contract/test_record_layout.py",
    "tests/unit/test_catalog.py",
    "-m",
    "not nccl and not torch",
    "--ignore=tests/kernel/test_real_nccl.py",
    "--continue-on-collection-errors",
)
RESULT_BYTES = 64 << 20


@dataclass
class Outcome:
    """What one machine has shown."""

    machine: str
    release: str = ""
    page_bytes: int = 0
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    instructions: list[str] = field(default_factory=list)
    conditions: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: int = 0

    @property
    def good(self) -> bool:
        conditions = all(one["passed"] for one in self.conditions)
        return not self.error and not self.failed and self.passed > 0 and conditions


def boot(
    machine: Machine,
    root: Path,
    kernel: Path,
    disks: tuple[Path, Path],
    limit: float,
    append: str = "",
) -> None:
    """Runs the guest until it powers off; ``disks``: payload, results. Raises VmError."""
    arch = machine.architecture
    log = BUILD / f"console-{machine.name}.log"
    drives: list[str] = []
    for path, options in ((root, "snapshot=on"), (disks[0], "readonly=on"), (disks[1], "")):
        drives += ["-drive", f"file={path},if=virtio,format=raw,{options}".rstrip(",")]
    words = (f"console={arch.console}", "panic=-1", "mitigations=off", "quiet")
    command = [
        "nice", "-n", "10", arch.qemu, *arch.options, "-accel", "tcg,thread=multi",
        "-smp", "2", "-m", "3072", "-nodefaults", "-nographic", "-no-reboot",
        "-serial", "stdio", *drives,
        "-kernel", str(kernel / "vmlinuz"), "-initrd", str(kernel / "initrd"),
        "-append", " ".join(filter(None, (*words, arch.words, append))),
    ]  # fmt: skip
    deadline = time.monotonic() + limit
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            _follow(process, log, deadline)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode:
        raise VmError(f"{arch.qemu} ended with {process.returncode}, see {log}")


def _follow(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """Shows the guest's own lines while it runs."""
    with log.open(errors="replace") as console:
        while True:
            ended = process.poll() is not None
            for line in console:
                if line.startswith("lanterne-vm: ") or " FAILED" in line or " ERROR" in line:
                    print(f"  {line.rstrip()}", flush=True)
            if ended:
                return
            if time.monotonic() > deadline:
                raise VmError(f"the guest did not end in time, see {log}")
            time.sleep(0.5)


def collect(outcome: Outcome, disk: Path, folder: Path) -> None:
    """Unpacks the results and reads them into ``outcome``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with tarfile.open(disk, "r:") as archive:
            archive.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise VmError(f"the guest has left no results: {error}") from error
    if not (folder / "guest.json").exists():
        raise VmError(f"the guest has left no results, see {BUILD}/console-{outcome.machine}.log")
    facts = json.loads((folder / "guest.json").read_text())
    outcome.release, outcome.page_bytes = facts["release"], facts["page_bytes"]
    if (folder / "conditions.json").exists():
        outcome.conditions = json.loads((folder / "conditions.json").read_text())
    skips: Counter[str] = Counter()
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if (case.get("name") or "").startswith("test_instruction["):
            said = (case.findtext("system-out") or "").splitlines()
            outcome.instructions += [
                one for one in said if one.endswith(("stepped", "emulated", "refused"))
            ]
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            outcome.skipped += 1
            skips[skip.get("message", "")] += 1
        else:
            outcome.passed += 1
    outcome.skips = dict(skips)
    if facts["pytest"] not in (0, 1):
        raise VmError(f"pytest ended with {facts['pytest']}")


def run(
    machine: Machine,
    selection: tuple[str, ...],
    limit: float,
    *,
    conditions: str | None,
    append: str = "",
    take: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    outcome = Outcome(machine.name)
    began = time.monotonic()
    archive, results = BUILD / f"{machine.name}.payload", BUILD / f"{machine.name}.results"
    try:
        root, kernel = image.root_image(machine.architecture), image.kernel(machine)
        payload.pack(archive, selection, conditions=conditions, take=take, environment=environment)
        with results.open("wb") as disk:
            disk.truncate(RESULT_BYTES)
        release = (kernel / "release").read_text().strip()
        print(f"vm: {machine.name}: booting Linux {release}", flush=True)
        boot(machine, root, kernel, (archive, results), limit, append)
        collect(outcome, results, BUILD / "results" / machine.name)
    except (VmError, OSError, KeyError, ValueError) as error:
        outcome.error = str(error)
    finally:
        archive.unlink(missing_ok=True)
        results.unlink(missing_ok=True)
    outcome.seconds = round(time.monotonic() - began)
    return outcome


def show(outcomes: list[Outcome]) -> None:
    print()
    for one in outcomes:
        verdict = "passed" if one.good else "FAILED"
        kept = sum(row["passed"] for row in one.conditions)
        print(
            f"{one.machine}: {verdict}: Linux {one.release or '?'}, {one.page_bytes} bytes a page:"
            f" {one.passed} tests passed, {len(one.failed)} failed, {one.skipped} skipped;"
            f" doctor right in {kept} of {len(one.conditions)} conditions; {one.seconds} s"
        )
        for text in one.failed:
            print(f"  failed: {text}")
        for row in one.conditions:
            if not row["passed"]:
                print(f"  {row['name']}: {row['why']}")
        if one.instructions:
            print(f"  first instructions: {', '.join(one.instructions)}")
        for reason, count in one.skips.items():
            print(f"  skipped {count}: {reason}")
        if one.error:
            print(f"  {one.error}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.vm.run", description=__doc__)
    parser.add_argument("--arch", default="", help="x86_64, arm64, or a machine's name")
    parser.add_argument("--limit", type=float, default=5400, help="seconds for one machine")
    parser.add_argument("--no-doctor", action="store_true", help="only the tests")
    parser.add_argument("--conditions", default="", help="only those with this in their names")
    parser.add_argument("--append", default="", help="words for the kernel's command line")
    parser.add_argument("--take", action="append", default=[], help="of the tree, like build/rccl")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the tests")
    parser.add_argument("--build-only", action="store_true", help="make the images and stop")
    parser.add_argument("pytest", nargs="*", help="instead of the usual selection (after --)")
    arguments = parser.parse_args()
    machines = chosen(arguments.arch)
    if not machines:
        parser.error(f"no machine is called {arguments.arch!r}, nor of that architecture")
    if os.geteuid() != 0:
        parser.error("file systems are made with root as owner: run it as root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no guest is left behind
    BUILD.mkdir(parents=True, exist_ok=True)
    if arguments.build_only:
        for machine in machines:
            image.root_image(machine.architecture)
            image.kernel(machine)
        return 0
    selection = tuple(arguments.pytest) or SELECTION
    if wrong := [one for one in arguments.take if not (image.ROOT / one).exists()]:
        parser.error(f"--take {wrong[0]}: there is no such path in {image.ROOT}")
    if wrong := [one for one in arguments.env if "=" not in one]:
        parser.error(f"--env {wrong[0]}: write NAME=VALUE")
    conditions = None if arguments.no_doctor else arguments.conditions
    outcomes = [
        run(
            one,
            selection,
            arguments.limit,
            conditions=conditions,
            append=arguments.append,
            take=arguments.take,
            environment=dict(pair.split("=", 1) for pair in arguments.env),
        )
        for one in machines
    ]
    show(outcomes)
    text = json.dumps([asdict(one) for one in outcomes], indent=2)
    (BUILD / "summary.json").write_text(text + "\n")
    return 0 if all(one.good for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
