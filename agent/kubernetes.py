"""What Kubernetes says of this node's pods and their GPUs, kept, asked in a thread of its own.

Nothing is asked while no process lives in a pod. A pod that is not known yet is asked for soon, and
less and less often while it stays unknown; what is known is renewed now and then. A side that fails
is asked again after growing pauses, and what it said before stays.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from lanterne.agent import kubelet, pods
from lanterne.agent.errors import AgentError
from lanterne.agent.kubelet import Key
from lanterne.agent.pod_list import Pod
from lanterne.agent.pods import Account, Endpoint

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 1.0  # seconds; doubled up to `refresh`
MAX_WANTED = 2048


@dataclass
class _Side:
    """One of the two that are asked."""

    name: str
    ask: Callable[[], None]  # raises AgentError
    ok: bool | None = None
    due: float = 0.0
    pause: float = FIRST_PAUSE
    reason: str = ""


@dataclass(frozen=True)
class _Known:
    """Replaced as a whole, so that no reader needs a lock."""

    version: int = 0
    pods: Mapping[str, Pod] = field(default_factory=dict)
    devices: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)


def connect(
    enabled: str,
    node: str,
    node_address: str,
    socket: str,
    account: Account,
    environ: Mapping[str, str],
) -> Kubernetes | None:
    """`enabled` is auto, on or off; auto: where there is anybody to ask. Raises KubernetesError."""
    if enabled == "off":
        return None
    endpoints = pods.endpoints(node, node_address, environ)
    if enabled == "auto" and not endpoints:
        return None
    return Kubernetes(node, endpoints, account, Path(socket), socket_required=enabled == "on")


class Kubernetes:
    """`want` and the readers return at once. Start it after privileges were dropped: the thread
    begins with the first pod that is wanted."""

    def __init__(
        self,
        node: str,
        endpoints: Sequence[Endpoint],
        account: Account,
        socket: Path,
        *,
        socket_required: bool = False,
        refresh: float = 60.0,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self._node = node
        self._endpoints = tuple(endpoints)
        self._account = account
        self._socket = socket
        self._socket_required = socket_required
        self._refresh, self._first = refresh, first_pause
        self._sides = (
            _Side("pods", self._ask_pods, pause=first_pause),
            _Side("pod_resources", self._ask_devices, pause=first_pause),
        )
        self._known = _Known()
        self._wanted: frozenset[str] = frozenset()
        self._patience = first_pause
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.requests: dict[tuple[str, str], int] = {}  # (api, kubelet or pod_resources; result)

    # -- for the loop -----------------------------------------------------------------------

    def want(self, uids: Iterable[str]) -> None:
        """The pods that processes live in now."""
        wanted = frozenset(list(uids)[:MAX_WANTED])
        news = wanted - self._wanted - self._known.pods.keys()
        self._wanted = wanted
        if news:
            self._patience = self._first
            self._wake.set()
        if wanted and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kubernetes", daemon=True)
            self._thread.start()

    def pod(self, uid: str) -> Pod | None:
        return self._known.pods.get(uid)

    def devices(self, namespace: str, pod: str, container: str) -> tuple[str, ...]:
        """UUIDs of the container's GPUs and MIG instances."""
        return self._known.devices.get((namespace, pod, container), ())

    @property
    def version(self) -> int:
        """Another one whenever an answer may be another."""
        return self._known.version

    @property
    def success(self) -> bool | None:
        """Of the last questions; None before the first."""
        asked = [side.ok for side in self._sides if side.ok is not None]
        return all(asked) if asked else None

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(1.0)

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            wanted = self._wanted
            if wanted:
                self._round()
            now = time.monotonic()
            due = min(side.due for side in self._sides) if wanted else now + self._refresh
            if not self._wake.wait(max(due - now, 0.05)):
                continue
            # However many pods come: not more than one round in `first`.
            self._closing.wait(self._first)

    def _round(self) -> None:
        now = time.monotonic()
        missing = self._missing()
        for side in self._sides:
            if side.due <= now or (missing and side.ok):
                self._try(side)
        if self._missing() and self._sides[0].ok:
            soon = time.monotonic() + self._patience
            self._patience = min(2 * self._patience, self._refresh)
            for side in self._sides:
                side.due = min(side.due, soon) if side.ok else side.due

    def _missing(self) -> bool:
        return bool(self._wanted - self._known.pods.keys())

    def _try(self, side: _Side) -> None:
        try:
            side.ask()
        except AgentError as error:
            self._failed(side, str(error))
        except Exception as error:  # whatever a hostile answer can do must not end the thread
            self._failed(side, repr(error))
        else:
            if side.ok is False:
                log.info("kubernetes answers again", extra={"side": side.name})
            side.ok, side.reason, side.pause = True, "", self._first
            side.due = time.monotonic() + self._refresh

    def _failed(self, side: _Side, reason: str) -> None:
        if reason != side.reason:
            log.warning("kubernetes not asked", extra={"side": side.name, "reason": reason})
        side.ok, side.reason = False, reason
        # Half fixed, half random: the agents of a cluster lose the API server together.
        side.due = time.monotonic() + side.pause * (0.5 + random.random() / 2)
        side.pause = min(2 * side.pause, self._refresh)

    def _ask_pods(self) -> None:
        """The first endpoint that answers."""
        reasons = []
        for endpoint in self._endpoints:
            ask = partial(pods.ask, endpoint, self._account, self._node)
            try:
                found = self._counted(endpoint.name, ask)
            except AgentError as error:
                reasons.append(str(error))
                continue
            if not found:
                # The agent's own pod is on its node, where it runs in one.
                log.debug("no pod on this node", extra={"node": self._node})
            self._learn(pods=found)
            return
        raise AgentError(
            "; ".join(reasons)
            or "no API server (KUBERNETES_SERVICE_HOST) and no kubernetes.node_address to ask"
        )

    def _ask_devices(self) -> None:
        if not self._socket_required and not self._socket.exists():
            return
        self._learn(devices=self._counted("pod_resources", partial(kubelet.devices, self._socket)))

    def _counted(self, name: str, ask: Callable[[], T]) -> T:
        result = "failed"
        try:
            value = ask()
            result = "ok"
        finally:
            self.requests[name, result] = self.requests.get((name, result), 0) + 1
        return value

    def _learn(
        self,
        pods: Mapping[str, Pod] | None = None,
        devices: Mapping[Key, tuple[str, ...]] | None = None,
    ) -> None:
        old = self._known
        now_pods = old.pods if pods is None else pods
        now_devices = old.devices if devices is None else devices
        if now_pods != old.pods or now_devices != old.devices:
            self._known = _Known(old.version + 1, now_pods, now_devices)
