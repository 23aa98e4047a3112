"""`helm install` with no values, its pods as local processes: same arguments, mounts, privileges.

What a cluster would do: the containers' images are this tree, the node is this machine, and the
names of the services are in /etc/hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="make test-helm has Helm's engine")

from tests.helm.chart import NAMESPACE, ROOT, Object, environment, render, the

pytestmark = [
    pytest.mark.helm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        ROOT.is_relative_to("/tmp"), reason="the pods' own /tmp hides this tree: move it elsewhere"
    ),
]

NODE = "gpu-17"
FIELDS = {"spec.nodeName": NODE, "status.hostIP": "127.0.0.1"}
VENV = ROOT / ".venv"
KINDS = {"StatefulSet": "lanterne-collector", "DaemonSet": "lanterne-agent"}
# This machine has other jobs; a node's agent would look at those, too.
ONLY = {"name": "LANTERNE_AGENT_PROBES_INCLUDE", "value": f"{ROOT}/build/rig/*"}


def wait_for(condition: Callable[[], Any], timeout: float, what: Callable[[], str]) -> Any:
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, what()
        time.sleep(0.3)
    return value


@dataclass
class Cluster:
    """A network namespace with the pods of one release in it."""

    folder: Path
    objects: list[Object]
    holder: subprocess.Popen[bytes]
    pods: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def inside(self, *command: str | Path) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-n", *map(str, command)]

    def page(self, port: int, path: str) -> tuple[int, str]:
        """-> HTTP status (0: no answer), body."""
        program = (
            "import sys, urllib.request as u, urllib.error as e\n"
            "try: r = u.urlopen(sys.argv[1], timeout=9)\n"
            "except e.HTTPError as error: r = error\n"
            "except OSError: sys.exit(0)\n"
            "print(r.status); print(r.read().decode())"
        )
        done = subprocess.run(
            self.inside(VENV / "bin/python", "-c", program, f"http://127.0.0.1:{port}{path}"),
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        status, _, body = done.stdout.partition("\n")
        return int(status or 0), body

    def log(self, kind: str) -> str:
        return (self.folder / f"{kind}.log").read_text(errors="replace")

    def container(self, kind: str) -> Object:
        (found,) = the(self.objects, kind)["spec"]["template"]["spec"]["containers"]
        return dict(found)

    def probe(self, kind: str, name: str) -> tuple[int, str]:
        part = self.container(kind)
        asked = part[name]["httpGet"]
        (port,) = (p["containerPort"] for p in part["ports"] if p["name"] == asked["port"])
        return self.page(port, asked["path"])

    def start(self, kind: str) -> None:
        pod = the(self.objects, kind)["spec"]["template"]["spec"]
        part = self.container(kind)
        program = KINDS[kind]
        own = part["securityContext"]
        env = environment(part, FIELDS)
        if kind == "DaemonSet":
            env[ONLY["name"]] = ONLY["value"]
        homes = [p for p in Path(os.path.realpath(VENV / "bin/python")).parents if not _open(p)]
        spec = {
            "folder": str(self.folder / kind / "root"),
            "mounts": [self._mount(kind, pod, m) for m in part["volumeMounts"]],
            "hosts": _hosts(self.objects),
            "traversable": [str(path) for path in homes],
            "read_only": own["readOnlyRootFilesystem"],
            "user": own.get("runAsUser", pod.get("securityContext", {}).get("runAsUser", 0)),
            "capabilities": own["capabilities"].get("add", []),
            "env": env | {"PATH": f"{VENV}/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            "command": [str(VENV / "bin" / program), *part["args"]],
        }
        assert own["capabilities"]["drop"] == ["ALL"]
        assert own["allowPrivilegeEscalation"] is False
        path = self.folder / f"{kind}.json"
        path.write_text(json.dumps(spec))
        with (self.folder / f"{kind}.log").open("wb") as log:
            self.pods[kind] = subprocess.Popen(
                self.inside(VENV / "bin/python", Path(__file__).with_name("pod.py"), path),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _mount(self, kind: str, pod: Object, mount: Object) -> tuple[str, str | None, bool]:
        (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
        read_only = bool(mount.get("readOnly"))
        if "emptyDir" in volume:
            return mount["mountPath"], None, read_only
        made = self.folder / kind / mount["name"]
        made.mkdir(parents=True, exist_ok=True)
        if "hostPath" in volume:  # of the node; there the kubelet has made its own
            return mount["mountPath"], str(made), read_only
        for name, text in the(self.objects, "ConfigMap", volume["configMap"]["name"])[
            "data"
        ].items():
            (made / name).write_text(text)
        return mount["mountPath"], str(made / mount.get("subPath", "")), read_only

    def stop(self) -> dict[str, int]:
        """-> exit codes, agents first."""
        codes = {}
        for kind, process in reversed(self.pods.items()):
            process.terminate()
            try:
                codes[kind] = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.holder.kill()
        self.holder.wait()
        return codes


def _why_not() -> str:
    """Empty where an agent can work here."""
    if os.geteuid() != 0:
        return "needs root"
    done = subprocess.run(
        [VENV / "bin/lanterne-agent", "doctor"], capture_output=True, text=True, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout


def _open(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o001)


def _hosts(objects: list[Object]) -> str:
    owner = the(objects, "StatefulSet")
    name = f"{owner['metadata']['name']}-0.{owner['spec']['serviceName']}.{NAMESPACE}.svc"
    return f"127.0.0.1 localhost\n127.0.0.1 {name}\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.environ.get("LANTERNE_REQUIRE_KERNEL") != "1" and (reason := _why_not()):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pods")
    holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "ip link set lo up; exec sleep 600"])
    found = Cluster(folder, render(), holder)
    try:
        mine = Path("/proc/self/ns/net").stat().st_ino
        there = Path(f"/proc/{holder.pid}/ns/net")
        wait_for(lambda: there.stat().st_ino != mine, 20, lambda: "no network namespace")
        found.start("StatefulSet")
        found.start("DaemonSet")
        yield found
    finally:
        found.stop()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_the_probes_answer(cluster: Cluster, kind: str, probe: str) -> None:
    def fine() -> bool:
        assert cluster.pods[kind].poll() is None, cluster.log(kind)
        return cluster.probe(kind, probe)[0] == 200

    wait_for(fine, 120, lambda: f"{cluster.probe(kind, probe)}\n{cluster.log(kind)}")


@pytest.mark.parametrize("kind", KINDS)
def test_privileges_are_those_of_the_pod(cluster: Cluster, kind: str) -> None:
    text = Path(f"/proc/{cluster.pods[kind].pid}/status").read_text()
    status = {k: v.split() for k, _, v in (line.partition(":") for line in text.splitlines())}
    assert status["NoNewPrivs"] == ["1"]
    assert status["Uid"][0] == ("65532" if kind == "StatefulSet" else "0")
    count = len(cluster.container(kind)["securityContext"]["capabilities"].get("add", ()))
    assert int(status["CapBnd"][0], 16).bit_count() == count
    assert int(status["CapEff"][0], 16).bit_count() == count  # all that is given is needed


def test_the_agents_batches_arrive(cluster: Cluster) -> None:
    def nodes() -> list[str]:
        status, body = cluster.page(9478, "/api/v1/nodes")
        return [n["name"] for n in json.loads(body)["nodes"]] if status == 200 else []

    def told() -> str:
        return f"{cluster.page(9478, '/api/v1/nodes')}\n{cluster.log('DaemonSet')}"

    wait_for(lambda: NODE in nodes(), 60, told)


def test_a_slow_rank_is_named(cluster: Cluster) -> None:
    job = subprocess.Popen(
        [VENV / "bin/python", "-m", "tests.rig.held"],
        cwd=ROOT, env=os.environ | {"LANTERNE_WORKLOAD": "pods"},
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        attached = 'lanterne_agent_libraries{kind="nccl",state="attached"} 1'
        wait_for(
            lambda: attached in cluster.page(9477, "/metrics")[1],
            60,
            lambda: cluster.log("DaemonSet"),
        )
        assert job.stdin is not None
        job.stdin.write(b"go\n")
        job.stdin.flush()

        def named() -> set[int]:
            assert job.poll() is None
            status, body = cluster.page(9478, "/api/v1/stragglers")
            rows = json.loads(body)["rows"] if status == 200 else []
            return {r["rank"] for r in rows if r["straggler"] and r["workload"] == "pods"}

        told = wait_for(named, 100, lambda: cluster.log("DaemonSet") + cluster.log("StatefulSet"))
        assert told == {2}
    finally:
        job.communicate()  # what it has started it ends, when its input ends


def test_both_end_when_asked(cluster: Cluster) -> None:
    """Last: within the grace period, and with a good conscience."""
    assert cluster.stop() == {"DaemonSet": 0, "StatefulSet": 0}, cluster.log("DaemonSet")
