"""How the process begins: its settings, its log, and the privileges that it gives up."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from lanterne.collector import privileges
from lanterne.collector.cli import flags
from lanterne.collector.config import ENV_CONFIG, CollectorConfig, load, split_address
from lanterne.service import log as logs
from lanterne.service.systemd import mark_priorities

log = logging.getLogger("lanterne.collector")

# What SIGHUP changes in flight (docs/operate.md); the rest takes a restart.
LIVE = frozenset(
    {
        "analysis.snapshot_seconds",
        "http.stale_after_seconds",
        "log.format",
        "log.level",
        "state.seconds",
    }
)


def load_settings(arguments: argparse.Namespace) -> CollectorConfig:
    """Raises ConfigError."""
    path = arguments.config or os.environ.get(ENV_CONFIG) or None
    return load(Path(path) if path else None, os.environ, flags(arguments))


def configure_log(config: CollectorConfig) -> None:
    logs.configure(config.log.level, config.log.format)
    mark_priorities(logging.getLogger())


def drop_privileges(config: CollectorConfig) -> None:
    """Before any thread or process is started: they inherit."""
    os.umask(0o077)  # state and recordings are for this user only
    addresses = (config.ingest.address, config.http.address)
    low = any(0 < split_address(address)[1] < 1024 for address in addresses)
    try:
        privileges.drop((privileges.CAP_NET_BIND_SERVICE,) if low else ())
    except OSError as error:
        log.warning("privileges not dropped", extra={"reason": str(error)})
