"""Compiles the rig's libraries and programs with gcc, in variants, when they are out of date."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
BUILD = SOURCES.parents[1] / "build" / "rig"

# Entries must begin with a push (the kernel emulates it under a uprobe), as in the real libraries:
# frame pointers, no shrink-wrapping, no endbr64. Sibling calls would hide the return probes.
COMMON = (
    "-std=gnu11", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-pthread",
    "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls",
    "-fno-shrink-wrap", *(["-fcf-protection=none"] if platform.machine() == "x86_64" else []),
)  # fmt: skip

LANDING_PADS = (
    "-fcf-protection=branch" if platform.machine() == "x86_64" else "-mbranch-protection=bti",
)


@dataclass(frozen=True)
class Variant:
    """How one build of the libraries differs."""

    defines: tuple[str, ...] = ()
    stripped: bool = False
    flags: tuple[str, ...] = ()  # to the compiler


VARIANTS: dict[str, Variant] = {
    "normal": Variant(),
    # Only .dynsym is left: ncclEnqueueCheck cannot be found, the exports can.
    "stripped": Variant(stripped=True),
    # Nothing in the file tells where the communicator keeps its identity.
    "opaque": Variant(defines=("-DRIG_OPAQUE",), stripped=True),
    # Every function begins with a landing pad, which the kernel single-steps.
    "landing-pads": Variant(flags=LANDING_PADS),
    # 2.21.5: another structure, the old hash, none of the exports that came later.
    "old": Variant(defines=("-DRIG_NCCL_VERSION=22105",)),
}


@dataclass(frozen=True)
class Target:
    """One file to build, and from which folder."""

    name: str
    folder: str
    shared: bool = True
    soname: str = ""
    includes: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


TARGETS = (
    Target("libcuda.so.1", "cuda", soname="libcuda.so.1"),
    Target("libnccl.so.2", "nccl", soname="libnccl.so.2", link=("-ldl",)),
    Target("libcudart.so.12", "cudart", soname="libcudart.so.12",
           link=("-ldl", f"-Wl,--version-script={SOURCES}/cudart/cudart.map")),
    Target("libnvidia-ml.so.1", "nvml", soname="libnvidia-ml.so.1"),
    Target("rigjob", "rank", shared=False, link=("-l:libnccl.so.2", "-l:libcuda.so.1", "-lm")),
    Target("rigcall", "call", shared=False, link=("-l:libnccl.so.2", "-l:libcuda.so.1")),
)  # fmt: skip


@dataclass(frozen=True)
class RigPaths:
    """Where one build lies. `root` is what belongs into LD_LIBRARY_PATH."""

    root: Path

    @property
    def nccl(self) -> Path:
        return self.root / "libnccl.so.2"

    @property
    def cuda(self) -> Path:
        return self.root / "libcuda.so.1"

    @property
    def cudart(self) -> Path:
        return self.root / "libcudart.so.12"

    @property
    def nvml(self) -> Path:
        return self.root / "libnvidia-ml.so.1"

    @property
    def job(self) -> Path:
        return self.root / "rigjob"

    @property
    def call(self) -> Path:
        return self.root / "rigcall"

    def env(self) -> dict[str, str]:
        """What a process needs to load these libraries by name."""
        old = os.environ.get("LD_LIBRARY_PATH", "")
        return {"LD_LIBRARY_PATH": f"{self.root}:{old}" if old else str(self.root)}


def build(variant: str = "normal", dest: Path | None = None) -> RigPaths:
    """Compiles what is out of date; `dest` gets a copy of its own, so other inodes.

    Safe to call from several processes at once.
    """
    made = VARIANTS[variant]
    root = BUILD / variant
    root.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{variant}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        digest = source_digest(made)
        stamp = root / "stamp"
        if not stamp.exists() or stamp.read_text() != digest:
            _compile(root, variant, made, digest)
            stamp.write_text(digest)
        if dest is not None:
            dest.mkdir(parents=True, exist_ok=True)
            for target in TARGETS:
                shutil.copy2(root / target.name, dest / target.name)
            return RigPaths(dest.resolve())
    return RigPaths(root)


def source_digest(variant: Variant) -> str:
    """Of everything that a build is made from."""
    total = hashlib.sha256(repr((COMMON, variant, TARGETS)).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in (".c", ".h", ".map"):
            total.update(str(path.relative_to(SOURCES)).encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def _compile(root: Path, name: str, variant: Variant, digest: str) -> None:
    for target in TARGETS:
        out = root / f"{target.name}.new"
        sources = sorted((SOURCES / target.folder).glob("*.c"))
        # A build id per variant: stripping would keep the id of the unstripped file.
        build_id = hashlib.sha1(f"{digest}{name}{target.name}".encode()).hexdigest()
        command = [
            os.environ.get("CC", "gcc"), *COMMON, *variant.flags, *variant.defines,
            f"-I{SOURCES}/include", f"-I{SOURCES}/{target.folder}",
            *(["-shared", "-fvisibility=hidden", f"-Wl,-soname,{target.soname}"]
              if target.shared else []),
            f"-Wl,--build-id=0x{build_id}", "-Wl,-rpath,$ORIGIN", "-o", str(out),
            *map(str, sources), f"-L{root}", *target.link,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"building {target.name} failed:\n{done.stderr}")
        if variant.stripped and target.shared:
            subprocess.run(["strip", "-s", str(out)], check=True)
        # Replaced, not rewritten: a running process keeps the file it has mapped.
        out.replace(root / target.name)
