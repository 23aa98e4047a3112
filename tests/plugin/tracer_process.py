"""The BPF tracer as a child process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lanterne.probes.nccl_profiler import usdt
from tests.plugin import notes
from tests.plugin.build import ROOT

_SCRIPT = Path(__file__).with_name("bpf_side.py")


def _field(register: str) -> str:
    """The register's name in the kernel's struct pt_regs."""
    if register.startswith("x"):
        return f"regs[{register[1:]}]"
    return register if register[1].isdigit() else register[1:]


class BpfTracer:
    """Traces op_done of one library in every process; a context manager."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.note = notes.read(library)["op_done"]

    def __enter__(self) -> BpfTracer:
        env = dict(os.environ) | {"BCC_KERNEL_SOURCE": str(ROOT / "probes" / "bpf")}
        self._child = subprocess.Popen(
            ["/usr/bin/python3", str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=env,
        )  # fmt: skip
        self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._child.kill()
        self._child.communicate()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the tracer has ended; see its message above")
        return json.loads(line)

    def _ask(self, *words: object) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(" ".join(map(str, words)) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def attach(self) -> None:
        (_, register), (_, size) = self.note.arguments
        assert size == usdt.OP.itemsize
        self._ask("attach", self.library, self.note.offset, self.note.semaphore_offset,
                  _field(str(register)))  # fmt: skip

    def detach(self) -> None:
        self._ask("detach")

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(tgids, rows of usdt.OP) since the last read."""
        rows = self._ask("read")["rows"]
        raw = bytes.fromhex("".join(text for _, text in rows))
        return np.array([tgid for tgid, _ in rows], np.int64), np.frombuffer(raw, usdt.OP)
