"""A PyTorch process that does what it is told, a known number of times.

start.py driver_torch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gpu.process import serve

Answer = Mapping[str, Any]
NODES = 3


class Torch:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensor = torch.zeros(1024, device="cuda")
        self._stream = torch.cuda.Stream()
        self._event = torch.cuda.Event()
        self._warm_up()

    def _warm_up(self) -> None:
        """Kernels are loaded at their first launch, and a capture needs them loaded."""
        torch, tensor = self._torch, self._tensor
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(5):
                tensor.add_(1)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(NODES):
                tensor.add_(1)
        for _ in range(5):
            tensor.add_(1)
            self._graph.replay()
        self._event.record()
        self._event.synchronize()
        self._stream.synchronize()
        torch.cuda.synchronize()

    def add(self, times: int) -> Answer:
        for _ in range(times):
            self._tensor.add_(1)
        return {}

    def replay(self, times: int) -> Answer:
        for _ in range(times):
            self._graph.replay()
        return {}

    def device_sync(self, times: int) -> Answer:
        for _ in range(times):
            self._torch.cuda.synchronize()
        return {}

    def stream_sync(self, times: int) -> Answer:
        for _ in range(times):
            self._stream.synchronize()
        return {}

    def event_sync(self, times: int) -> Answer:
        for _ in range(times):
            self._event.synchronize()
        return {}

    def profile(self, times: int) -> Answer:
        """Launches of `times` adds as torch's profiler counts them; None where it sees no calls."""
        profiler = self._torch.profiler
        kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
        with profiler.profile(activities=kinds) as trace:
            self.add(times)
            self._torch.cuda.synchronize()
        calls = sum(
            row.count
            for row in trace.key_averages()
            if row.key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
        )
        return {"launches": calls or None}


def main(_: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        return serve({"torch": torch.__version__, "cuda": False}, {})
    driver = Torch(torch)
    names = ("add", "replay", "device_sync", "stream_sync", "event_sync", "profile")
    hello = {"torch": torch.__version__, "cuda": True, "gpu": torch.cuda.get_device_name(0)}
    return serve(hello, {name: getattr(driver, name) for name in names})
