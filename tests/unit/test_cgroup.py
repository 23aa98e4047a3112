"""Lines of /proc/PID/cgroup as runtimes and drivers leave them, and whatever else may be there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.agent.cgroup import MAX_PARTS, Ids, ids_of, parse

UID = "8dbc0f5a-3f39-4d0c-9d0e-6f1f8c1a2b3c"
OTHER = "11111111-2222-3333-4444-555555555555"
UNDER = UID.replace("-", "_")
STATIC = "0f3a1c5b7d9e2f4061728394a5b6c7d8"
C1, C2 = "a1" * 32, "b2" * 32
POD = Ids(pod=UID, container=C1)

SYSTEMD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
USER = "user.slice/user-1000.slice/user@1000.service"
IN_KIND = "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"
CGROUPFS = f"/kubepods/burstable/pod{UID}"
PODS = {
    "v2 systemd containerd": f"0::{SYSTEMD}{UNDER}.slice/cri-containerd-{C1}.scope",
    "v2 systemd crio": f"0::{SYSTEMD}{UNDER}.slice/crio-{C1}.scope/container",
    "v2 systemd docker": f"0::{SYSTEMD}{UNDER}.slice/docker-{C1}.scope",
    "v2 systemd guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{UNDER}.slice/cri-containerd-{C1}.scope"
    ),
    "v2 cgroupfs": f"0::{CGROUPFS}/{C1}",
    "v2 cgroupfs crio": f"0::{CGROUPFS}/crio-{C1}",
    "v2 cgroupfs guaranteed": f"0::/kubepods/pod{UID}/{C1}",
    "v1 cgroupfs": (
        f"12:memory:{CGROUPFS}/{C1}\n1:name=systemd:{CGROUPFS}/{C1}\n"
        "0::/system.slice/containerd.service"
    ),
    "v1 systemd": f"11:cpu,cpuacct:/kubepods.slice/kubepods-pod{UNDER}.slice/docker-{C1}.scope",
    "containerd told of systemd, running cgroupfs": (
        "9:pids:/system.slice/containerd.service/"
        f"kubepods-burstable-pod{UNDER}.slice:cri-containerd:{C1}"
    ),
    "kind": f"0::/docker/{C2}/kubelet/kubepods/burstable/pod{UID}/{C1}",
    "kind, systemd": (
        f"0::/system.slice/docker-{C2}.scope/{IN_KIND}/"
        f"kubelet-kubepods-burstable-pod{UNDER}.slice/cri-containerd-{C1}.scope"
    ),
    "from another cgroup namespace": (
        f"0::/../../kubepods-burstable-pod{UNDER}.slice/cri-containerd-{C1}.scope"
    ),
    "from another cgroup namespace, cgroupfs": f"0::/../../pod{UID}/{C1}",
    "a cgroup of its own inside": f"0::/kubepods/pod{UID}/{C1}/init/{C2}",
    "removed": f"0::/kubepods/pod{UID}/{C1} (deleted)",
    "a pod in a pod": f"0::/kubepods/pod{UID}/{C1}/kubepods/pod{OTHER}/{C2}",
}


@pytest.mark.parametrize("text", PODS.values(), ids=PODS.keys())
def test_pods(text: str) -> None:
    assert parse(f"{text}\n".encode()) == POD


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (f"0::/kubepods.slice/kubepods-pod{STATIC}.slice/crio-{C1}.scope", Ids(STATIC, C1)),
        (f"0::/kubepods/pod{UID}", Ids(UID)),  # the pod's own, as its sandbox starts
        (f"0::/kubepods/pod{UID}/crio-conmon-{C1}", Ids(UID)),
        (f"0::/docker/{C1}", Ids(container=C1)),
        (f"0::/system.slice/docker-{C1}.scope", Ids(container=C1, unit=f"docker-{C1}.scope")),
        (f"0::/machine.slice/libpod-{C1}.scope/container",
         Ids(container=C1, unit=f"libpod-{C1}.scope")),
        (f"0::/default/{C1}", Ids(container=C1)),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0",
         Ids(slurm_job="123", slurm_step="0", unit="slurmstepd.scope")),
        ("0::/system.slice/gpu-7_slurmstepd.scope/job_9/step_batch/user/task_special",
         Ids(slurm_job="9", slurm_step="batch", unit="gpu-7_slurmstepd.scope")),
        ("0::/system.slice/slurmstepd.scope/system", Ids(unit="slurmstepd.scope")),
        ("0::/../slurmstepd.scope/job_4/step_extern",
         Ids(slurm_job="4", slurm_step="extern", unit="slurmstepd.scope")),
        ("5:cpuset:/slurm/uid_1000/job_280678/step_interactive/task_0\n0::/",
         Ids(slurm_job="280678", slurm_step="interactive")),
        ("5:devices:/slurm_gpu-7/uid_0/job_4/step_0\n1:name=systemd:/system.slice/slurmd.service",
         Ids(slurm_job="4", slurm_step="0")),
        ("5:devices:/slurm/job_4/step_0", Ids()),
        ("0::/system.slice/train@7.service", Ids(unit="train@7.service")),
        ("0::/system.slice/system-train.slice/train@7.service/sub",
         Ids(unit="train@7.service")),
        ("0::/user.slice/user-1000.slice/session-3.scope", Ids(unit="session-3.scope")),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/train.service",
         Ids(unit="train.service")),
        ("0::/user.slice/user-1000.slice/user@1000.service", Ids(unit="user@1000.service")),
        ("0::/init.scope", Ids(unit="init.scope")),
        ("0::/", Ids()),
        ("", Ids()),
    ],
)  # fmt: skip
def test_others(text: str, ids: Ids) -> None:
    assert parse(text.encode()) == ids


@pytest.mark.parametrize(
    "path",
    [
        # Whoever owns a user manager names the cgroups below it.
        f"/{USER}{SYSTEMD}{UNDER}.slice/cri-containerd-{C1}.scope",
        f"/{USER}/slurmstepd.scope/job_5/step_0",
        f"/../{USER}/kubepods/pod{UID}/{C1}",
        f"/elsewhere/pod{UID}/x",  # not below any kubepods
        f"/kubepods/pod{UID[:-1]}/{C1[:-1]}",
        f"/kubepods/pod{UID.upper()}/x",
        f"/kubepods/podman-{UID}/x",
    ],
)
def test_what_only_looks_like_one(path: str) -> None:
    ids = ids_of(path)
    assert (ids.pod, ids.slurm_job, ids.container) == ("", "", "")


def test_bounds() -> None:
    deep = "/a" * MAX_PARTS
    assert ids_of(f"{deep}/kubepods/pod{UID}/{C1}").pod == ""
    assert parse(f"0::/{'x' * 5000}/kubepods/pod{UID}/{C1}".encode()).pod == ""
    lines = "".join(f"{n}:c{n}:/\n" for n in range(80)) + f"0::/kubepods/pod{UID}/{C1}\n"
    assert parse(lines.encode()).pod == ""


_PIECES = st.sampled_from([
    "/", "..", ":", "\n", "0::", "pod", UID, UNDER, STATIC, C1, ".slice", ".scope", ".service",
    "kubepods", "-", "_", "slurm", "uid_1", "job_", "step_", "slurmstepd.scope", "user@1.service",
    "user.slice", "system.slice", "7", "\0", "é", "crio-", ":cri-containerd:",
])  # fmt: skip


@given(st.one_of(st.binary(max_size=400), st.lists(_PIECES, max_size=60).map(
    lambda parts: "".join(parts).encode())))  # fmt: skip
def test_anything_is_read_without_complaint(text: bytes) -> None:
    ids = parse(text)
    for value in (ids.pod, ids.container, ids.slurm_job, ids.slurm_step, ids.unit):
        assert len(value) <= 256
        assert value.isascii()
        assert value == "" or value.isprintable()
    if ids.pod:
        assert set(ids.pod) <= set("0123456789abcdef-")
    if ids.slurm_job:
        assert ids.slurm_job.isdigit()
