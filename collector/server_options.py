"""What the gRPC server allows a connection: sizes, times and numbers, as channel arguments."""

from __future__ import annotations

FRAME_OVERHEAD = 64 << 10
# What agents send at most.
AGENT_BATCH_BYTES = 8 << 20
# Taken beyond what a batch may have: decode refuses such a one by name, counts it, and the stream
# goes on. What is larger still ends the stream; gRPC tells the sender both sizes, and us nothing:
# here that looks like any connection that broke.
SEEN_BYTES = 8 << 20
HANDSHAKE_SECONDS = 10.0  # from connecting to the first words of HTTP/2
IDLE_SECONDS = 60.0  # of a connection without a stream


def server_options(
    *, batch_bytes: int, connections: int, keepalive_seconds: float, min_ping_seconds: float
) -> list[tuple[str, int]]:
    """min_ping_seconds: agents may ping this often; more often costs them the connection."""
    largest = max(batch_bytes, AGENT_BATCH_BYTES)
    return [
        ("grpc.max_receive_message_length", largest + SEEN_BYTES + FRAME_OVERHEAD),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
        ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(min_ping_seconds * 1000)),
        ("grpc.http2.max_ping_strikes", 2),
        # Without this a second collector would silently share the port.
        ("grpc.so_reuseport", 0),
    ]
