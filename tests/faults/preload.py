"""A clock that is off, and a disk that is slow, for one process only (preload.c)."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("preload.c")
_NUMBERS = struct.Struct("<qq")


class Preload:
    """`env` starts a process under it; `set` changes what that process is shown, at once."""

    def __init__(self, folder: Path, *, slow: Path | None = None) -> None:
        library, control = folder / "preload.so", folder / "preload.control"
        command: list[str | Path] = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Wextra",
            "-o",
            library,
            SOURCE,
        ]
        subprocess.run([*command, "-ldl"], check=True, timeout=60)
        control.write_bytes(b"\0" * _NUMBERS.size)
        self._file = control.open("r+b")
        self._numbers = mmap.mmap(self._file.fileno(), _NUMBERS.size)
        self.env = {"LD_PRELOAD": str(library), "FAULTS_CONTROL": str(control)}
        if slow is not None:
            self.env["FAULTS_SLOW"] = str(slow)

    def set(self, *, clock_seconds: int = 0, sync_ms: int = 0) -> None:
        _NUMBERS.pack_into(self._numbers, 0, clock_seconds, sync_ms)

    def close(self) -> None:
        self._numbers.close()
        self._file.close()
