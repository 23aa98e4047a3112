"""A Kubernetes PodList in JSON -> the pods of this node, with their owners. Pure.

The kubelet and the API server answer with the same list. Names and labels were chosen by whoever
made the pod: texts are cut and made printable, lists are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from lanterne.agent.errors import KubernetesError
from lanterne.agent.process import printable

MAX_PODS = 2048  # of one node; Kubernetes advises 110
MAX_CONTAINERS = 256  # of one pod
MAX_NAME = 253
STATIC_HASH = (
    "kubernetes.io/config.hash"  # a static pod's uid on its node; in the API it is another
)

# Label of the pod -> kind of what made it; the outermost first. The label's value is its name.
LABELS = (
    ("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),
    ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
    ("serving.kserve.io/inferenceservice", "InferenceService"),
)
# Kubeflow's operators name their jobs alike, and what the pod belongs to by the operator.
KUBEFLOW_JOB, KUBEFLOW_OPERATOR = (
    "training.kubeflow.org/job-name",
    "training.kubeflow.org/operator-name",
)
KUBEFLOW_KINDS = {
    "pytorchjob-controller": "PyTorchJob",
    "mpijob-controller": "MPIJob",
    "mpi-operator": "MPIJob",
    "tfjob-controller": "TFJob",
    "xgboostjob-controller": "XGBoostJob",
    "paddlejob-controller": "PaddleJob",
    "jaxjob-controller": "JAXJob",
}
RAY_NAME, RAY_KIND = "ray.io/originated-from-cr-name", "ray.io/originated-from-crd"
TEMPLATE_HASH = "pod-template-hash"
_HASH = re.compile(r"[0-9a-z]{1,16}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


class _Owner(msgspec.Struct):
    kind: str = ""
    name: str = ""
    controller: bool | None = None


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owners: list[_Owner] | None = msgspec.field(name="ownerReferences", default=None)


class _Spec(msgspec.Struct):
    node: str = msgspec.field(name="nodeName", default="")


class _Container(msgspec.Struct):
    name: str = ""
    id: str = msgspec.field(name="containerID", default="")


class _Status(msgspec.Struct):
    containers: list[_Container] | None = msgspec.field(name="containerStatuses", default=None)
    init: list[_Container] | None = msgspec.field(name="initContainerStatuses", default=None)
    ephemeral: list[_Container] | None = msgspec.field(
        name="ephemeralContainerStatuses", default=None
    )


class _Pod(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _PodList(msgspec.Struct):
    kind: str = ""
    items: list[_Pod] | None = None


_DECODER = msgspec.json.Decoder(_PodList)


@dataclass(frozen=True)
class Pod:
    name: str
    namespace: str
    owner_kind: str  # Deployment, Job, PyTorchJob, ...; Pod where nothing owns it
    owner: str
    containers: Mapping[str, str] = field(default_factory=dict)  # id -> name


def parse(data: bytes, node: str) -> dict[str, Pod]:
    """The pods of `node` by their uid as in cgroup paths. Raises KubernetesError."""
    try:
        answer = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise KubernetesError(f"the answer is no list of pods: {printable(str(error))}") from None
    if answer.kind != "PodList":
        raise KubernetesError(f"the answer is a {printable(answer.kind, 32)!r}, not a PodList")
    found: dict[str, Pod] = {}
    for item in answer.items or ():
        if item.spec.node != node:
            continue
        if len(found) >= MAX_PODS:
            break
        meta = item.metadata
        uid = (meta.annotations or {}).get(STATIC_HASH) or meta.uid
        if uid and meta.name:
            kind, name = owner_of(meta)
            found[uid] = Pod(
                _text(meta.name), _text(meta.namespace), kind, name, _containers(item.status)
            )
    return found


def _containers(status: _Status) -> dict[str, str]:
    """ "containerd://<id>" -> <id>."""
    every = [*(status.containers or ()), *(status.init or ()), *(status.ephemeral or ())]
    return {one.id.rpartition("/")[2]: _text(one.name) for one in every[:MAX_CONTAINERS] if one.id}


def owner_of(meta: _Metadata) -> tuple[str, str]:
    """(kind, name) of what the pod was made for."""
    labels = meta.labels or {}
    for label, kind in LABELS:
        if labels.get(label):
            return kind, _text(labels[label])
    direct = next((one for one in meta.owners or () if one.controller), None)
    if labels.get(KUBEFLOW_JOB):
        told = KUBEFLOW_KINDS.get(labels.get(KUBEFLOW_OPERATOR, ""), "")
        return told or _kind(direct), _text(labels[KUBEFLOW_JOB])
    if labels.get(RAY_NAME) and _KIND.fullmatch(labels.get(RAY_KIND, "")):
        return labels[RAY_KIND], _text(labels[RAY_NAME])
    if direct is None or direct.kind == "Node" or not direct.name:
        return "Pod", _text(meta.name)  # a node owns the static pods that it runs
    suffix = labels.get(TEMPLATE_HASH, "")
    if direct.kind == "ReplicaSet" and _HASH.fullmatch(suffix):
        bare = direct.name.removesuffix(f"-{suffix}")
        if bare and bare != direct.name:
            return "Deployment", _text(bare)
    return _kind(direct), _text(direct.name)


def _kind(owner: _Owner | None) -> str:
    return owner.kind if owner is not None and _KIND.fullmatch(owner.kind) else "Pod"


def _text(value: str) -> str:
    return printable(value, MAX_NAME)
