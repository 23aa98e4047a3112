"""Which name a process's workload gets. Pure.

| first that is there | name |
|---|---|
| configured variable of the job's environment | its value |
| Kubernetes: the pod's owner | namespace/owner |
| Slurm | number of the job |
| TORCHELASTIC_RUN_ID | its value; torchrun makes one up where nobody names the run |
| systemd | name of the service |

TORCHELASTIC_RUN_ID counts as configured where it is the first variable of the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lanterne.agent.process import printable

MAX_NAME = 253  # of an object in Kubernetes; the collector takes 256
RUN_ID = "TORCHELASTIC_RUN_ID"
UNNAMED = ("none",)  # torchrun's run id by default
# Services that others' processes live in: their name says nothing of the work.
HOSTS = frozenset(
    f"{name}.service"
    for name in (
        "atd", "containerd", "cron", "crond", "crio", "docker", "k3s", "k3s-agent", "kubelet",
        "pbs", "podman", "rke2-agent", "rke2-server", "slurmd", "snap.docker.dockerd", "ssh",
        "sshd",
    )
)  # fmt: skip


def choose(
    environ: Mapping[str, str],
    variables: Sequence[str],
    *,
    namespace: str = "",
    owner: str = "",
    slurm_job: str = "",
    unit: str = "",
) -> str:
    """ "" where nothing names it."""
    run_id = ""
    for i, variable in enumerate(variables):
        value = environ.get(variable, "").strip()
        if not value or (variable == RUN_ID and value.lower() in UNNAMED):
            continue
        if variable == RUN_ID and i:
            run_id = value
            continue
        return printable(value, MAX_NAME)
    kubernetes = f"{namespace}/{owner}" if owner else ""
    return printable(kubernetes or slurm_job or run_id or service(unit), MAX_NAME)


def service(unit: str) -> str:
    """ "train.service" -> "train"; "" of what is no service, or one that only holds others."""
    if not unit.endswith(".service") or unit in HOSTS or unit.startswith(("user@", "getty@")):
        return ""
    return unit.removesuffix(".service")
