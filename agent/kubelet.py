"""Which GPUs and MIG instances each container has: the kubelet's pod-resources socket.

gRPC over a Unix socket of this host, version 1 of the API (Kubernetes 1.20 on). Ids are those of
the device plugin; NVIDIA's are the UUIDs that NVML gives, with "::<n>" behind for a shared GPU.
"""

from __future__ import annotations

from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from lanterne.agent.errors import KubernetesError
from lanterne.agent.process import printable
from lanterne.proto import pod_resources_pb2 as pb

METHOD = "/v1.PodResourcesLister/List"
MAX_ANSWER_BYTES = 16 << 20  # the kubelet's own clients take as much
MAX_CONTAINERS = 8192
MAX_DEVICES = 64  # of one container
TIMEOUT_SECONDS = 10.0
MAX_NAME = 253

Key = tuple[str, str, str]  # namespace, pod, container


def devices(socket: Path, *, timeout: float = TIMEOUT_SECONDS) -> dict[Key, tuple[str, ...]]:
    """UUIDs by container, of containers that have any. Raises KubernetesError."""
    options = (
        ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    try:
        with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
            # As bytes: an answer that is none must not raise inside gRPC's own code.
            call = channel.unary_unary(METHOD, _same, _same)
            data: bytes = call(pb.ListRequest().SerializeToString(), timeout=timeout)
    except grpc.RpcError as error:
        raise KubernetesError(f"{socket}: {_reason(error)}") from None
    return parse(data)


def parse(data: bytes) -> dict[Key, tuple[str, ...]]:
    """An encoded ListPodResourcesResponse. Raises KubernetesError."""
    try:
        answer = pb.ListResponse.FromString(data)
    except DecodeError as error:
        raise KubernetesError(f"pod-resources: the answer cannot be read: {error}") from None
    found: dict[Key, tuple[str, ...]] = {}
    for pod in answer.pods:
        for container in pod.containers:
            ids = [uuid_of(one) for told in container.devices for one in told.device_ids]
            known = tuple(dict.fromkeys(one for one in ids if one))[:MAX_DEVICES]
            if known:
                key = (pod.namespace, pod.name, container.name)
                found[printable(key[0], MAX_NAME), printable(key[1], MAX_NAME), key[2]] = known
            if len(found) >= MAX_CONTAINERS:
                return found
    return found


def uuid_of(device: str) -> str:
    """ "GPU-<uuid>::3" -> "GPU-<uuid>"; "" of what is no GPU."""
    uuid = device.partition("::")[0]
    return printable(uuid, 96) if uuid.startswith(("GPU-", "MIG-")) else ""


def _same(data: bytes) -> bytes:
    return data


def _reason(error: grpc.RpcError) -> str:
    # grpc raises an RpcError that is a Call, too; its stubs do not say so.
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    name = code().name if code else "error"
    return f"{name}: {printable(str(details() if details else error), 160)}"
