"""What the gRPC side is told at its start: bounds, who may report, how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

from lanterne.collector.admission import Access
from lanterne.collector.checks import Limits
from lanterne.collector.rates import Rate


@dataclass(frozen=True)
class IngestConfig:
    limits: Limits = default(default_factory=Limits)
    nodes: int = 8_192
    access: Access = default(default_factory=Access)
    rate: Rate = default(default_factory=Rate)
    connections: int = 16_384
    # A stream is ended then, and the agent comes again: certificate and token are looked at anew.
    stream_seconds: float = 3600.0
    keepalive_seconds: float = 30.0
    # Agents may ping this often; more often costs them the connection (ENHANCE_YOUR_CALM).
    min_ping_seconds: float = 5.0


def ingest_config(
    batch_bytes: int, nodes: int, admission: Mapping[str, Any] | None = None
) -> IngestConfig:
    """From builtin values; admission: see admission_options."""
    limits = Limits(batch_bytes=batch_bytes)
    if admission is None:
        return IngestConfig(limits=limits, nodes=nodes)
    return IngestConfig(
        limits=limits,
        nodes=nodes,
        access=Access(**admission["access"]),
        rate=Rate(**admission["rate"]),
        connections=admission["connections"],
    )
