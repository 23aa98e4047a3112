"""Stands in for the collector: takes an agent's batches and appends each as one line of JSON.

start.py sink OUTPUT        prints its port first
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from tests.gpu.process import serve

COLUMNS = {
    "communicator": "<u4", "op": "u1", "role": "u1", "evidence": "u1", "count": "<u8",
    "errors": "<u8", "duration_sum_ns": "<u8", "duration_min_ns": "<u8", "duration_max_ns": "<u8",
}  # fmt: skip
EVIDENCE = ("order", "device", "blocking", "enqueue")


def line_of(batch: Any) -> dict[str, Any]:
    import numpy as np
    from google.protobuf.json_format import MessageToDict

    from lanterne.probes.layout import Func

    columns = {
        name: np.frombuffer(getattr(batch.summaries, name), dtype).tolist()
        for name, dtype in COLUMNS.items()
    }
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]  # noqa: B905 (Python 3.10)
    for row in rows:
        row["op"], row["evidence"] = Func(row["op"]).name, EVIDENCE[row["evidence"]]

    def plain(messages: Any) -> list[dict[str, Any]]:
        return [
            {field.name: _value(value) for field, value in message.ListFields()}
            for message in messages
        ]

    def _value(value: Any) -> Any:
        if hasattr(value, "items"):
            return {str(key): item for key, item in value.items()}
        if isinstance(value, (int, float, str)):
            return value
        return plain(value) if value and hasattr(value[0], "ListFields") else list(value)

    return {
        "sequence": batch.sequence,
        "epoch": batch.epoch,
        "start_ns": batch.start_ns,
        "end_ns": batch.end_ns,
        "communicators": plain(batch.communicators),
        "summaries": rows,
        "gpus": plain(batch.gpus),
        "processes": plain(batch.processes),
        "health": MessageToDict(batch.health, preserving_proto_field_name=True),
    }


class Receiver:
    def __init__(self, output: Path) -> None:
        self._output = output

    def report(self, frames: Iterator[Any], _: object) -> Iterator[Any]:
        from lanterne.proto import telemetry_pb2 as pb

        for frame in frames:
            received = time.monotonic_ns()
            ack = pb.Ack(status=pb.STATUS_ACCEPTED, frame_sent_ns=frame.sent_ns, stride=1,
                         collector_received_ns=received)  # fmt: skip
            if frame.batch:
                batch = pb.Batch.FromString(frame.batch)
                ack.epoch, ack.sequence = batch.epoch, batch.sequence
                with self._output.open("a") as out:
                    out.write(json.dumps(line_of(batch)) + "\n")
            ack.collector_sent_ns = time.monotonic_ns()
            yield ack


def main(arguments: list[str]) -> int:
    import grpc

    from lanterne.proto import telemetry_pb2 as pb

    server = grpc.server(futures.ThreadPoolExecutor(8))
    handler = grpc.stream_stream_rpc_method_handler(
        Receiver(Path(arguments[0])).report,
        request_deserializer=pb.Frame.FromString,
        response_serializer=pb.Ack.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("lanterne.v1.Telemetry", {"Report": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        return serve({"port": port}, {})
    finally:
        server.stop(0.5).wait()
