"""What agents are told, in acknowledgements, of the communicators that they met running.

The analysis finds it (analyse.origins) and says for each node what has changed. On each stream all
that holds is told once, then again whenever it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lanterne.proto import telemetry_pb2 as pb


class Origins:
    """`take` in one thread, `add` in another."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, pb.Origins]] = {}  # by node, with a number for each change
        self._changes = 0

    def take(self, news: Mapping[str, tuple[Any, ...]]) -> None:
        """news: by node, the columns of the message in their order."""
        for node, (epoch, rows, comm_hash, rank, lane, offset, whole) in news.items():
            self._changes += 1
            message = pb.Origins(
                epoch=epoch,
                rows=rows,
                comm_hash=comm_hash,
                rank=rank,
                lane=lane,
                offset=offset,
                whole=whole,
            )
            self._of[node] = self._changes, message

    def add(self, ack: pb.Ack, node: str, told: dict[str, int]) -> None:
        """Fill in what this stream has not been told; `told`: what it has, by node."""
        change, message = self._of.get(node, (0, None))
        if message is not None and told.get(node) != change:
            told[node] = change
            ack.origins.CopyFrom(message)
