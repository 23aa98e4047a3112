"""Compiles the stand-in for parcagpu's library, as its own build does: dtrace makes the probes."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
NAME = "libparcagpucupti.so"


def build(*, flags: tuple[str, ...] = ("-O2",), provider: str = "parcagpu") -> Path:
    """Safe to call from several processes at once; -> the library."""
    out = ROOT / "build" / "parcagpu" / "-".join([provider, *flags]).replace("/", "_")
    out.mkdir(parents=True, exist_ok=True)
    target = out / NAME
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in FOLDER.iterdir() if path.is_file())
        if target.exists() and target.stat().st_mtime > newest:
            return target
        text = (
            (FOLDER / "probes.d").read_text().replace("provider parcagpu", f"provider {provider}")
        )
        (out / "probes.d").write_text(text)
        for way, made in (("-h", "probes.h"), ("-G", "probes.o")):
            _run(out, ["dtrace", "-C", way, "-s", "probes.d", "-o", made])
        if provider != "parcagpu":
            header = (out / "probes.h").read_text()
            (out / "probes.h").write_text(header.replace(provider.upper() + "_", "PARCAGPU_"))
        _run(
            out,
            ["gcc", "-shared", "-fPIC", "-g", "-Wall", "-Wl,--build-id", *flags, "-I.",
             f"-I{FOLDER}", "-o", f"{NAME}.new", str(FOLDER / "injection.c"), "probes.o"],
        )  # fmt: skip
        (out / f"{NAME}.new").replace(target)
    return target


def _run(folder: Path, command: list[str]) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
