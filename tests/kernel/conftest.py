"""The loaded programs, once per method and run, and a reader of what one process has caused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.kernel import Programs, load, probe_support
from lanterne.agent.ring import Ring
from lanterne.probes import layout
from tests.kernel.stub import Caller, compile_stub


@dataclass
class Loaded:
    """Programs with both rings. Other processes' records are in the rings too: ask by pid."""

    programs: Programs
    ring: Ring
    comm_ring: Ring

    def records(self, pid: int) -> np.ndarray:
        """All records of one process since the last call, in ring order."""
        found = self.ring.drain(1 << 20)
        return found[found["tgid"] == pid]

    def events(self, pid: int) -> np.ndarray:
        found = self.comm_ring.drain(1 << 20)
        return found[found["tgid"] == pid]

    def attacher(self, folder: Path) -> Attacher:
        """Looks only at libraries below one folder, so that other jobs here are left alone."""
        return Attacher(self.programs, include=[f"{folder}/*"])


def _load(method: str) -> Iterator[Loaded]:
    with load(method=method) as programs:
        with (
            Ring(programs.ring_fd, programs.ring_bytes, layout.RECORD) as ring,
            Ring(programs.comm_ring_fd, programs.comm_ring_bytes, layout.COMM_EVENT) as comm_ring,
        ):
            yield Loaded(programs, ring, comm_ring)


@pytest.fixture(scope="session")
def multi() -> Iterator[Loaded]:
    if not probe_support().uprobe_multi:
        pytest.skip("this kernel has no multi-uprobes (6.6)")
    yield from _load("multi")


@pytest.fixture(scope="session")
def perf() -> Iterator[Loaded]:
    if not probe_support().perf_uprobe:
        pytest.skip("this kernel has no uprobe perf event")
    yield from _load("perf")


@pytest.fixture
def method(request: pytest.FixtureRequest) -> str:
    """``parametrize("method", ["multi", "perf"], indirect=True)``: what the kernel has of them."""
    support = probe_support()
    if not {"multi": support.uprobe_multi, "perf": support.perf_uprobe}[request.param]:
        pytest.skip(f"this kernel has not the method {request.param}")
    return str(request.param)


@pytest.fixture
def either(request: pytest.FixtureRequest) -> Loaded:
    """What the agent would take: multi-uprobes, or perf events on an older kernel."""
    found: Loaded = request.getfixturevalue("multi" if probe_support().uprobe_multi else "perf")
    return found


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """What the agent would take, or what a test asks for with
    ``parametrize("loaded", ["multi", "perf"], indirect=True)``: perf events are slow to place, so
    only some tests run with both."""
    found: Loaded = request.getfixturevalue(getattr(request, "param", "either"))
    return found


@dataclass
class Scene:
    """A calling process whose stub library is attached."""

    loaded: Loaded
    attacher: Attacher
    caller: Caller
    libraries: Sequence[Path] = ()

    def records(self) -> np.ndarray:
        return self.loaded.records(self.caller.pid)

    def events(self) -> np.ndarray:
        return self.loaded.events(self.caller.pid)


def scene_of(loaded: Loaded, folder: Path, *kinds: str, enqueue: bool = True) -> Iterator[Scene]:
    libraries = [compile_stub(folder, kind, enqueue=enqueue) for kind in kinds]
    with Caller(*libraries) as caller, loaded.attacher(folder) as attacher:
        scan = attacher.scan()
        assert not scan.failed
        assert sorted(one.kind for one in scan.new_libraries) == sorted(kinds)
        scene = Scene(loaded, attacher, caller, libraries)
        scene.records()
        scene.events()
        yield scene


@pytest.fixture
def exported(loaded: Loaded, tmp_path: Path) -> Iterator[Scene]:
    """libnccl without ncclEnqueueCheck: the exported collectives are probed."""
    yield from scene_of(loaded, tmp_path, "nccl", enqueue=False)


@pytest.fixture
def enqueue(loaded: Loaded, tmp_path: Path) -> Iterator[Scene]:
    """libnccl with ncclEnqueueCheck."""
    yield from scene_of(loaded, tmp_path, "nccl")


@pytest.fixture
def gloo(loaded: Loaded, tmp_path: Path) -> Iterator[Scene]:
    yield from scene_of(loaded, tmp_path, "gloo")


@pytest.fixture
def cuda(loaded: Loaded, tmp_path: Path) -> Iterator[Scene]:
    """libcuda and libnccl."""
    yield from scene_of(loaded, tmp_path, "cuda", "nccl", enqueue=False)
