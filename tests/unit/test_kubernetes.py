"""Pods, owners and devices from real servers, kept, asked again; and whatever else answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.agent import kubelet, pod_list, pods
from lanterne.agent.errors import AgentError, KubernetesError
from lanterne.agent.kubernetes import Kubernetes, connect
from lanterne.agent.nvml import GpuReading
from lanterne.agent.places import Places
from lanterne.agent.pods import Account, Endpoint
from lanterne.agent.workload import choose
from tests.fixtures.kubernetes_fakes import (
    ApiServer,
    Kubelet,
    authority,
    pod,
    pod_resources,
)
from tests.fixtures.kubernetes_fakes import (
    pod_list as listed,
)

UID = "8dbc0f5a-3f39-4d0c-9d0e-6f1f8c1a2b3c"
C1 = "a1" * 32
GPU, MIG = "GPU-5f9c", "MIG-77aa"


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def account(tmp_path: Path, certificates: tuple[Path, Path, Path]) -> Account:
    (tmp_path / "token").write_text("secret\n")
    return Account(tmp_path / "token", certificates[0])


@pytest.fixture
def server(certificates: tuple[Path, Path, Path]) -> Iterator[ApiServer]:
    with ApiServer(
        [pod("train-0", UID, owner=("PyTorchJob", "train"), containers={"main": C1})],
        cert=certificates[1],
        key=certificates[2],
    ) as running:
        yield running


def api(server: ApiServer) -> Endpoint:
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    return pods.endpoints("demo", "", environ)[0]


# -- lists of pods ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "labels", "found"),
    [
        (("ReplicaSet", "chat-6b8f9c7d5"), {"pod-template-hash": "6b8f9c7d5"},
         ("Deployment", "chat")),
        (("ReplicaSet", "chat-6b8f9c7d5"), {}, ("ReplicaSet", "chat-6b8f9c7d5")),
        (("ReplicaSet", "chat"), {"pod-template-hash": "6b8f9c7d5"}, ("ReplicaSet", "chat")),
        (("Job", "bench-29012345"), {}, ("Job", "bench-29012345")),
        (("StatefulSet", "store"), {}, ("StatefulSet", "store")),
        (("PyTorchJob", "train"), {"training.kubeflow.org/job-name": "train",
         "training.kubeflow.org/operator-name": "pytorchjob-controller"}, ("PyTorchJob", "train")),
        (("Job", "hpl-launcher"), {"training.kubeflow.org/job-name": "hpl",
         "training.kubeflow.org/operator-name": "mpi-operator"}, ("MPIJob", "hpl")),
        (("StatefulSet", "r1-0"), {"leaderworkerset.sigs.k8s.io/name": "r1"},
         ("LeaderWorkerSet", "r1")),
        (("Job", "big-workers-0"), {"jobset.sigs.k8s.io/jobset-name": "big"}, ("JobSet", "big")),
        (("RayCluster", "tune-x7k2p"), {"ray.io/cluster": "tune-x7k2p"},
         ("RayCluster", "tune-x7k2p")),
        (("RayCluster", "tune-x7k2p"), {"ray.io/originated-from-cr-name": "tune",
         "ray.io/originated-from-crd": "RayJob"}, ("RayJob", "tune")),
        (("RayJob", "tune"), {}, ("RayJob", "tune")),
        (("Node", "gpu-1"), {}, ("Pod", "p")),
        (None, {}, ("Pod", "p")),
        (("Kind with spaces", "x\nlanterne"), {}, ("Pod", "x?lanterne")),
    ],
)  # fmt: skip
def test_who_owns_a_pod(owner: Any, labels: dict[str, str], found: tuple[str, str]) -> None:
    parsed = pod_list.parse(listed([pod("p", UID, owner=owner, labels=labels)]), "demo")
    assert (parsed[UID].owner_kind, parsed[UID].owner) == found


def test_only_pods_of_the_own_node_and_containers_by_their_id() -> None:
    found = pod_list.parse(
        listed([pod("a", "1", containers={"main": C1}), pod("b", "2", node="another")]), "demo"
    )
    assert list(found) == ["1"]
    assert found["1"].containers == {C1: "main"}


def test_a_static_pod_goes_by_its_hash() -> None:
    text = listed([pod("etcd", UID, annotations={"kubernetes.io/config.hash": "0f" * 16})])
    assert list(pod_list.parse(text, "demo")) == ["0f" * 16]


def test_a_list_is_bounded() -> None:
    many = listed([pod(f"p{n}", str(n)) for n in range(pod_list.MAX_PODS + 5)])
    assert len(pod_list.parse(many, "demo")) == pod_list.MAX_PODS


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"null", b"{}", b'{"kind":"Status"}', b"[" * 100_000, b"\xff",
    b'{"kind":"PodList","items":' + b"[" * 100_000, b'{"kind":"PodList","items":3}',
    b'{"kind":"PodList","items":[{"metadata":{"uid":7}}]}',
])  # fmt: skip
def test_another_answer_is_refused(text: bytes) -> None:
    with pytest.raises(KubernetesError):
        pod_list.parse(text, "demo")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=20) | st.sampled_from(["demo", UID, "ReplicaSet"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["metadata", "spec", "status", "name", "uid", "labels", "ownerReferences", "nodeName",
         "containerStatuses", "containerID", "controller", "kind", "annotations"]), inner),
    max_leaves=30,
)  # fmt: skip


@given(st.binary(max_size=200) | _VALUES.map(
    lambda items: json.dumps({"kind": "PodList", "items": items}).encode()))  # fmt: skip
def test_any_list_is_parsed_or_refused(text: bytes) -> None:
    try:
        found = pod_list.parse(text, "demo")
    except KubernetesError:
        return
    for one in found.values():
        assert one.name.isprintable()
        assert one.owner.isprintable()
        assert max(map(len, (one.name, one.namespace, one.owner))) <= pod_list.MAX_NAME


# -- the API server and the kubelet -------------------------------------------------------------


def test_pods_over_tls_with_the_token_of_now(server: ApiServer, account: Account) -> None:
    found = pods.ask(api(server), account, "demo")
    assert found[UID].owner_kind == "PyTorchJob"
    assert server.asked == ["/api/v1/pods?fieldSelector=spec.nodeName%3Ddemo&resourceVersion=0"]
    server.token = "renewed"
    with pytest.raises(KubernetesError, match="401: the token is not accepted"):
        pods.ask(api(server), account, "demo")
    account.token.write_text("renewed")
    assert pods.ask(api(server), account, "demo") == found


def test_a_server_of_another_authority_gets_no_token(
    server: ApiServer, account: Account, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    stranger = Account(account.token, authority(tmp_path / "other")[0])
    with pytest.raises(KubernetesError, match="CERTIFICATE_VERIFY_FAILED"):
        pods.ask(api(server), stranger, "demo")
    assert server.authorizations == []


def test_the_read_only_port_gets_no_token(account: Account) -> None:
    with ApiServer([pod("a", UID)]) as plain:
        assert list(pods.ask(pods.kubelet(f"http://127.0.0.1:{plain.port}"), account, "demo")) == [
            UID
        ]
        assert (plain.asked, plain.authorizations) == (["/pods"], [""])


def test_errors_name_the_remedy(server: ApiServer, account: Account) -> None:
    server.status = 403
    with pytest.raises(KubernetesError, match="may not list pods"):
        pods.ask(api(server), account, "demo")
    account.token.unlink()
    with pytest.raises(KubernetesError, match="token: No such file"):
        pods.ask(api(server), account, "demo")
    account.token.write_text("two words")
    with pytest.raises(KubernetesError, match="holds no token"):
        pods.ask(api(server), account, "demo")


def test_a_list_without_end_is_given_up(
    server: ApiServer, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "MAX_ANSWER_BYTES", 100_000)
    server.body = b" " * 200_000
    with pytest.raises(KubernetesError, match="larger than"):
        pods.ask(api(server), account, "demo")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.7", ("10.0.0.7", 10250, True)),
        ("10.0.0.7:1234", ("10.0.0.7", 1234, True)),
        ("https://node-1.example:99", ("node-1.example", 99, True)),
        ("http://node-1", ("node-1", 10255, False)),
        ("fd00::7", ("fd00::7", 10250, True)),
        ("[fd00::7]:99", ("fd00::7", 99, True)),
    ],
)
def test_addresses_of_kubelets(address: str, found: tuple[str, int, bool]) -> None:
    one = pods.kubelet(address)
    assert (one.host, one.port, one.tls) == found


@pytest.mark.parametrize("address", ["a b", "h:99999", "ftp://h", "h/x", "", "h:p"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(KubernetesError, match="node_address"):
        pods.kubelet(address)


# -- pod-resources ------------------------------------------------------------------------------


def test_devices_from_the_real_protobuf(tmp_path: Path) -> None:
    answer = pod_resources({
        ("ml", "train-0"): {
            "main": {"nvidia.com/gpu": [GPU, "GPU-2::0", "GPU-2::1"], "rdma/hca": ["mlx5_0"]},
            "sidecar": {"rdma/hca": ["mlx5_1"]},
        },
        ("ml", "chat-0"): {"engine": {"nvidia.com/mig-1g.10gb": [MIG]}},
    })  # fmt: skip
    with Kubelet(tmp_path / "kubelet.sock", answer):
        found = kubelet.devices(tmp_path / "kubelet.sock")
    assert found == {
        ("ml", "train-0", "main"): (GPU, "GPU-2"),
        ("ml", "chat-0", "engine"): (MIG,),
    }


def test_a_kubelet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(KubernetesError, match="UNAVAILABLE"):
        kubelet.devices(tmp_path / "kubelet.sock", timeout=5)
    with Kubelet(tmp_path / "kubelet.sock", None):
        with pytest.raises(KubernetesError, match="the kubelet restarts"):
            kubelet.devices(tmp_path / "kubelet.sock")
    with Kubelet(tmp_path / "kubelet.sock", b"\xff" * 40):
        with pytest.raises(KubernetesError, match="cannot be read"):
            kubelet.devices(tmp_path / "kubelet.sock")


def test_devices_are_bounded() -> None:
    answer = pod_resources({("ml", "p"): {"main": {"nvidia.com/gpu": [
        f"GPU-{n}" for n in range(500)]}}})  # fmt: skip
    assert len(kubelet.parse(answer)["ml", "p", "main"]) == kubelet.MAX_DEVICES


_ANSWER = pod_resources({("ml", "p"): {"main": {"nvidia.com/gpu": [GPU, MIG]}}})


@given(st.binary(max_size=200) | st.tuples(
    st.integers(0, len(_ANSWER) - 1), st.integers(0, 255)).map(
        lambda cut: _ANSWER[: cut[0]] + bytes([cut[1]]) + _ANSWER[cut[0] + 1 :]))  # fmt: skip
def test_any_answer_is_parsed_or_refused(data: bytes) -> None:
    try:
        found = kubelet.parse(data)
    except KubernetesError:
        return
    assert all(uuid.isprintable() for uuids in found.values() for uuid in uuids)


# -- kept, and asked again ----------------------------------------------------------------------


def running(server: ApiServer, account: Account, socket: Path, **options: Any) -> Kubernetes:
    return Kubernetes("demo", [api(server)], account, socket, first_pause=0.05, **options)


def test_nobody_is_asked_while_no_process_lives_in_a_pod(
    server: ApiServer, account: Account, tmp_path: Path
) -> None:
    known = running(server, account, tmp_path / "none")
    before = threading.active_count()
    known.want(())
    assert threading.active_count() == before
    assert known.success is None


def test_a_pod_is_asked_for_until_it_is_there(
    server: ApiServer, account: Account, tmp_path: Path
) -> None:
    known = running(server, account, tmp_path / "none")
    try:
        known.want([UID, "later"])
        until(lambda: known.pod(UID))
        assert known.success is True  # without the socket, where it is not wanted
        until(lambda: len(server.asked) > 2)
        assert known.pod("later") is None
        version = known.version
        server.pods.append(pod("late", "later"))
        until(lambda: known.pod("later"))
        assert known.version > version
    finally:
        known.close()


def test_failures_are_counted_and_what_is_known_stays(
    server: ApiServer, account: Account, tmp_path: Path
) -> None:
    socket = tmp_path / "kubelet.sock"
    answer = pod_resources({("ml", "train-0"): {"main": {"nvidia.com/gpu": [GPU]}}})
    with Kubelet(socket, answer) as node:
        known = running(server, account, socket, refresh=0.1)
        try:
            known.want([UID])
            until(lambda: known.pod(UID) and known.devices("ml", "train-0", "main"))
            assert known.success is True
            server.status, node.answer = 500, None
            until(lambda: known.requests.get(("api", "failed"), 0) > 2)
            until(lambda: known.requests.get(("pod_resources", "failed"), 0) > 2)
            assert known.success is False
            assert known.pod(UID) is not None
            assert known.devices("ml", "train-0", "main") == (GPU,)
            server.status, node.answer = 200, answer
            until(lambda: known.success)
        finally:
            known.close()


def test_pauses_grow(account: Account, tmp_path: Path) -> None:
    """Without a server: the questions of the first second are a few, not thousands."""
    gone = Endpoint("api", "127.0.0.1", 1, "/api/v1/pods")
    known = Kubernetes("demo", [gone], account, tmp_path / "none", first_pause=0.05, refresh=60)
    try:
        known.want([UID])
        until(lambda: known.requests.get(("api", "failed"), 0) >= 2)
        pauses = [side.pause for side in known._sides if side.ok is False]
        assert pauses[0] >= 0.2
    finally:
        known.close()


def test_the_kubelet_answers_where_the_api_does_not(account: Account, tmp_path: Path) -> None:
    with ApiServer([pod("a", UID)]) as plain:
        both = [
            Endpoint("api", "127.0.0.1", 1, "/"),
            pods.kubelet(f"http://127.0.0.1:{plain.port}"),
        ]
        known = Kubernetes("demo", both, account, tmp_path / "none", first_pause=0.05)
        try:
            known.want([UID])
            until(lambda: known.pod(UID))
            assert known.requests["api", "failed"] >= 1
            assert known.requests["kubelet", "ok"] >= 1
            assert known.success is True
        finally:
            known.close()


def test_when_there_is_nobody_to_ask(account: Account) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert connect("off", "demo", "h", "/s", account, environ) is None
    assert connect("auto", "demo", "", "/s", account, {}) is None
    assert connect("auto", "demo", "h", "/s", account, {}) is not None
    assert connect("auto", "demo", "", "/s", account, environ) is not None
    alone = connect("on", "demo", "", "/s", account, {})
    assert alone is not None
    try:
        alone.want([UID])
        until(lambda: alone.success is False)
    finally:
        alone.close()
    with pytest.raises(AgentError, match="node_address"):
        connect("on", "demo", "h/x", "/s", account, {})


# -- names --------------------------------------------------------------------------------------

DEFAULTS = ("LANTERNE_WORKLOAD", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "JOB_NAME", "JOB_ID")


@pytest.mark.parametrize(
    ("environ", "facts", "name"),
    [
        ({"LANTERNE_WORKLOAD": "mine"}, {"namespace": "ml", "owner": "train"}, "mine"),
        ({}, {"namespace": "ml", "owner": "train", "slurm_job": "7"}, "ml/train"),
        ({"SLURM_JOB_ID": "9"}, {"namespace": "ml", "owner": "slurmd"}, "9"),
        ({"TORCHELASTIC_RUN_ID": "ab"}, {"namespace": "ml", "owner": "train"}, "ml/train"),
        ({"TORCHELASTIC_RUN_ID": "ab"}, {"unit": "train.service"}, "ab"),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"unit": "train.service"}, "train"),
        ({}, {"slurm_job": "7", "unit": "slurmstepd.scope"}, "7"),
        ({}, {"unit": "docker.service"}, ""),
        ({}, {"unit": "session-3.scope"}, ""),
        ({}, {"unit": "user@1000.service"}, ""),
        ({"JOB_NAME": "a\nb" + "x" * 400}, {}, "a?b" + "x" * 250),
        ({}, {}, ""),
    ],
)
def test_which_name_wins(environ: dict[str, str], facts: dict[str, str], name: str) -> None:
    assert choose(environ, DEFAULTS, **facts) == name


def test_a_run_id_that_is_configured_first_wins() -> None:
    environ = {"TORCHELASTIC_RUN_ID": "ab"}
    assert choose(environ, ["TORCHELASTIC_RUN_ID"], namespace="ml", owner="t") == "ab"


# -- places -------------------------------------------------------------------------------------


class Told:
    """What Kubernetes would say, by hand."""

    def __init__(self) -> None:
        self.version, self.wanted = 0, set[str]()
        self.pods: dict[str, pod_list.Pod] = {}
        self.gpus: tuple[str, ...] = ()

    def want(self, uids: Any) -> None:
        self.wanted = set(uids)

    def pod(self, uid: str) -> pod_list.Pod | None:
        return self.pods.get(uid)

    def devices(self, *_: str) -> tuple[str, ...]:
        return self.gpus


def process(proc: Path, pid: int, cgroup: str, environ: str = "", ticks: int = 5) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "environ").write_text(environ)
    (folder / "stat").write_text(f"{pid} (x) S 1 1 {pid} " + "0 " * 15 + f"{ticks} 0 0\n")


NODE_GPUS = [
    GpuReading(0, GPU, "0000:1b:00.0", "H100"),
    GpuReading(1, "GPU-2", "0000:2b:00.0", "H100", mig=(MIG, "MIG-2")),
]


def test_places_join_cgroup_kubernetes_and_nvml(tmp_path: Path) -> None:
    now = [0.0]
    told = Told()
    places = Places(tmp_path, DEFAULTS, told, clock=lambda: now[0])
    process(tmp_path, 7, f"0::/kubepods/pod{UID}/{C1}\n")
    process(tmp_path, 8, "0::/system.slice/train.service\n")
    found = places.read([7, 8, 9], NODE_GPUS)
    assert told.wanted == {UID}
    assert found[7, 5].workload == ""  # not known yet, and not guessed
    assert (found[8, 5].unit, found[8, 5].workload) == ("train.service", "train")
    told.pods = {UID: pod_list.Pod("train-0", "ml", "PyTorchJob", "train", {C1: "main"})}
    told.gpus, told.version = (GPU,), 1
    one = places.read([7, 8], NODE_GPUS)[7, 5]
    assert (one.pod, one.namespace, one.container, one.owner_kind, one.owner) == (
        "train-0", "ml", "main", "PyTorchJob", "train")  # fmt: skip
    assert (one.workload, one.gpu_bus_id, one.mig) == ("ml/train", "0000:1b:00.0", "")
    for gpus, bus_id, mig in (
        ((MIG,), "0000:2b:00.0", MIG),
        ((MIG, "MIG-2"), "0000:2b:00.0", ""),
        ((GPU, "GPU-2"), "", ""),
        (("GPU-of-another-node",), "", ""),
        ((), "", ""),
    ):
        told.gpus, told.version = gpus, told.version + 1
        one = places.read([7], NODE_GPUS)[7, 5]
        assert (one.gpu_bus_id, one.mig) == (bus_id, mig)


def test_a_process_that_is_moved_is_read_again_and_one_that_ended_is_kept_a_while(
    tmp_path: Path,
) -> None:
    now = [0.0]
    places = Places(tmp_path, DEFAULTS, None, clock=lambda: now[0])
    process(tmp_path, 7, "0::/\n", "SLURM_JOB_ID=12\0")
    assert places.read([7], [])[7, 5].slurm_job == "12"
    process(tmp_path, 7, "0::/system.slice/slurmstepd.scope/job_12/step_3/user\n")
    now[0] = 6.0
    assert places.read([7], [])[7, 5].slurm_step == "3"
    process(tmp_path, 7, "0::/\n", "LANTERNE_WORKLOAD=new\0", ticks=6)  # the pid used again
    found = places.read([7], [])
    assert found[7, 5].slurm_step == "3"
    assert found[7, 6].workload == "new"
    now[0] = 70.0
    assert set(places.read([7], [])) == {(7, 6)}
