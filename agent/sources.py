"""The optional sources, GPU and host readings: each may fail alone, is then absent, and said so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Sources:
    """Writes into ``success`` by name of the source; others keep theirs there, too."""

    def __init__(self, proc: Path, success: dict[str, bool], *, nvml: bool, host: bool) -> None:
        self.success = success
        self.gpus: list[Any] = []  # agent.nvml.GpuReading
        self.host: dict[int, Any] = {}  # pid -> agent.host.ProcessReading
        self._nvml = self._open("nvml", nvml, _open_nvml)
        self._host = self._open("host", host, lambda: _open_host(proc))

    def _open(self, name: str, wanted: bool, make: Callable[[], Any]) -> Any:
        if not wanted:
            return None
        try:
            return make()
        except Exception as error:  # a source must not take the agent down, whatever it raises
            self.success[name] = False
            log.warning("source not available", extra={"source": name, "reason": str(error)})
            return None

    def read(self, pids: Iterable[int]) -> None:
        self.gpus = self._read("nvml", self._nvml, lambda: self._nvml.read()) or []
        if self._nvml is not None:
            self.success["nvml"] = self._nvml.available
        self.host = self._read("host", self._host, lambda: self._host.read(pids)) or {}

    def _read(self, name: str, source: Any, read: Callable[[], Any]) -> Any:
        if source is None:
            return None
        try:
            value = read()
        except Exception as error:  # as in _open
            if self.success.get(name, True):
                log.warning("source failed", extra={"source": name, "reason": str(error)})
            self.success[name] = False
            return None
        self.success[name] = True
        return value

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()


def _open_nvml() -> Any:
    from lanterne.agent.nvml import Nvml

    return Nvml()


def _open_host(proc: Path) -> Any:
    from lanterne.agent.host import HostReader

    return HostReader(proc)
