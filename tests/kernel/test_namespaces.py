"""Jobs with mount and pid namespaces of their own: host pids, names, ranks and GPUs are right."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.attach import Attacher
from lanterne.agent.comms import Registry
from lanterne.agent.process import Processes
from tests.kernel.containers import (
    CONFIG,
    Container,
    make_image,
    overlay,
    pids_of,
    runc,
    unshared,
)

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


def scan_twice(attacher: Attacher, pids: list[int]) -> None:
    """At most two scans from the mapping to the probes."""
    for _ in range(2):
        assert not attacher.scan().failed
    kinds = {
        pid: sorted(attacher.libraries[key].kind for key in attacher.processes[pid].libraries)
        for pid in pids
    }
    assert kinds == {pid: ["cuda", "nccl"] for pid in pids}


def registry_of(attacher: Attacher) -> Registry:
    return Registry(
        libraries=lambda pid: [
            attacher.libraries[key] for key in attacher.processes[pid].libraries
        ],
        processes=Processes(),
    )


def watch(loaded: Any, registry: Registry, containers: list[Container], ranks: int) -> np.ndarray:
    """Runs the jobs to their ends; every record that came."""
    parts: list[np.ndarray] = []

    def drain() -> None:
        parts.append(loaded.ring.drain(1 << 20))
        registry.apply(loaded.comm_ring.drain(1 << 20))
        registry.resolve(time.monotonic_ns())

    loaded.ring.drain(1 << 20)  # of earlier jobs
    loaded.comm_ring.drain(1 << 20)
    for container in containers:
        container.release()
    end = time.monotonic() + 20
    while sum(bool(comm.bus_id) for comm in registry.alive()) < ranks:
        assert time.monotonic() < end, registry.unresolved_reasons()
        time.sleep(0.02)
        drain()
    seen = {(c.tgid, c.pointer): (c.comm_hash, c.rank, c.n_ranks, c.bus_id, c.name)
            for c in registry.alive()}  # fmt: skip
    for container in containers:
        container.finish()
    drain()
    check_identity(seen, containers)
    return np.concatenate(parts)


def check_identity(
    seen: dict[tuple[int, int], tuple[int, int, int, str, str]], containers: list[Container]
) -> None:
    expected = []
    for container in containers:
        for rank in range(CONFIG.ranks):
            truth = container.truth(rank)
            (world,) = truth["comms"]
            expected.append((int(world["hash"], 16), rank, CONFIG.ranks, truth["bus_id"]))
    assert sorted(value[:4] for value in seen.values()) == sorted(expected)


def check_counts(records: np.ndarray, pids: list[int], containers: list[Container]) -> None:
    """Each call once, under the pid that the host has for the process."""
    found = sorted(int((records["tgid"] == pid).sum()) for pid in pids)
    expected = []
    for container in containers:
        for rank in range(CONFIG.ranks):
            calls = container.truth(rank)["calls"]
            expected.append(sum(calls[f"nccl{name}"] for name in
                                ("Send", "Recv", "AlltoAll", "AllReduce")))  # fmt: skip
    assert found == sorted(expected)
    assert min(found) > 0
    inner = {container.truth(rank)["pid"] for container in containers for rank in range(2)}
    assert inner.isdisjoint(pids), "the job must see other pids than the host"


def test_own_mount_and_pid_namespace(either: Any, tmp_path: Path) -> None:
    with unshared(tmp_path) as job, either.attacher(job.inside) as attacher:
        pids = pids_of(job.inside, CONFIG.ranks)
        scan_twice(attacher, pids)
        assert not list(job.inside.iterdir()), "hidden from the host"
        records = watch(either, registry_of(attacher), [job], CONFIG.ranks)
        check_counts(records, pids, [job])


def test_two_containers_of_one_image(either: Any, tmp_path: Path) -> None:
    """runc, overlay roots over one image: one library with one set of probes; and the second
    container goes on being probed when the first has ended."""
    inside = make_image(tmp_path)
    with ExitStack() as held:
        containers = []
        for name in ("first", "second"):
            held.enter_context(overlay(tmp_path / name, tmp_path / "image"))
            containers.append(held.enter_context(runc(tmp_path / name, inside)))
        attacher = held.enter_context(either.attacher(inside))
        pids = pids_of(inside, 2 * CONFIG.ranks)
        scan_twice(attacher, pids)
        libraries = [one for one in attacher.libraries.values() if one.kind == "nccl"]
        assert all(one is libraries[0] for one in libraries)
        records = watch(either, registry_of(attacher), containers, 2 * CONFIG.ranks)
        check_counts(records, pids, containers)


def test_the_first_container_ends(either: Any, tmp_path: Path) -> None:
    """The probes stay while another mount's view of the file is mapped, and go with the last."""
    inside = make_image(tmp_path)
    with ExitStack() as held:
        attacher = held.enter_context(either.attacher(inside))
        second = held.enter_context(ExitStack())
        jobs = []
        for name, stack in (("first", held), ("second", second)):
            stack.enter_context(overlay(tmp_path / name, tmp_path / "image"))
            jobs.append(stack.enter_context(runc(tmp_path / name, inside)))
            pids = pids_of(inside, CONFIG.ranks)
            scan_twice(attacher, pids)
            if name == "first":
                jobs[0].release()
                jobs[0].finish()
        for _ in range(12):  # longer than what a library is kept for
            attacher.scan()
        records = watch(either, registry_of(attacher), jobs[1:], CONFIG.ranks)
        check_counts(records, pids, jobs[1:])
        for _ in range(12):
            attacher.scan()
        assert not attacher.libraries
