"""The process under observation: does what it is told, a known number of times.

start.py driver LIBCUDA [LIBNCCL]
"""

from __future__ import annotations

import ctypes as c
import time
from collections.abc import Mapping
from typing import Any

from tests.gpu.cuda import Cuda
from tests.gpu.nccl import Nccl
from tests.gpu.process import serve

Answer = Mapping[str, Any]


class Driver:
    def __init__(self, libcuda: str, libnccl: str = "") -> None:
        self.cuda = Cuda(libcuda)
        self.nccl = Nccl(libnccl, self.cuda) if libnccl else None
        self._comms: list[c.c_void_p] = []

    def hello(self) -> Answer:
        return {
            "gpu": self.cuda.name(),
            "bus_id": self.cuda.bus_id(),
            "driver": self.cuda.version(),
            "nccl": self.nccl.version() if self.nccl else None,
        }

    def current(self) -> Answer:
        """Makes the device's context current once more."""
        self.cuda.make_current()
        return {}

    def launch(self, api: str, times: int, ns: int = 0) -> Answer:
        if not self.cuda.has(api):
            return {"there": False}
        self.cuda.launch(api, times, ns)
        return {"there": True}

    def capture(self, nodes: int) -> Answer:
        self.cuda.capture(nodes)
        return {}

    def replay(self, api: str, times: int) -> Answer:
        if not self.cuda.has(api):
            return {"there": False}
        self.cuda.replay(api, times)
        return {"there": True}

    def sync(self, api: str, times: int) -> Answer:
        if not self.cuda.has(api):
            return {"there": False}
        self.cuda.synchronise(api, times)
        return {"there": True}

    def addresses(self) -> Answer:
        return {"found": self.cuda.addresses()}

    def create(self) -> Answer:
        assert self.nccl is not None
        return self._keep(self.nccl.create())

    def split(self, of: int) -> Answer:
        assert self.nccl is not None
        return self._keep(self.nccl.split(self._comms[of]))

    def _keep(self, comm: c.c_void_p) -> Answer:
        assert self.nccl is not None
        self._comms.append(comm)
        return {"pointer": comm.value, "hash": self.nccl.hash(comm)}

    def everything(self, times: int) -> Answer:
        """Each operation `times` times on the first communicator, waiting for each round."""
        assert self.nccl is not None
        begin = time.monotonic_ns()
        for _ in range(times):
            self.nccl.everything(self._comms[0])
            self.cuda.synchronise("cuStreamSynchronize", 1)
        return {"host_ns": time.monotonic_ns() - begin}

    def all_reduce(self, on: int, times: int) -> Answer:
        assert self.nccl is not None
        for _ in range(times):
            self.nccl.all_reduce(self._comms[on])
        self.cuda.synchronise("cuStreamSynchronize", 1)
        return {}

    def destroy(self) -> Answer:
        assert self.nccl is not None
        for comm in reversed(self._comms):
            self.nccl.destroy(comm)
        self._comms.clear()
        return {}

    def cost(self, batches: int, batch: int) -> Answer:
        """ns per launch, and of a call that no probe is on, in the same loop."""
        launch = self.cuda.launcher("cuLaunchKernel")
        version, out = self.cuda.lib.cuDriverGetVersion, c.byref(c.c_int())
        spent = other = 0
        for _ in range(batches):
            begin = time.perf_counter_ns()
            for _ in range(batch):
                launch()
            middle = time.perf_counter_ns()
            for _ in range(batch):
                version(out)
            other += time.perf_counter_ns() - middle
            spent += middle - begin
            # Before the queue of launches is full: then a launch waits for the GPU.
            self.cuda.call("cuStreamSynchronize", self.cuda.stream)
        return {"launch_ns": spent / (batches * batch), "plain_ns": other / (batches * batch)}

    def busy(self, seconds: float) -> Answer:
        """Keeps the GPU running kernels of 1 ms for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.cuda.launch("cuLaunchKernel", 20, 1_000_000)
            self.cuda.call("cuStreamSynchronize", self.cuda.stream)
        return {}


def main(arguments: list[str]) -> int:
    driver = Driver(*arguments)
    names = ("current", "launch", "capture", "replay", "sync", "addresses", "create", "split",
             "everything", "all_reduce", "destroy", "cost", "busy")  # fmt: skip
    return serve(driver.hello(), {name: getattr(driver, name) for name in names})
