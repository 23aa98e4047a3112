"""Builds the stand-ins of expert-parallel libraries, and the job that uses one, into a folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
KEPT = SOURCES.parents[2] / "build" / "rig" / "moe"
# Name of the module file in each build of DeepEP, and which the sources call it.
BUILDS = {
    "v1.2.1": ("V121", "deep_ep_cpp.cpython-311-x86_64-linux-gnu.so"),
    "head": ("HEAD", "deep_ep/_C.cpython-312-x86_64-linux-gnu.so"),
    "sgl": ("SGL", "deep_ep/_C.cpython-311-x86_64-linux-gnu.so"),
}
# Without optimisation every function begins with a push, like the real libraries'.
FLAGS = (
    "-O0", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls", "-fno-ipa-ra", "-Wl,--build-id",
    *(["-fcf-protection=none"] if platform.machine() == "x86_64" else []),
)  # fmt: skip


def build_deepep(folder: Path, build: str) -> Path:
    """-> the library, under the name that the real one has. Each call gives a file of its own."""
    define, name = BUILDS[build]
    target = folder / name
    source = str(SOURCES / "deep_ep.cc")
    return _compile(target, "g++", "-std=c++17", f"-DBUILD={define}", "-shared", source)


def build_nccl_ep(folder: Path) -> Path:
    target = folder / "libnccl_ep.so.0"
    return _compile(target, "gcc", "-shared", f"-Wl,-soname,{target.name}", f"{SOURCES}/nccl_ep.c")


def build_job(folder: Path, library: Path, build: str) -> Path:
    """The expert-parallel job, linked to one build of the library."""
    return _compile(
        folder / "epjob", "g++", "-std=c++17", f"-DBUILD={BUILDS[build][0]}",
        f"{SOURCES}/job.cc", str(library), f"-Wl,-rpath,{library.parent}",
    )  # fmt: skip


def _compile(target: Path, compiler: str, *arguments: str) -> Path:
    """A copy of what was compiled of the same sources before, else compiled now."""
    command = [compiler, *FLAGS, *arguments]
    digest = hashlib.sha256("\0".join(command).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    kept = KEPT / digest.hexdigest()[:16]
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        fresh = KEPT / f"{kept.name}.{os.getpid()}"
        subprocess.run([*command, "-o", str(fresh)], check=True, timeout=120)
        fresh.rename(kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(kept, target)
    return target
