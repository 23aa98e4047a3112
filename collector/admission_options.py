"""What the ingest process is told of who may report, from the configuration. Pure."""

from __future__ import annotations

from typing import Any

from lanterne.collector.config import CollectorConfig


def admission_options(config: CollectorConfig) -> dict[str, Any]:
    """For the ingest process: who may report, and how much. Builtin values only."""
    ingest, tls = config.ingest, config.tls
    return {
        "access": {
            "cert": tls.cert,
            "key": tls.key,
            "client_ca": tls.client_ca,
            "shared_names": tls.shared_names,
            "token_file": ingest.token_file,
        },
        "rate": {
            "batches": ingest.node_batches_per_second,
            "num_bytes": float(ingest.node_bytes_per_second),
        },
        "connections": ingest.max_connections,
    }
