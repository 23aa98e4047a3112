"""Jobs of the rig in namespaces of their own: plain ones, and containers made by runc."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rig.build import build
from tests.rig.config import JobConfig

CONFIG = JobConfig(ranks=2, layers=1, seconds=2.0, attn_us=5_000, truth_every=0.2)


@dataclass
class Container:
    """`inside`: folder of the rig as its processes see it; `out`: their files, from outside."""

    inside: Path
    out: Path
    process: subprocess.Popen[bytes]

    def release(self) -> None:
        (self.out / "start").touch()

    def truth(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"truth-{rank}.json").read_text())
        return found

    def finish(self) -> None:
        assert self.process.wait(60) == 0, (self.out / "log").read_text(errors="replace")


def script(inside: Path, out: Path) -> str:
    """Both ranks, held before they make a communicator."""
    common = [f"--uid-file={out}/uid", f"--start-file={out}/start", *CONFIG.arguments()]
    ranks = [
        " ".join([f"{inside}/rigjob", f"--rank={rank}", f"--truth={out}/truth-{rank}.json",
                  *common])
        for rank in range(CONFIG.ranks)
    ]  # fmt: skip
    return f"export LD_LIBRARY_PATH={inside} RIG_SHM_PREFIX=c; " + "".join(
        f"{rank} & p{number}=$!; " for number, rank in enumerate(ranks)
    ) + " && ".join(f"wait $p{number}" for number in range(len(ranks)))  # fmt: skip


def pids_of(inside: Path, number: int) -> list[int]:
    """Host pids of the ranks, when all of them have mapped the library."""
    end = time.monotonic() + 20
    found: list[int] = []
    while time.monotonic() < end:
        found = [int(path.name) for path in Path("/proc").iterdir() if _maps(path, inside)]
        if len(found) == number:
            return sorted(found)
        time.sleep(0.05)
    raise AssertionError(f"{found} map {inside}/libcuda.so.1 instead of {number} processes")


def _maps(process: Path, inside: Path) -> bool:
    try:
        if not process.name.isdigit() or "rigjob" not in str((process / "exe").readlink()):
            return False
        return f"{inside}/libcuda.so.1" in (process / "maps").read_text()
    except OSError:
        return False


@contextmanager
def _running(command: Sequence[str], inside: Path, out: Path, cwd: Path) -> Iterator[Container]:
    with (out / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield Container(inside, out, process)
    finally:
        (out / "start").touch()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def unshared(folder: Path) -> Iterator[Container]:
    """A job whose libraries lie on a file system that only its mount namespace has."""
    rig = build()
    inside, out = folder / "hidden", folder / "out"
    inside.mkdir()
    out.mkdir()
    prepare = f"mount -t tmpfs none {inside} && cp {rig.root}/* {inside} && "
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
               "sh", "-c", prepare + "{ " + script(inside, out) + "; }"]  # fmt: skip
    with _running(command, inside, out, folder) as container:
        yield container


def make_image(folder: Path) -> Path:
    """A root of what the rig and a shell need, and nothing else; -> the rig's folder in it."""
    rig = build()
    inside = Path(f"/opt/rig-{uuid.uuid4().hex[:8]}")
    image = folder / "image"
    build(dest=image / inside.relative_to("/"))
    for name in ("bin", "tmp", "proc", "dev", "sys", "out"):
        (image / name).mkdir()
    shutil.copy2(Path("/bin/sh").resolve(), image / "bin/sh")
    needed: set[str] = set()
    for binary in (rig.job, Path("/bin/sh")):
        text = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=True,
                              env=dict(os.environ) | rig.env()).stdout  # fmt: skip
        needed |= set(re.findall(r"(/\S*lib\S*\.so\S*) \(", text))
    for name in needed:
        if Path(name).parent != rig.root:
            (image / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(name).resolve(), image / name[1:])
    return inside


@contextmanager
def overlay(folder: Path, image: Path) -> Iterator[Path]:
    """A container's root as its engine mounts it: an overlay of its own over a shared image."""
    parts = {name: folder / name for name in ("upper", "work", "rootfs")}
    for part in parts.values():
        part.mkdir(parents=True)
    options = f"lowerdir={image},upperdir={parts['upper']},workdir={parts['work']}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["rootfs"])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"no overlay mount here: {done.stderr.strip()}")
    try:
        yield parts["rootfs"]
    finally:
        subprocess.run(["umount", "-l", str(parts["rootfs"])], check=True)


@contextmanager
def runc(bundle: Path, inside: Path) -> Iterator[Container]:
    """A container over `bundle`/rootfs with the runtime's own choice of namespaces."""
    program = shutil.which("runc") or shutil.which("runc", path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip("runc is not installed (make setup)")
    subprocess.run([program, "spec"], cwd=bundle, check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["process"]["terminal"] = False
    config["process"]["args"] = ["/bin/sh", "-c", script(inside, Path("/out"))]
    config["root"]["readonly"] = False
    (bundle / "config.json").write_text(json.dumps(config))
    name = f"lanterne-{uuid.uuid4().hex[:8]}"
    state = bundle / "state"
    command = [program, "--root", str(state), "run", "--bundle", str(bundle), name]
    out = bundle / "rootfs" / "out"
    try:
        with _running(command, inside, out, bundle) as container:
            yield container
    finally:
        subprocess.run([program, "--root", str(state), "delete", "--force", name],
                       capture_output=True, check=False)  # fmt: skip
