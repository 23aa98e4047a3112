"""What a running agent consists of, and how the configuration makes some of it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lanterne.agent.comms import Registry
from lanterne.agent.config import AgentConfig
from lanterne.agent.credentials import Credentials, Files
from lanterne.agent.engines import Endpoint
from lanterne.agent.errors import AgentError
from lanterne.agent.expert_files import Watched
from lanterne.agent.expert_sources import ExpertSources, Settings
from lanterne.agent.keeper import Keeper
from lanterne.agent.kubernetes import Kubernetes, connect
from lanterne.agent.outbox import Outbox
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.places import Places
from lanterne.agent.plugin_memory import PluginMemory
from lanterne.agent.pods import Account
from lanterne.agent.process import printable
from lanterne.agent.ras import Ras
from lanterne.agent.sources import Sources
from lanterne.agent.spool import Spool
from lanterne.agent.stream import Stream

if TYPE_CHECKING:
    from lanterne.agent.uprobes import Uprobes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What is read from once a window; None where it is switched off or does not work."""

    uprobes: Uprobes | None
    registry: Registry
    pipeline: Pipeline
    plugin_memory: PluginMemory
    sources: Sources
    kubernetes: Kubernetes | None
    places: Places
    ras: Ras | None
    experts: ExpertSources
    keeper: Keeper | None
    stream: Stream
    success: dict[str, bool]  # by source: whether the last reading succeeded


def keeper(config: AgentConfig, outbox: Outbox) -> Keeper | None:
    if not config.spool.path:
        return None
    spool = Spool(Path(config.spool.path), config.spool.max_bytes)
    return Keeper(spool, outbox, config.spool.sync_seconds)


def cluster(config: AgentConfig, success: dict[str, bool]) -> Kubernetes | None:
    c = config.kubernetes
    account = Account(Path(c.token_file), Path(c.ca_file))
    try:
        return connect(
            c.enabled, config.node.name, c.node_address, c.pod_resources_socket, account, os.environ
        )
    except AgentError as error:
        success["kubernetes"] = False
        log.warning("no names from Kubernetes", extra={"reason": str(error)})
        return None


def credentials(config: AgentConfig) -> Credentials:
    tls = config.tls
    token = config.collector.token_file
    if token and not tls.ca:
        log.warning("the token goes over the network in plain text: set tls.ca")
    return Credentials(Files(tls.ca, tls.cert, tls.key, token, tls.server_name))


def expert_settings(config: AgentConfig) -> Settings:
    c = config.experts
    return Settings(
        socket=c.socket,
        listen=c.listen,
        max_body_bytes=c.max_body_bytes,
        max_per_second=c.max_per_second,
        poll_seconds=c.poll_seconds,
        engines=[Endpoint(e.address, e.kind, e.workload) for e in c.engines],
        files=[Watched(Path(f.path), f.kind, f.workload, f.model, f.ranks) for f in c.files],
    )


def gloo_probes() -> tuple[int, ...]:
    """Ids of the catalog rows of Gloo functions."""
    try:
        from lanterne.probes import catalog
    except ImportError:
        return ()
    return tuple(row.id for row in catalog.ROWS if "gloo" in str(row.library))


def boot_id(proc: Path) -> str:
    try:
        return printable((proc / "sys/kernel/random/boot_id").read_text().strip(), 64)
    except OSError:
        return ""
