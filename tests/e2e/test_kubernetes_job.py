"""Ranks in real cgroups with a kubelet's names, a kubelet and an API server: labels of metrics."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fixtures.kubernetes_fakes import ApiServer, Kubelet, authority, pod, pod_resources
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

RANKS = 2


def unified() -> Path:
    """Where the version 2 hierarchy is mounted for writing; skips where it is not."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(where)
    pytest.skip("no cgroup version 2 hierarchy is mounted for writing")


class Cgroup:
    """Of one container of one pod, as the kubelet and containerd make it with systemd."""

    def __init__(self) -> None:
        self.uid, self.container = str(uuid.uuid4()), uuid.uuid4().hex * 2
        slice_name = f"kubepods-burstable-pod{self.uid.replace('-', '_')}.slice"
        top = unified() / "kubepods.slice"
        self._made = [top, top / "kubepods-burstable.slice"]
        self._made.append(self._made[-1] / slice_name)
        self._made.append(self._made[-1] / f"cri-containerd-{self.container}.scope")
        self._made[-1].mkdir(parents=True)

    def take(self, pid: int) -> None:
        (self._made[-1] / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        for folder in reversed(self._made):
            with suppress(OSError):  # somebody else's container is in the upper ones
                folder.rmdir()


@pytest.fixture
def cgroups() -> Iterator[list[Cgroup]]:
    made = [Cgroup() for _ in range(RANKS + 1)]
    yield made
    for one in made:
        wait_for(lambda one=one: one.remove() or not one._made[-1].exists(), 10, "cgroup removed")


def test_pods_name_the_workload_and_failures_cost_nothing_else(
    tmp_path: Path, cgroups: list[Cgroup]
) -> None:
    ca, cert, key = authority(tmp_path)
    socket, token = tmp_path / "kubelet.sock", tmp_path / "token"
    token.write_text("secret")
    described = [
        pod(f"train-worker-{n}", one.uid, owner=("PyTorchJob", "train"),
            containers={"pytorch": one.container})
        for n, one in enumerate(cgroups[:RANKS])
    ]  # fmt: skip
    devices = pod_resources({
        ("ml", "train-worker-0"): {"pytorch": {"nvidia.com/gpu": ["GPU-0", "GPU-1"]}},
        ("ml", "train-worker-1"): {"pytorch": {"nvidia.com/mig-1g.10gb": ["MIG-7"]}},
    })  # fmt: skip
    paths = build(dest=tmp_path / "lib")
    agent = {
        "kubernetes": {
            "enabled": "on",
            "pod_resources_socket": str(socket),
            "token_file": str(token),
            "ca_file": str(ca),
        }
    }
    with (
        ApiServer(described, cert=cert, key=key) as api,
        Kubelet(socket, devices) as kubelet,
        Stack(
            tmp_path,
            [f"{paths.root}/*"],
            agent=agent,
            env={
                "LD_LIBRARY_PATH": str(paths.root),
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": str(api.port),
            },
        ) as stack,
    ):
        stack.start()
        config = JobConfig(ranks=RANKS, ranks_per_node=RANKS, seconds=150, mode="eager", layers=1)
        with Job(config, paths=paths, hold="start") as running:
            for one, pid in zip(cgroups, running.pids, strict=False):
                one.take(pid)
            # Met from its first call on: one that is met running needs a while to be aligned.
            wait_for(
                lambda: (
                    stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2
                ),
                60,
                f"libraries attached\n{stack.logs()}",
            )
            running.release()
            running.wait_ready()
            labels_are_right(stack)
            without_kubernetes(stack, api, kubelet, paths)
        late_pod(stack, api, cgroups[RANKS], paths)


def labels_are_right(stack: Stack) -> None:
    def info() -> list[tuple[dict[str, str], float]]:
        found = stack.collector_metrics().get("lanterne_rank_info", workload="ml/train")
        return found if len({labels["rank"] for labels, _ in found}) == RANKS else []

    rows = wait_for(info, 60, f"both ranks' pods\n{stack.logs()}")
    for labels, value in rows:
        assert value == 1
        assert labels["pod"] == f"train-worker-{labels['rank']}"
        assert (labels["namespace"], labels["container"], labels["owner"], labels["node"]) == (
            "ml", "pytorch", "train", "demo")  # fmt: skip
        assert labels["gpu"] == labels["rank"]
    processes = {p["pod"]: p for p in stack.snapshot()["processes"]}
    assert {p["owner_kind"] for p in processes.values()} == {"PyTorchJob"}
    assert processes["train-worker-0"]["mig"] == ""
    assert processes["train-worker-1"]["mig"] == "MIG-7"
    assert {c["workload"] for c in stack.snapshot()["communicators"]} == {"ml/train"}
    wait_for(
        lambda: (
            {row["pod"] for row in stack.stragglers()["rows"]}
            == {"ml/train-worker-0", "ml/train-worker-1"}
        ),
        60,
        f"pods in what top shows\n{stack.stragglers()}",
    )
    assert stack.agent_metrics().total("lanterne_agent_source_success", source="kubernetes") == 1


def without_kubernetes(stack: Stack, api: ApiServer, kubelet: Kubelet, paths: RigPaths) -> None:
    """Both fail: counted, less and less often asked, and nothing else changes."""
    api.status, kubelet.answer = 500, None
    before = stack.agent_metrics().total("lanterne_agent_events_read_total")
    # Whoever is in a pod that nobody knows makes the agent ask, also between two renewals.
    stranger = Cgroup()
    try:
        config = JobConfig(ranks=1, ranks_per_node=1, seconds=40, mode="eager", layers=1)
        with Job(config, paths=paths, hold="start") as running:
            stranger.take(running.pids[0])
            running.release()
            running.wait_ready()
            wait_for(
                lambda: (
                    stack.agent_metrics().total(
                        "lanterne_agent_kubernetes_requests_total", result="failed"
                    )
                    >= 3
                ),
                60,
                f"failures counted\n{stack.logs()}",
            )
    finally:
        wait_for(lambda: stranger.remove() or not stranger._made[-1].exists(), 10, "removed")
    metrics = stack.agent_metrics()
    assert metrics.total("lanterne_agent_source_success", source="kubernetes") == 0
    assert metrics.total("lanterne_agent_source_success", source="uprobes") == 1
    assert metrics.total("lanterne_agent_events_read_total") > before
    assert len(stack.collector_metrics().get("lanterne_rank_info", workload="ml/train")) >= RANKS


def late_pod(stack: Stack, api: ApiServer, cgroup: Cgroup, paths: RigPaths) -> None:
    """A communicator that came before its pod was known gets the name when it is."""
    config = JobConfig(ranks=1, ranks_per_node=1, seconds=100, mode="eager", layers=1)
    with Job(config, paths=paths, hold="start") as running:
        cgroup.take(running.pids[0])
        running.release()
        running.wait_ready()

        pid = running.pids[0]
        wait_for(lambda: names_of(stack, pid) == {""}, 60, f"unnamed\n{stack.logs()}")
        api.pods.append(
            pod("chat-6b8f9-x2x", cgroup.uid, owner=("ReplicaSet", "chat-6b8f9"),
                labels={"pod-template-hash": "6b8f9"}, containers={"engine": cgroup.container})
        )  # fmt: skip
        api.status = 200
        wait_for(
            lambda: stack.collector_metrics().get("lanterne_rank_info", workload="ml/chat"),
            90,
            f"the name\n{stack.logs()}",
        )
        assert names_of(stack, pid) == {"ml/chat"}


def names_of(stack: Stack, pid: int) -> set[str]:
    """Workloads of the communicators of a process."""
    snapshot = stack.snapshot()
    ranks, comms = snapshot["ranks"], snapshot["communicators"]
    pairs = zip(ranks["pid"], ranks["comm"], strict=True)
    return {comms[comm]["workload"] for of, comm in pairs if of == pid}
