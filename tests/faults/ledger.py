"""A relay between agents and collector that writes down what passed: which batch was accepted.

It sees both programs from outside. An agent's answer can be lost with its connection, and a
collector can die between taking a batch and saying so; what counts is what was said, and that
nothing is accepted twice.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from lanterne.proto import telemetry_pb2 as pb

METHOD = "/lanterne.v1.Telemetry/Report"
OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

Key = tuple[str, int, int]  # node, epoch, sequence


@dataclass
class Entry:
    """One batch: what it tells, and how often it was answered in which way."""

    answers: Counter[int] = field(default_factory=Counter)  # by pb.Status
    operations: int = 0
    events_read: int = 0  # by the agent since its start; 0: the batch does not say
    events_submitted: int = 0
    events_lost: int = 0

    @property
    def delivered(self) -> bool:
        return bool(self.answers[pb.STATUS_ACCEPTED] or self.answers[pb.STATUS_DUPLICATE])


class Ledger:
    """Listens on `port` and talks to the collector at `target`. A context manager."""

    def __init__(self, target: str, *, streams: int = 16) -> None:
        self._target = target
        self._lock = threading.Lock()
        self.entries: dict[Key, Entry] = {}
        self._pool = ThreadPoolExecutor(streams)
        self._server = grpc.server(self._pool, options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._relay)
        service, _, name = METHOD[1:].partition("/")
        generic = grpc.method_handlers_generic_handler(service, {name: handler})
        self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Ledger:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown(wait=False)

    def _relay(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        passed: deque[pb.Frame] = deque()

        def outgoing() -> Iterator[bytes]:
            for data in frames:
                passed.append(pb.Frame.FromString(data))
                yield data

        with grpc.insecure_channel(self._target, options=OPTIONS) as channel:
            stub: Any = channel.stream_stream
            call: Any = stub(METHOD)(outgoing())
            context.add_callback(call.cancel)
            try:
                for answer in call:
                    self._note(passed.popleft(), pb.Ack.FromString(answer))
                    yield answer
            except grpc.RpcError as error:
                code: Any = getattr(error, "code", lambda: grpc.StatusCode.UNAVAILABLE)()
                context.abort(code, "relayed")

    def _note(self, frame: pb.Frame, ack: pb.Ack) -> None:
        if not frame.batch:
            return
        batch = pb.Batch.FromString(frame.batch)
        with self._lock:
            entry = self.entries.setdefault((batch.node, batch.epoch, batch.sequence), Entry())
            entry.answers[ack.status] += 1
            entry.operations = int(np.frombuffer(batch.summaries.count, "<u8").sum())
            if batch.HasField("health"):
                entry.events_read = batch.health.events_read
                entry.events_submitted = batch.health.events_submitted
                entry.events_lost = sum(batch.health.events_lost.values())

    # -- what it says -----------------------------------------------------------------------

    def runs(self, node: str) -> dict[int, dict[int, Entry]]:
        """Entries of each run of an agent: epoch -> sequence -> entry, both ascending."""
        found: dict[int, dict[int, Entry]] = {}
        with self._lock:
            for (name, epoch, sequence), entry in sorted(self.entries.items()):
                if name == node:
                    found.setdefault(epoch, {})[sequence] = entry
        return found

    def answered(self, status: int) -> int:
        with self._lock:
            return sum(entry.answers[status] for entry in self.entries.values())

    def accepted_twice(self) -> list[Key]:
        with self._lock:
            return [k for k, e in self.entries.items() if e.answers[pb.STATUS_ACCEPTED] > 1]

    def delivered_operations(self) -> int:
        with self._lock:
            return sum(e.operations for e in self.entries.values() if e.delivered)
