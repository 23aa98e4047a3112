"""The real libparcagpucupti.so, no GPU: the kernels that a stand-in of CUPTI hands it arrive whole.

LANTERNE_PARCAGPU names the library; docs/device.md says how it is built. Without it the test is
skipped: it comes from no package registry.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import Programs, load
from lanterne.agent.ring import Ring
from lanterne.probes import parcagpu
from tests.kernel.stub import Caller, compile_stub

pytestmark = [pytest.mark.nccl, pytest.mark.kernel]

CUPTI = Path(__file__).resolve().parents[1] / "parcagpu" / "cupti.c"
DRIVER, RUNTIME = 1, 2
# Numbers of calls in CUPTI's headers: cudaLaunchKernel, cudaGraphLaunch, cuLaunchKernel,
# cuLaunchKernelEx, cuGraphLaunch; and the function of libcuda below each.
LAUNCH = (RUNTIME, 211, "cuLaunchKernel")
GRAPH_LAUNCH = (RUNTIME, 311, "cuGraphLaunch")
DRIVER_LAUNCH = (DRIVER, 307, "cuLaunchKernel")
DRIVER_LAUNCH_EX = (DRIVER, 652, "cuLaunchKernelEx")
DRIVER_GRAPH_LAUNCH = (DRIVER, 514, "cuGraphLaunch")
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COMBINE = "void deep_ep::internode_ll::combine<true>"


@dataclass(frozen=True)
class Kernel:
    start: int
    end: int
    correlation: int
    device: int
    stream: int
    graph: int
    node: int
    name: str


@dataclass
class Scene:
    programs: Programs
    ring: Ring
    attacher: Attacher
    caller: Caller

    def launch(self, correlation: int, how: tuple[int, int, str]) -> None:
        domain, number, below = how
        inner = self.caller.address(below)
        assert self.caller.call("playCall", domain, number, correlation, inner) == 0

    def finish(self, kernels: list[Kernel]) -> None:
        """One buffer of records."""
        assert self.caller.call("playBuffer") >= len(kernels)
        for one in kernels:
            name = self.caller.memory(one.name.encode() + b"\0")
            numbers = (one.correlation, one.device, one.stream, one.graph)
            packed = struct.pack("<QQQQIIII", one.start, one.end, one.node, name, *numbers)
            assert self.caller.call("playKernel", self.caller.memory(packed)) == 1
        self.caller.call("playFinished")

    def told(self) -> np.void:
        return self.programs.told([self.caller.pid])[self.caller.pid]

    def kernels(self) -> list[Kernel]:
        rows = self.ring.drain(1 << 20)
        return [
            Kernel(
                int(row["start_ns"]),
                int(row["end_ns"]),
                int(row["correlation"]),
                int(row["device"]),
                int(row["stream"]),
                int(row["graph"]),
                int(row["node"]),
                str(self.programs.kernel_name(int(row["name"]))),
            )
            for row in rows[rows["tgid"] == self.caller.pid]
        ]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    named = os.environ.get("LANTERNE_PARCAGPU")
    if not named:
        pytest.skip("no real parcagpu: docs/device.md says how to build it for LANTERNE_PARCAGPU")
    library = Path(shutil.copy(named, tmp_path / "libparcagpucupti.so"))
    cupti = tmp_path / "libcupti.so"
    soname = f"-Wl,-soname,{cupti.name}"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", soname, "-o", str(cupti), str(CUPTI)]
    subprocess.run(command, check=True, timeout=60)
    limits = ("PARCAGPU_RATE_LIMIT=1e9", "PARCAGPU_GRAPH_RATE_LIMIT=1e9")
    prefix = ("env", f"LD_LIBRARY_PATH={tmp_path}", *limits)
    with (
        load() as programs,
        Ring(programs.kernel_ring_fd, 2 << 20, parcagpu.KERNEL) as ring,
        Caller(compile_stub(tmp_path, "cuda"), cupti, library, prefix=prefix) as caller,
        Attacher(programs, include=[f"{tmp_path}/*"]) as attacher,
    ):
        assert caller.call("InitializeInjection") & 0xFF == 1
        assert caller.call("playBuffer") == 0, "nobody listens yet"
        scan = attacher.scan()
        assert not scan.failed
        assert {one.kind for one in scan.new_libraries} == {"cuda", "parcagpu"}
        yield Scene(programs, ring, attacher, caller)


def test_every_kernel_arrives_with_all_that_it_carries(scene: Scene) -> None:
    ways = (LAUNCH, DRIVER_LAUNCH, DRIVER_LAUNCH_EX, GRAPH_LAUNCH, DRIVER_GRAPH_LAUNCH)
    for correlation, how in enumerate(ways, 1):
        scene.launch(correlation, how)
    second = 10**9
    eager = [
        Kernel(second, second + 1500, 1, 0, 7, 0, 0, ALL_REDUCE),
        Kernel(second + 2000, second + 2750, 2, 1, 13, 0, 0, "void deep_ep::dispatch<8>"),
        Kernel(second + 3000, second + 3001, 3, 1, 13, 0, 0, "k" * 255),
    ]
    untold = Kernel(second + 4000, second + 4001, 99, 1, 13, 0, 0, "launched before anybody came")
    inside = [
        Kernel(2 * second + 1000 * i, 2 * second + 1000 * i + 700 + i, 4, 3, 21, 77, 77 << 32 | i,
               COMBINE)
        for i in range(100)
    ]  # fmt: skip
    again = [Kernel(3 * second, 3 * second + 5, 5, 3, 22, 78, 1, ALL_REDUCE)]
    scene.finish([*eager, untold, *inside, *again])
    assert scene.kernels() == [*eager, *inside, *again]
    told = scene.told()
    assert (int(told["launches"]), int(told["missed"]), int(told["kernels"])) == (5, 0, 104)
    counts = scene.programs.counters()
    assert not {k: v for k, v in counts.items() if k.startswith("lost_") and v}


def test_it_stops_when_nobody_listens(scene: Scene) -> None:
    scene.launch(1, LAUNCH)
    assert scene.attacher.close()
    assert scene.caller.call("playBuffer") == 0
