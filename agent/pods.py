"""Asks for the pods of this node: the API server, else the kubelet. One request, no cache.

The service account's token and authority are read anew for every request, since both rotate; the
token goes only over TLS whose certificate that authority vouches for.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from lanterne.agent import pod_list
from lanterne.agent.errors import KubernetesError
from lanterne.agent.pod_list import Pod
from lanterne.agent.process import printable

KUBELET_PORT = 10250
MAX_ANSWER_BYTES = 32 << 20
MAX_TOKEN_BYTES = 1 << 16
TIMEOUT_SECONDS = 5.0  # of each wait for the network
DEADLINE_SECONDS = 20.0  # of the whole answer
_TOKEN = re.compile(rb"[\x21-\x7e]+")
_ADDRESS = re.compile(
    r"(?:(https?)://)?(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/\[\]]+)|([0-9A-Fa-f]*:[0-9A-Fa-f:.]+))(?::(\d{1,5}))?"
)


@dataclass(frozen=True)
class Endpoint:
    """Where pods are listed: `name` is api or kubelet."""

    name: str
    host: str
    port: int
    path: str
    tls: bool = True


@dataclass(frozen=True)
class Account:
    """The service account's files."""

    token: Path
    authority: Path


def endpoints(node: str, node_address: str, environ: Mapping[str, str]) -> list[Endpoint]:
    """Those that may answer, best first. In a pod Kubernetes sets KUBERNETES_SERVICE_HOST."""
    found = []
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT")
    if host and (port or "443").isdigit():
        # From the server's cache: thousands of agents must not each ask etcd.
        query = f"fieldSelector={quote(f'spec.nodeName={node}', safe='')}&resourceVersion=0"
        found.append(Endpoint("api", host, int(port or 443), f"/api/v1/pods?{query}"))
    if node_address:
        found.append(kubelet(node_address))
    return found


def kubelet(address: str) -> Endpoint:
    """HOST[:PORT] or http(s)://HOST[:PORT]; http is the read-only port. Raises KubernetesError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[5] or 0) > 65_535:
        raise KubernetesError(
            f"kubernetes.node_address {printable(address)!r}: write HOST, HOST:PORT or "
            "http://HOST:10255"
        )
    tls = match[1] != "http"
    port = int(match[5] or (KUBELET_PORT if tls else 10255))
    return Endpoint("kubelet", match[2] or match[3] or match[4], port, "/pods", tls)


def ask(endpoint: Endpoint, account: Account, node: str) -> dict[str, Pod]:
    """Pods of the node by uid. Raises KubernetesError, which names the remedy."""
    where = f"{endpoint.name} {endpoint.host}:{endpoint.port}"
    try:
        data = _get(endpoint, account)
    except (OSError, http.client.HTTPException) as error:
        raise KubernetesError(f"{where}: {printable(str(error) or repr(error), 160)}") from None
    return pod_list.parse(data, node)


def _get(endpoint: Endpoint, account: Account) -> bytes:
    headers = {"Accept": "application/json", "User-Agent": "lanterne-agent"}
    connection: http.client.HTTPConnection
    if endpoint.tls:
        context = ssl.create_default_context(cafile=str(account.authority))
        headers["Authorization"] = f"Bearer {_token(account.token)}"
        connection = http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=TIMEOUT_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(
            endpoint.host, endpoint.port, timeout=TIMEOUT_SECONDS
        )
    try:
        connection.request("GET", endpoint.path, headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise KubernetesError(
                f"{endpoint.name} answers {answer.status}{_remedy(answer.status)}"
            )
        return _body(answer)
    finally:
        connection.close()


def _body(answer: http.client.HTTPResponse) -> bytes:
    """Whole, within bounds of size and time."""
    end = time.monotonic() + DEADLINE_SECONDS
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise KubernetesError(f"the list of pods is larger than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > end:
            raise KubernetesError(f"the list of pods took longer than {DEADLINE_SECONDS:.0f} s")
    return b"".join(parts)


def _token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise KubernetesError(f"{path}: the service account's token: {error.strerror}") from None
    if not _TOKEN.fullmatch(token):
        raise KubernetesError(f"{path} holds no token")
    return token.decode("ascii")


def _remedy(status: int) -> str:
    return {
        401: ": the token is not accepted",
        403: ": the service account may not list pods (ClusterRole: get, list on pods; for the "
        "kubelet get on nodes/proxy)",
    }.get(status, "")
