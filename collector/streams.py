"""The open streams of agents: frames are read, answered in order, and each stream ends in time.

By read and write of gRPC's context, not by generators: those cost half as much again. In the event
loop's thread only, but for `connected`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from lanterne.collector.admission import Peer
from lanterne.collector.answers import Answers, Disk
from lanterne.collector.frames import Frames
from lanterne.collector.ingest_config import IngestConfig
from lanterne.collector.origins import Origins
from lanterne.proto import telemetry_pb2 as pb

END_WITHIN_SECONDS = 5.0  # of trust withdrawn; spread, so that agents do not all come at once


class Streams:
    """serve(context, peer) for each; all are given before the first one opens."""

    def __init__(
        self,
        frames: Frames,
        config: IngestConfig,
        *,
        stride: Callable[[], int],
        trust: Callable[[], Hashable],
        end: object,
    ) -> None:
        """stride: what to ask of the agents in the next Ack. trust: changes with whom we trust.
        end: what a context's `read` gives at the end.
        """
        self._frames = frames
        self._config = config
        self._stride = stride
        self._trust = trust
        self._end = end
        self._open: Counter[str] = Counter()  # by node
        self.disk = Disk()
        self.origins = Origins()  # to be told to the agents

    def connected(self) -> frozenset[str]:
        """Nodes with an open stream. Any thread."""
        return frozenset(n for n, streams in list(self._open.items()) if streams > 0)

    async def serve(self, context: Any, peer: Peer) -> None:
        """Until the agent half-closes, or it is time to look at it anew: it comes again then, with
        what was not answered. Raises StreamRefused."""
        nodes: set[str] = set()  # one for an agent's own stream, many for a relay's
        answers = Answers(self.disk, self._sender(context), self._frames.unkept)
        try:
            await self._read(context, peer, nodes, answers)
            await answers.all()
        finally:
            answers.close()
            for node in nodes:
                self._open[node] -= 1
                if self._open[node] <= 0:
                    del self._open[node]

    def _sender(self, context: Any) -> Callable[[pb.Ack, int], Any]:
        async def send(ack: pb.Ack, received_ns: int) -> None:
            ack.collector_received_ns = received_ns
            ack.stride = max(1, self._stride())
            # As late as can be: what passes between the two is taken off the round trip.
            ack.collector_sent_ns = time.monotonic_ns()
            await context.write(ack)

        return send

    async def _read(self, context: Any, peer: Peer, nodes: set[str], answers: Answers) -> None:
        told: dict[str, int] = {}  # of the origins, on this stream
        trust = self._trust()
        end_ns = time.monotonic_ns() + _spread_ns(self._config.stream_seconds)
        while (data := await context.read()) is not self._end:
            received_ns = time.monotonic_ns()
            node, ack, position = self._frames.answer(data, received_ns, peer)
            if node and node not in nodes and len(nodes) < self._config.nodes:
                nodes.add(node)
                self._open[node] += 1
            if node:
                self.origins.add(ack, node, told)
            await answers.give(ack, received_ns, position)
            if trust != (now := self._trust()):
                trust = now
                end_ns = min(end_ns, received_ns + _spread_ns(END_WITHIN_SECONDS))
            if received_ns >= end_ns:
                return


def _spread_ns(seconds: float) -> int:
    """Between half of it and all."""
    return int(seconds * (0.5 + random.random() / 2) * 1e9)
