"""Decoding: what is valid comes out as it went in; everything else is refused, with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.checks import Limits
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.proto import telemetry_pb2 as pb

ENGINE = EngineConfig(
    cells=1 << 16, rows=1 << 12, communicators=16, members=1 << 10, processes=64, own_cells=1 << 12
)


def valid() -> pb.Batch:
    """One communicator of three ranks, two of them here; two operations."""
    u8, u32, u64 = (lambda *v, t=t: np.array(v, t).tobytes() for t in ("u1", "<u4", "<u8"))
    histogram = np.zeros((1, 48), "<u4")
    histogram[0, 20] = 4
    return pb.Batch(
        schema=1,
        node="node-1",
        epoch=5,
        sequence=9,
        boot_id="b",
        start_ns=1000,
        end_ns=2000,
        realtime_offset_ns=-5,
        stride=1,
        communicators=[
            pb.Communicator(
                comm_hash=2**64 - 1,
                library=1,
                n_ranks=3,
                rank=r,
                pid=10 + r,
                pid_start_ticks=4,
                name="ep",
                gpu_index=-1,
            )
            for r in (0, 2)
        ],
        instances=pb.Instances(
            rows=4,
            communicator=u32(0, 1, 0, 1),
            seq=u32(0, 0, 1, 1),
            lane=u8(0, 0, 1, 1),
            op=u8(4, 4, 8, 8),
            role=u8(0, 1, 2, 0),
            evidence=u8(0, 1, 2, 3),
            flags=u8(0, 1, 2, 4),
            arrival_ns=u64(1100, 1200, 1300, 1400),
            duration_ns=u64(0, 20, 30, 0),
            payload_bytes=u64(1, 2, 3, 4),
            sync_blocked_ns=u64(5, 6, 7, 8),
        ),
        summaries=pb.Summaries(
            rows=1,
            communicator=u32(1),
            op=u8(4),
            role=u8(0),
            evidence=u8(2),
            count=u64(4),
            errors=u64(1),
            payload_bytes=u64(100),
            duration_sum_ns=u64(10**7),
            duration_min_ns=u64(10**6),
            duration_max_ns=u64(10**7),
            histogram=histogram.tobytes(),
        ),
        traffic=pb.Traffic(
            rows=1,
            communicator=u32(0),
            peer=u32(2),
            sent_bytes=u64(7),
            received_bytes=u64(8),
        ),
        stages=pb.Stages(
            rows=2,
            pid=u32(10, 10),
            start_ticks=u64(4, 4),
            device=u32(0, 0),
            stage=u8(4, 9),
            whole=u8(1, 1),
            count=u64(3, 3),
            sum_ns=u64(60, 60),
            union_ns=u64(50, 50),
            span_ns=u64(0, 100),
        ),
        gpus=[pb.Gpu(index=0, uuid="GPU-1", utilization_ratio=0.5, throttle_reasons=["thermal"])],
        processes=[pb.Process(pid=10, pid_start_ticks=4, command="python", cpu_seconds=1.5)],
        health=pb.Health(
            events_read=3,
            events_lost={"ring": 2},
            source_success={"nvml": False},
            libraries_failed=["/x/libnccl.so.2: not an ELF file\x00\n" + "y" * 5000],
        ),
    )


def test_values_come_out_as_they_went_in() -> None:
    b = decode(valid().SerializeToString(), received_ns=77)
    assert (b.node, b.epoch, b.sequence, b.received_ns) == ("node-1", 5, 9, 77)
    assert (b.head.start_ns, b.head.end_ns, b.head.realtime_offset_ns) == (1000, 2000, -5)
    assert b.communicators.comm_hash == (2**64 - 1, 2**64 - 1)
    assert b.communicators.rank == (0, 2)
    assert b.instances.arrival_ns.tolist() == [1100, 1200, 1300, 1400]
    assert b.instances.duration_ns.tolist() == [0, 20, 30, 0]
    assert b.instances.lane.tolist() == [0, 0, 1, 1]
    assert b.instances.sync_blocked_ns.tolist() == [5, 6, 7, 8]
    assert b.summaries.histogram.shape == (1, 48)
    assert b.summaries.histogram[0, 20] == 4
    assert b.traffic.peer.tolist() == [2]
    assert b.stages.words.tolist() == [[10, 10], [0, 0]]
    assert b.stages.small.tolist() == [[4, 9], [1, 1]]
    assert b.stages.large.tolist() == [[4, 4], [3, 3], [60, 60], [50, 50], [0, 100]]
    assert b.head.gpus[0].values == {"utilization_ratio": 0.5}
    assert b.head.gpus[0].throttle_reasons == ("thermal",)
    assert b.head.processes[0]["cpu_seconds"] == 1.5
    assert b.head.processes[0]["launches"] == 0
    assert "rss_bytes" not in b.head.processes[0]
    assert b.head.events_lost == {"ring": 2}
    assert b.head.sources == {"nvml": False}
    assert b.head.libraries_failed[0].startswith("/x/libnccl.so.2: not an ELF file??yyy")
    assert len(b.head.libraries_failed[0]) == 256


def _set(path: str, value: object) -> Callable[[pb.Batch], None]:
    def change(b: pb.Batch) -> None:
        owner: Any = b
        *parents, field = path.split(".")
        for name in parents:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
        setattr(owner, field, value)

    return change


def _column(path: str, dtype: str, *values: int) -> Callable[[pb.Batch], None]:
    return _set(path, np.array(values, dtype).tobytes())


REFUSALS = [
    (_set("schema", 2), "schema", "schema 2"),
    (_set("node", ""), "node", "node ''"),
    (_set("node", "a" * 300), "node", "253"),
    (_set("node", 'a"b'), "node", "letters"),
    (_set("epoch", 0), "epoch", "epoch 0"),
    (_set("sequence", 0), "sequence", "sequence 0"),
    (_set("stride", 0), "stride", "stride 0"),
    (_set("strides", bytes(4)), "column", "strides has 4 bytes for 2 communicators"),
    (_column("strides", "<u4", 1, 0), "stride", "strides has values"),
    (_column("strides", "<u4", 1, 1 << 17), "stride", "strides has values"),
    (_set("start_ns", 3000), "window", "does not go forward"),
    (_set("end_ns", 1 << 63), "window", "does not go forward"),
    (_set("end_ns", 1 << 61), "window", "limit"),
    (_set("realtime_offset_ns", -(1 << 63)), "time", "realtime_offset_ns"),
    (_set("communicators.0.n_ranks", 0), "n_ranks", "n_ranks 0"),
    (_set("communicators.0.n_ranks", 65_537), "n_ranks", "65536"),
    (_set("communicators.0.rank", 3), "rank", "rank 3 of a communicator of 3"),
    (_set("communicators.0.name", "x" * 257), "text", "communicator.name"),
    (_set("communicators.0.workload", "a\nb"), "text", "communicator.workload"),
    (_set("communicators.0.pid_start_ticks", 1 << 63), "number", "pid_start_ticks"),
    (_set("instances.rows", 3), "column", "instances."),
    (_set("instances.rows", (1 << 32) - 1), "rows", "instances.rows"),
    (_set("instances.seq", b"1234567"), "column", "instances.seq is 7 bytes, not 16"),
    (_column("instances.communicator", "<u4", 0, 1, 2, 0), "index", "names 2 of 2"),
    (_column("instances.arrival_ns", "<u8", 1, 2, 3, 1 << 63), "time", "instances.arrival_ns"),
    (_column("instances.arrival_ns", "<u8", 1, 2, 3, 10**12), "time", "after the window's end"),
    (_column("instances.duration_ns", "<u8", 1, 20, 30, 0), "time", "evidence is 0 or 3"),
    (_column("instances.duration_ns", "<u8", 0, 1 << 60, 0, 0), "time", "instances.duration_ns"),
    (
        _column("instances.payload_bytes", "<u8", 0, 1 << 60, 0, 0),
        "number",
        "instances.payload_bytes",
    ),
    (_column("summaries.communicator", "<u4", 2), "index", "summaries.communicator"),
    (_column("summaries.count", "<u8", 1 << 63), "number", "summaries.count"),
    (_set("summaries.histogram", b""), "column", "summaries.histogram is 0 bytes, not 192"),
    (_column("traffic.peer", "<u4", 3), "rank", "traffic.peer 3 of a communicator of 3"),
    (_column("traffic.sent_bytes", "<u8", 1 << 60), "number", "traffic.sent_bytes"),
    (_set("stages.rows", 1 << 20), "rows", "stages.rows"),
    (_set("stages.pid", b"123"), "column", "stages.pid is 3 bytes, not 8"),
    (_column("stages.device", "<u4", 0, 1 << 16), "number", "stages.device"),
    (_column("stages.start_ticks", "<u8", 0, 1 << 62), "number", "stages.start_ticks"),
    (_column("stages.sum_ns", "<u8", 60, 1 << 60), "time", "stages.sum_ns"),
    (_column("stages.union_ns", "<u8", 61, 0), "time", "more than stages.sum_ns"),
    (_set("gpus.0.uuid", "x" * 300), "text", "gpu.uuid"),
    (_set("gpus.0.utilization_ratio", float("nan")), "number", "gpu.utilization_ratio"),
    (_set("processes.0.command", "a\x00"), "text", "process.command"),
    (_set("processes.0.cpu_seconds", float("inf")), "number", "process.cpu_seconds"),
    (lambda m: m.processes[0].cuda.add(device=-2), "number", "process.cuda.device"),
]


@pytest.mark.parametrize(("change", "code", "words"), REFUSALS)
def test_refusals_name_the_field_and_the_limit(
    change: Callable[[pb.Batch], None], code: str, words: str
) -> None:
    batch = valid()
    change(batch)
    with pytest.raises(BatchRefused, match=re.escape(words)) as refusal:
        decode(batch.SerializeToString())
    assert refusal.value.code == code


def test_size_limits() -> None:
    data = valid().SerializeToString()
    with pytest.raises(BatchRefused) as refusal:
        decode(data, limits=Limits(batch_bytes=len(data) - 1))
    assert refusal.value.code == "size"
    with pytest.raises(BatchRefused) as refusal:
        decode(data, limits=Limits(communicators=1))
    assert refusal.value.code == "communicators"
    with pytest.raises(BatchRefused) as refusal:
        decode(data, limits=Limits(processes=0))
    assert refusal.value.code == "rows"


def _try(data: bytes, engine: Engine) -> DecodedBatch | None:
    """Whatever the bytes: a batch that the engine takes, or BatchRefused."""
    refusal, batch = None, None
    try:
        batch = decode(data, received_ns=10**9)
    except BatchRefused as error:
        refusal = error
    if batch is None:
        assert refusal is not None
        assert refusal.code
        assert str(refusal)
        return None
    engine.apply(batch)
    engine.snapshot(0.0, now_ns=10**9)
    engine.snapshot(0.0, now_ns=30 * 10**9)
    return batch


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    _try(data, Engine(ENGINE))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_mutated_batches(data: st.DataObject) -> None:
    raw = bytearray(valid().SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        what = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if what == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif what == "insert":
            raw[at:at] = data.draw(st.binary(max_size=12))
        elif len(raw) > 20:
            del raw[at : at + data.draw(st.integers(1, 12))]
    _try(bytes(raw), Engine(ENGINE))


def _columns(draw: Any, names: dict[str, str], rows: int) -> dict[str, bytes]:
    """Columns of the right length, values mostly small, now and then any."""
    return {
        name: np.array(
            draw(
                st.lists(
                    st.integers(0, 3) | st.integers(0, 2 ** (8 * int(dtype[-1])) - 1),
                    min_size=rows,
                    max_size=rows,
                )
            ),
            dtype,
        ).tobytes()
        for name, dtype in names.items()
    }


@st.composite
def random_batches(draw: Any) -> pb.Batch:
    comms = [
        pb.Communicator(
            comm_hash=draw(st.integers(0, 3)),
            library=draw(st.integers(1, 2)),
            n_ranks=draw(st.integers(1, 4)),
            rank=draw(st.integers(0, 3)),
            pid=draw(st.integers(0, 5)),
            complete=draw(st.booleans()),
            gpu_bus_id=draw(st.sampled_from(["", "a", "b"])),
        )
        for _ in range(draw(st.integers(0, 5)))
    ]
    rows = draw(st.integers(0, 6))
    instances = {
        "communicator": "<u4",
        "seq": "<u4",
        "lane": "u1",
        "op": "u1",
        "role": "u1",
        "flags": "u1",
        "arrival_ns": "<u8",
        "payload_bytes": "<u8",
        "sync_blocked_ns": "<u8",
    }
    columns = _columns(draw, instances, rows)
    columns["evidence"] = bytes(draw(st.lists(st.integers(1, 2), min_size=rows, max_size=rows)))
    columns["duration_ns"] = bytes(8 * rows)
    summaries = {"communicator": "<u4", "op": "u1", "role": "u1", "evidence": "u1"}
    peers = {"communicator": "<u4", "peer": "<u4", "sent_bytes": "<u8", "received_bytes": "<u8"}
    stages = {"pid": "<u4", "device": "<u4", "stage": "u1", "whole": "u1", "start_ticks": "<u8"}
    amounts = dict.fromkeys(("count", "sum_ns", "span_ns"), "<u8")
    zeros = {n: bytes(8) for n in ("count", "errors", "payload_bytes", "duration_sum_ns")}
    zeros |= {n: bytes(8) for n in ("duration_min_ns", "duration_max_ns")}
    return pb.Batch(
        schema=1,
        node=draw(st.sampled_from(["a", "b"])),
        epoch=draw(st.integers(0, 3)),
        sequence=draw(st.integers(0, 3)),
        end_ns=draw(st.integers(0, 2**63)),
        stride=draw(st.integers(0, 4)),
        strides=draw(st.sampled_from([b"", *(np.full(n, 2, "<u4").tobytes() for n in (1, 2, 3))])),
        communicators=comms,
        instances=pb.Instances(rows=rows, **columns),
        summaries=pb.Summaries(
            rows=1, **_columns(draw, summaries, 1), **zeros, histogram=bytes(192)
        ),
        traffic=pb.Traffic(rows=rows, **_columns(draw, peers, rows)),
        stages=pb.Stages(
            rows=rows, **_columns(draw, stages | amounts, rows), union_ns=bytes(8 * rows)
        ),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(random_batches(), min_size=1, max_size=4))
def test_random_batches(batches: list[pb.Batch]) -> None:
    engine = Engine(ENGINE)
    for batch in batches:
        _try(batch.SerializeToString(), engine)
