"""A small Debian or Ubuntu of its own, booted with its own systemd in a container.

Downloaded once by mmdebstrap and kept in build/deb; what a test changes is in an overlay.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.stack import wait_for

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "deb"
RIG = ROOT / "build" / "rig"  # jobs take a lock there
PACKAGES = "apt,systemd,dbus,procps,init-system-helpers,python3,python3-bpfcc"
# Debian has no key of Ubuntu's archive: what these sources bring runs in the container only.
UBUNTU = tuple(
    f"deb [trusted=yes] http://archive.ubuntu.com/ubuntu {suite} main universe"
    for suite in ("noble", "noble-updates")
)
SOURCES = {"bookworm": ("http://deb.debian.org/debian",), "noble": UBUNTU}


def base(suite: str) -> Path:
    """The folder of an unchanged system."""
    folder = KEPT / f"base-{suite}"
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        part = KEPT / f".base-{suite}.part"
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run(
            ["mmdebstrap", "-q", "--variant=minbase", f"--include={PACKAGES}", suite, part,
             *SOURCES[suite]], check=True, timeout=600, capture_output=True,
        )  # fmt: skip
        part.rename(folder)
    return folder


@dataclass
class System:
    """A booted system; `run` runs in it, as root."""

    root: Path
    leader: int

    def start(self, *command: str, feed: bool = False) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["nsenter", "-t", str(self.leader), "-a", *command],
            stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip

    def run(self, *command: str, check: bool = True, timeout: float = 120) -> str:
        process = self.start(*command)
        output = process.communicate(timeout=timeout)[0]
        if check and process.returncode:
            raise AssertionError(f"{' '.join(command)}: {process.returncode}\n{output}")
        return output

    def page(self, url: str) -> str:
        program = (
            "import sys,urllib.request as u;print(u.urlopen(sys.argv[1],timeout=9).read().decode())"
        )
        return self.run("python3", "-c", program, url, check=False)

    def show(self, unit: str, key: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", key, unit).strip()

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "-u", unit, check=False)

    def status(self, unit: str) -> dict[str, str]:
        """/proc/PID/status of its main process."""
        text = self.run("cat", f"/proc/{self.show(unit, 'MainPID')}/status")
        return {k: v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}


@contextmanager
def booted(suite: str, folder: Path, shown: Sequence[Path]) -> Iterator[System]:
    """`folder`: for the overlay and the log. `shown`: folders that are seen inside, too."""
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir()
    layers = f"lowerdir={base(suite)},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], check=True)
    try:
        with (folder / "boot.log").open("wb") as log:
            nspawn = subprocess.Popen(
                ["systemd-nspawn", "-q", "-D", root, "--boot", "--register=no", "--keep-unit",
                 "--private-network", "--capability=all", "--link-journal=no", "--console=pipe",
                 "--system-call-filter=bpf perf_event_open", "--kill-signal=SIGRTMIN+3",
                 *(f"--bind-ro={path}" for path in shown), f"--bind={RIG}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield System(root, _leader(nspawn, folder / "boot.log"))
        finally:
            nspawn.terminate()
            try:
                nspawn.wait(60)
            except subprocess.TimeoutExpired:
                nspawn.kill()
                nspawn.wait()
    finally:
        subprocess.run(["umount", root], check=True)


def _leader(nspawn: subprocess.Popen[bytes], log: Path) -> int:
    children = Path(f"/proc/{nspawn.pid}/task/{nspawn.pid}/children")

    def running() -> int:
        if nspawn.poll() is not None:
            raise AssertionError(f"systemd-nspawn ended: {log.read_text()}")
        found = children.read_text().split()
        if not found or "systemd" not in Path(f"/proc/{found[0]}/comm").read_text():
            return 0
        state = System(Path("/"), int(found[0])).run("systemctl", "is-system-running", check=False)
        return int(found[0]) if state.strip() in ("running", "degraded") else 0

    return int(wait_for(running, 120, "the system in the container is up"))


def bound() -> list[Path]:
    """What a job of the rig needs inside: this tree and the interpreter."""
    return [ROOT, Path(sys.base_prefix)]
