"""Compiles the plugin and the program that plays NCCL to it, when they are out of date."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "probes" / "nccl_profiler"
TESTS = Path(__file__).resolve().parent
SANITIZERS = {"plain": "", "memory": "address,undefined", "thread": "thread"}


@dataclass(frozen=True)
class Built:
    library: Path
    driver: Path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _is_newer(target: Path, sources: list[Path]) -> bool:
    made = target.stat().st_mtime if target.exists() else 0.0
    return all(source.stat().st_mtime < made for source in sources)


def build(kind: str = "plain") -> Built:
    """``kind``: a key of SANITIZERS. Safe to call from several processes at once."""
    out = ROOT / "build" / ("plugin" if kind == "plain" else f"plugin-{kind}")
    out.mkdir(parents=True, exist_ok=True)
    sanitizer = SANITIZERS[kind]
    built = Built(out / "libnccl-profiler-lanterne.so", out / "driver")
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(["make", "-s", "-C", str(SOURCES), f"OUT={out}", f"SAN={sanitizer}"])
        sources = sorted(TESTS.glob("*.c"))
        # The driver steps over traps as x86-64 has them; the plugin itself is for both.
        if platform.machine() == "x86_64" and not _is_newer(
            built.driver, [*sources, *TESTS.glob("*.h")]
        ):
            flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-pthread", "-ldl"]
            if sanitizer:
                flags.append(f"-fsanitize={sanitizer}")
            compiler = os.environ.get("CC", "gcc")
            _run([compiler, *map(str, sources), *flags, "-o", str(built.driver)])
    return built
