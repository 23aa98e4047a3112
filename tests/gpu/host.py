"""What this host has: libcuda, libnccl, nvidia-smi, PyTorch. Found without loading any of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SMI_FIELDS = (
    "index", "uuid", "pci.bus_id", "name", "driver_version", "utilization.gpu", "memory.used",
    "temperature.gpu", "power.draw", "clocks.sm",
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """`libnccl`: "" where there is none. `smi`: the command that answers like nvidia-smi.
    `include`: patterns of the libraries to watch; none: all."""

    libcuda: str
    libnccl: str
    smi: tuple[str, ...]
    torch: bool
    driver_folders: tuple[str, ...] = ()
    include: tuple[str, ...] = ()


def look() -> Host:
    cuda, nvml = _cached("libcuda.so.1"), _cached("libnvidia-ml.so.1")
    smi = shutil.which("nvidia-smi") or _first("/usr/local/nvidia/bin/nvidia-smi")
    return Host(
        libcuda=cuda or "libcuda.so.1",
        libnccl=os.environ.get("LANTERNE_GPU_NCCL") or _libnccl(),
        smi=(smi,) if smi else (),
        torch=importlib.util.find_spec("torch") is not None,
        driver_folders=tuple(dict.fromkeys(str(Path(p).parent) for p in (nvml, cuda) if p)),
    )


def _first(*paths: str) -> str:
    return next((path for path in paths if Path(path).exists()), "")


def _cached(soname: str) -> str:
    """Where the dynamic loader would take it from."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (Path(folder) / soname).exists():
            return str(Path(folder) / soname)
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith(soname + " ") and "x86-64" in name:
            return path
    folders = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib64")
    return _first(*(f"{folder}/{soname}" for folder in folders))


def _libnccl() -> str:
    """PyTorch's own first: it is the one that jobs here use."""
    for entry in sys.path:
        found = Path(entry) / "nvidia/nccl/lib/libnccl.so.2"
        if found.exists():
            return str(found)
    return _cached("libnccl.so.2")


def ask_smi(smi: tuple[str, ...]) -> list[dict[str, str]]:
    """One row per GPU, by SMI_FIELDS, as text without units."""
    command = [*smi, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return [
        dict(zip(SMI_FIELDS, (cell.strip() for cell in line.split(","))))  # noqa: B905
        for line in done.stdout.splitlines()
        if line.strip()
    ]


def describe(host: Host) -> dict[str, object]:
    """For the report."""
    gpus: list[dict[str, str]] = []
    if host.smi:
        with suppress(OSError, subprocess.SubprocessError):  # the check nvml tells it
            gpus = ask_smi(host.smi)
    release = Path("/etc/os-release")
    pretty = [
        line.partition("=")[2].strip('"')
        for line in (release.read_text().splitlines() if release.exists() else ())
        if line.startswith("PRETTY_NAME=")
    ]
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "system": pretty[0] if pretty else "",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "gpus": [gpu["name"] for gpu in gpus],
        "driver": gpus[0]["driver_version"] if gpus else "",
        "libcuda": host.libcuda,
        "libnccl": host.libnccl,
        "torch": host.torch,
    }


def bus_id(text: str) -> str:
    """A PCI bus id in one spelling: "0000:1b:00.0"; NVML writes the domain with eight digits."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else ""
