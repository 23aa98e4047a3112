"""The probes of parcagpu: every kernel that it tells of, inside graphs and outside, by the notes of
each build; and whether it tells of every launch."""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import Programs, load
from lanterne.agent.ring import Ring
from lanterne.probes import parcagpu
from tests.kernel.stub import Caller, compile_stub
from tests.parcagpu.build import NAME, build

pytestmark = pytest.mark.kernel
GRAPH = 5


@dataclass
class Scene:
    programs: Programs
    ring: Ring
    attacher: Attacher
    caller: Caller

    def rows(self) -> np.ndarray:
        found = self.ring.drain(1 << 20)
        return found[found["tgid"] == self.caller.pid]

    def launch(self, correlation: int, *, graph: bool = False) -> int:
        self.caller.call("cuGraphLaunch" if graph else "cuLaunchKernel")
        return self.caller.call("injectedLaunch", correlation, int(graph))

    def kernels(self, correlation: int, count: int, name: str, *, graph: int = 0) -> int:
        text = self.caller.memory(name.encode() + b"\0")
        return self.caller.call("injectedMany", 10**9, correlation, graph, count, text)

    def told(self) -> np.void:
        return self.programs.told([self.caller.pid])[self.caller.pid]


@contextmanager
def scene_of(
    folder: Path, method: str, flags: tuple[str, ...] = ("-O2",), ring_bytes: int = 2 << 20
) -> Iterator[Scene]:
    folder.mkdir(exist_ok=True)
    library = Path(shutil.copy(build(flags=flags), folder / NAME))
    with (
        load(method=method, kernel_ring_bytes=ring_bytes) as programs,
        Ring(programs.kernel_ring_fd, ring_bytes, parcagpu.KERNEL) as ring,
        Caller(compile_stub(folder, "cuda"), library) as caller,
        Attacher(programs, include=[f"{folder}/*"]) as attacher,
    ):
        scan = attacher.scan()
        assert not scan.failed
        assert {one.kind for one in scan.new_libraries} == {"cuda", "parcagpu"}
        yield Scene(programs, ring, attacher, caller)


@pytest.mark.parametrize("method", ["multi", "perf"], indirect=True)
@pytest.mark.parametrize("flags", [("-O2",), ("-O0",)])
def test_every_kernel_once_with_its_arguments(
    tmp_path: Path, method: str, flags: tuple[str, ...]
) -> None:
    with scene_of(tmp_path, method, flags) as scene:
        for correlation in range(1, 6):
            assert scene.launch(correlation) == 1
            assert scene.kernels(correlation, 1, "ncclDevKernel_SendRecv") == 1
        assert scene.launch(6, graph=True) == 1
        assert (
            scene.kernels(6, 300, "void deep_ep::internode_ll::dispatch<true>", graph=GRAPH) == 300
        )
        rows = scene.rows()
        assert len(rows) == 305
        assert rows["seq"].tolist() == list(range(305))
        eager, inside = rows[:5], rows[5:]
        assert eager["correlation"].tolist() == [1, 2, 3, 4, 5]
        assert set(eager["graph"].tolist()) == {0}
        assert set(inside["graph"].tolist()) == {GRAPH}
        assert set(inside["correlation"].tolist()) == {6}
        assert inside["node"].tolist() == list(range(1, 301))
        assert (inside["start_ns"] == 10**9 + 2000 * np.arange(300)).all()
        assert (inside["end_ns"] - inside["start_ns"] == 1000).all()
        assert set(rows["device"].tolist()) == {1}
        assert set(rows["stream"].tolist()) == {7}
        assert (rows["told_ns"] > 0).all()
        (first,), (second,) = np.unique(eager["name"]), np.unique(inside["name"])
        assert scene.programs.kernel_name(int(first)) == "ncclDevKernel_SendRecv"
        assert (
            scene.programs.kernel_name(int(second)) == "void deep_ep::internode_ll::dispatch<true>"
        )
        counts = scene.programs.counters()
        assert counts["kernels_submitted"] == 305
        assert not {k: v for k, v in counts.items() if k.startswith("lost_") and v}
        told = scene.told()
        assert (int(told["launches"]), int(told["missed"]), int(told["kernels"])) == (6, 0, 305)
        assert int(told["whole_ns"]) > 0


def test_launches_that_it_leaves_out_are_missed(tmp_path: Path) -> None:
    """As by its limit of a rate. Those before it was listened to are no loss."""
    with scene_of(tmp_path, "auto") as scene:
        scene.caller.call("cuLaunchKernel", times=7)
        assert scene.launch(1) == 1
        assert int(scene.told()["missed"]) == 0
        whole = int(scene.told()["whole_ns"])
        scene.caller.call("cuLaunchKernel", times=3)
        scene.caller.call("cuGraphLaunch", times=2)
        assert scene.launch(2) == 1
        told = scene.told()
        assert int(told["missed"]) == 5
        assert int(told["whole_ns"]) == whole
        # Of what was not told of as launched no kernel is told of.
        assert scene.kernels(3, 4, "k") == 0


def test_nothing_is_told_while_nobody_listens(tmp_path: Path) -> None:
    with scene_of(tmp_path, "auto") as scene:
        assert scene.launch(1) == 1
        assert scene.attacher.close()
        assert scene.launch(2) == 0
        assert scene.kernels(1, 3, "k") == 0
        assert not len(scene.rows())


def test_what_does_not_fit_is_counted_and_leaves_a_gap(tmp_path: Path) -> None:
    size = mmap.PAGESIZE
    with scene_of(tmp_path, "auto", ring_bytes=size) as scene:
        scene.launch(1)
        assert scene.kernels(1, 1000, "k") == 1000
        rows = scene.rows()
        counts = scene.programs.counters()
        assert 0 < len(rows) < 1000
        assert counts["kernels_submitted"] == len(rows)
        assert counts["lost_kernel_ring"] == 1000 - len(rows)
        assert scene.kernels(1, 1, "k") == 1
        (row,) = scene.rows()
        assert int(row["seq"]) == 1000


def test_names_are_told_apart_by_what_is_read_of_them(tmp_path: Path) -> None:
    """255 characters; without a name a kernel is told all the same."""
    long = "x" * 254
    names = ["a", "b", "", long + "A", long + "B", long + "Ac"]
    with scene_of(tmp_path, "auto") as scene:
        scene.launch(1)
        for name in names:
            assert scene.kernels(1, 1, name) == 1
        assert scene.caller.call("injectedMany", 10**9, 1, 0, 1, 0) == 1
        keys = scene.rows()["name"].tolist()
        found = [scene.programs.kernel_name(key) if key else None for key in keys]
        assert found == ["a", "b", None, long + "A", long + "B", long + "A", None]


def test_the_state_of_a_process_ends_with_it(tmp_path: Path) -> None:
    with scene_of(tmp_path, "auto") as scene:
        scene.launch(1)
        pid = scene.caller.pid
        assert scene.programs.told([pid])
        scene.programs.forget([pid])
        assert not scene.programs.told([pid])


def test_the_state_of_a_process_that_ended_unseen_is_swept_away(tmp_path: Path) -> None:
    """Ended is what has no folder in the /proc that the agent looks at."""
    with scene_of(tmp_path, "auto") as scene:
        scene.launch(1)
        pid = scene.caller.pid
        scene.programs.sweep_processes()
        assert scene.programs.told([pid])
        assert scene.programs.sweep_processes(tmp_path / "proc") >= 1
        assert not scene.programs.told([pid])


def test_more_names_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanterne.agent.kernel.MAX_KERNEL_NAMES", 8)
    with scene_of(tmp_path, "auto") as scene:
        scene.launch(1)
        for number in range(12):
            scene.kernels(1, 1, f"kernel_{number}")
        keys = scene.rows()["name"].tolist()
        counts = scene.programs.counters()
        known = [name for key in keys if (name := scene.programs.kernel_name(key))]
        assert counts["lost_kernel_names"] == 12 - 8
        assert len(known) == 7  # the seventh question empties the map
        scene.kernels(1, 1, "kernel_11")
        (row,) = scene.rows()
        assert scene.programs.kernel_name(int(row["name"])) == "kernel_11"


def test_a_kernel_record_is_as_the_player_gives_it(tmp_path: Path) -> None:
    """All eight arguments, with values that would show a swap or a wrong width."""
    with scene_of(tmp_path, "auto") as scene:
        scene.launch(0xFFFFFFFE)
        text = scene.caller.memory(b"combine_impl\0")
        values = (2**62 + 1, 2**62 + 5, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF)
        kernel = struct.pack("<QQIIIIQQ", *values, text, 2**63 + 9)
        assert scene.caller.call("injectedKernel", scene.caller.memory(kernel)) == 1
        (row,) = scene.rows()
        names = ("start_ns", "end_ns", "device", "stream", "correlation", "graph", "node")
        assert [int(row[name]) for name in names] == [*values, 2**63 + 9]
