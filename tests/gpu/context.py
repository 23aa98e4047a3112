"""What every check is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.host import Host
from tests.gpu.process import Asked
from tests.gpu.runtime import Runtime
from tests.gpu.watch import Watch


@dataclass(frozen=True)
class Context:
    folder: Path
    host: Host
    runtime: Runtime
    watch: Watch
    rig: bool

    def driver(self, name: str, env: Mapping[str, str] | None = None, *,
               nccl: bool = True) -> Asked:  # fmt: skip
        """A new process that uses the GPU as told."""
        arguments = [self.host.libcuda]
        if nccl and self.host.libnccl:
            arguments.append(self.host.libnccl)
        return Asked("driver", arguments, self.folder / f"{name}.log",
                     env=dict(os.environ) | dict(env or {}))  # fmt: skip
