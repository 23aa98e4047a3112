"""Batches: what the agent encodes is what the collector's own decoder accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agent_arrays import BASE_NS, comm_event, exchange, record, records
from agent_readings import Gpu, Reading

from lanterne.agent import encode as encoding
from lanterne.agent import plugin_memory
from lanterne.agent.classify import Rooted
from lanterne.agent.comms import Registry
from lanterne.agent.cuda import Bin, Use
from lanterne.agent.encode import Context, Head, Health
from lanterne.agent.events import Records, Rules
from lanterne.agent.groups import Groups
from lanterne.agent.inflight import in_flight, joined, on_device
from lanterne.agent.origins import Origin, Origins
from lanterne.agent.pipeline import Pipeline, drained_until
from lanterne.agent.process import Processes
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.decode import decode
from lanterne.probes.layout import CommFlag, CommKind, Flag, Func, Stream
from lanterne.proto import telemetry_pb2 as pb

HEAD = Head("node-1", 123, "0.1.0", "boot")
NOTHING = np.zeros(0, comm_event(CommKind.INIT).dtype)


def pipeline(tmp_path: Path, **options: int) -> Pipeline:
    registry = Registry(libraries=lambda _: (), processes=Processes(tmp_path), **options)
    return Pipeline(registry, Rules(), HEAD, BASE_NS, grace_ns=1000)


def creation(comm: int = 0x1000, rank: int = 1, **fields: object) -> Records:
    known = {"id": b"u" * 128, "n_ranks": 4, "rank": rank, "flags": CommFlag.ID | CommFlag.RANK}
    return comm_event(CommKind.INIT, comm=comm, **(known | fields))


def decoded(batches: list[tuple[int, bytes]]) -> list[DecodedBatch]:
    found = [decode(data) for _, data in batches]
    assert [batch.sequence for batch in found] == [sequence for sequence, _ in batches]
    return found


def test_the_whole_way_from_records_to_what_the_collector_reads(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    waits = Flag.BLOCKING | Flag.PAIR
    rows = records(
        record(seq=0, enter_ns=BASE_NS + 5, flags=waits | Flag.FIRST, duration_ns=70),
        exchange([1, 2, 3, 4], [4, 3, 2, 1], group=1, seq=0),
        exchange([8, 6, 4, 2], [2, 4, 6, 8], group=2, seq=1),
    )
    pipe.feed(rows, creation(), BASE_NS)
    bins = (Bin(-1, Stream.LEGACY, 1, 0, 0, 0), Bin(3, Stream.NAMED, 10, 2, 4, 99))
    cuda = Use(11, 2, 4, 99, np.zeros(32, np.uint64), 3, 7, 5, 5, bins)
    context = Context(
        realtime_offset_ns=-7,
        gpus=[Gpu()],
        processes={10: Reading()},
        cuda={10: cuda},
        steps={10: (7, 5)},
        health=Health(events_read=5, events_lost={"ring": 2}, source_success={"nvml": True}),
    )
    end = BASE_NS + 10**9
    (batch,) = decoded(pipe.close(end, 1, lambda: context, final=True))
    assert (batch.node, batch.epoch, batch.sequence, batch.stride) == ("node-1", 123, 1, 1)
    assert (batch.head.start_ns, batch.head.end_ns, batch.head.realtime_offset_ns) == (
        BASE_NS,
        end,
        -7,
    )
    assert batch.communicators.rank == (1,)
    assert batch.communicators.gpu_index == (-1,)
    instances = batch.instances
    assert instances.op.tolist() == [Func.ALL_REDUCE, Func.ALL_TO_ALL_V, Func.ALL_TO_ALL_V]
    assert instances.role.tolist() == [0, 1, 2]
    assert instances.lane.tolist() == [0, 1, 1]
    assert instances.evidence.tolist() == [2, 0, 0]
    assert instances.flags.tolist() == [4, 1, 1]
    assert instances.payload_bytes.tolist() == [32, 10, 20]
    assert instances.duration_ns.tolist() == [70, 0, 0]
    assert batch.summaries.count.sum() == 3
    assert batch.traffic.sent_bytes.tolist() == [9, 8, 7, 6]
    assert batch.traffic.received_bytes.tolist() == [6, 7, 8, 9]
    assert batch.head.gpus[0].values["utilization_ratio"] == 0.5
    assert "power_watts" not in batch.head.gpus[0].values
    assert batch.head.processes[0]["launches"] == 11
    assert batch.head.processes[0]["captured_operations"] == 3
    assert batch.head.processes[0]["blind_steps"] == 5
    assert batch.head.processes[0]["cuda"] == (
        {"device": None, "stream": "legacy", "launches": 1, "graph_launches": 0, "syncs": 0,
         "sync_ns": 0},
        {"device": 3, "stream": "named", "launches": 10, "graph_launches": 2, "syncs": 4,
         "sync_ns": 99},
    )  # fmt: skip
    assert "run_queue_seconds" not in batch.head.processes[0]
    assert batch.head.health["events_read"] == 5
    assert batch.head.events_lost == {"ring": 2}


def test_what_the_collector_told_decides_what_it_gets(tmp_path: Path) -> None:
    """Two communicators; of the second run of numbers every one, of the first those it told."""
    pipe = pipeline(tmp_path)
    made = np.concatenate([creation(0x1000), creation(0x2000, id=b"v" * 128)])
    pipe.feed(record()[:0], made, BASE_NS)
    hashes = [comm.comm_hash for comm in pipe.registry.alive()]
    told = {(hashes[0], 1): Origin((-3, 0)), (hashes[1], 1): Origin(whole=True)}

    def close(stride: int, epoch: int, of: dict[tuple[int, int], Origin]) -> DecodedBatch:
        rows = [record(seq=seq, comm=comm) for comm in (0x1000, 0x2000) for seq in range(8)]
        pipe.feed(records(*rows), NOTHING, BASE_NS)
        (batch,) = decoded(pipe.close(BASE_NS + 1, stride, Context, origins=Origins(epoch, of)))
        return batch

    def sent(batch: DecodedBatch) -> list[list[int]]:
        return [batch.instances.seq[batch.instances.communicator == i].tolist() for i in (0, 1)]

    every = list(range(8))
    batch = close(4, HEAD.epoch, told)
    assert sent(batch) == [[3, 7], every]
    assert (batch.stride, batch.strides.tolist()) == (4, [4, 1])
    for batch in (close(4, HEAD.epoch, {}), close(4, HEAD.epoch - 1, told)):
        assert sent(batch) == [[0, 4], [0, 4]]
        assert batch.strides.tolist() == []
    batch = close(1, HEAD.epoch, told)
    assert sent(batch) == [every, every]
    assert batch.strides.tolist() == []


def test_an_idle_window_still_describes_who_is_there(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    pipe.feed(np.zeros(0, record().dtype), creation(), BASE_NS)
    (batch,) = decoded(pipe.close(BASE_NS + 1, 1, Context))
    assert batch.communicators.rank == (1,)
    assert batch.instances.seq.tolist() == []


def test_what_is_in_flight_and_who_waits_for_its_gpu(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    pipe.feed(record(), creation(), BASE_NS)
    call = in_flight(record(seq=3, enter_ns=BASE_NS), np.zeros(1, np.uint16), BASE_NS + 1)
    (before,) = decoded(pipe.close(BASE_NS + 2, 1, lambda: Context(in_flight=call)))
    assert before.pending.small[3].tolist() == [0]
    stuck = np.zeros(1, plugin_memory.OPEN)
    stuck["func"], stuck["started"], stuck["since_ns"] = Func.ALL_REDUCE, True, BASE_NS + 1
    told, quiet = np.array([[6, 0]]), np.array([0])
    device = on_device(stuck, np.zeros(1, np.uint16), quiet, told, BASE_NS)
    context = Context(
        processes={10: Reading()}, in_flight=joined(call, device), synchronising={10: 2.5}
    )
    (batch,) = decoded(pipe.close(BASE_NS + 3, 1, lambda: context))
    assert batch.pending.words[1].tolist() == [3, 7]
    assert batch.pending.small[3].tolist() == [0, 2]
    assert batch.pending.entered_ns.tolist() == [BASE_NS, BASE_NS + 1]
    (process,) = batch.head.processes
    assert process["synchronising_seconds"] == 2.5


def test_the_gpu_is_found_by_its_bus_id(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    pipe.feed(record(), creation(), BASE_NS)
    pipe.registry.alive()[0].bus_id = "0000:3b:00.0"
    (batch,) = decoded(pipe.close(BASE_NS + 1, 1, lambda: Context(gpus=[Gpu()])))
    assert batch.communicators.gpu_index == (2,)


def test_a_communicator_that_ended_is_described_with_its_last_operations(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    pipe.feed(record(), creation(), BASE_NS)
    pipe.feed(record()[:0], comm_event(CommKind.DESTROY, time_ns=BASE_NS + 9), BASE_NS)
    (batch,) = decoded(pipe.close(BASE_NS + 10, 1, Context))
    assert batch.communicators.rank == (1,)
    (batch,) = decoded(pipe.close(BASE_NS + 11, 1, Context))
    assert batch.communicators.rank == ()


def test_a_large_window_is_cut_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_INSTANCES", 10)
    monkeypatch.setattr(encoding, "MAX_TRAFFIC", 3)
    pipe = pipeline(tmp_path)
    rows = [record(seq=i, func=Func.ALL_TO_ALL) for i in range(25)]
    pipe.feed(records(*rows), creation(), BASE_NS)
    batches = decoded(pipe.close(BASE_NS + 1, 1, lambda: Context(gpus=[Gpu()])))
    assert [batch.sequence for batch in batches] == [1, 2, 3]
    seqs = [seq for batch in batches for seq in batch.instances.seq.tolist()]
    assert seqs == list(range(25))
    assert sum(int(batch.summaries.count.sum()) for batch in batches) == 25
    assert [len(batch.head.gpus) for batch in batches] == [1, 0, 0]
    assert sum(len(batch.traffic.peer) for batch in batches) == 4


def test_a_batch_that_would_be_too_large_is_cut_finer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline(tmp_path)
    rows = [record(seq=i, func=Func.ALL_TO_ALL) for i in range(2000)]
    pipe.feed(records(*rows), creation(), BASE_NS)
    limit = 30_000  # the rows alone are four times as much
    monkeypatch.setattr(encoding, "MAX_BATCH_BYTES", limit)
    monkeypatch.setattr(encoding, "MAX_INSTANCES", 2000)
    batches = pipe.close(BASE_NS + 1, 1, lambda: Context(gpus=[Gpu()]))
    assert max(len(data) for _, data in batches) <= limit
    found = decoded(batches)
    assert [b.sequence for b in found] == list(range(1, len(found) + 1))
    assert [seq for b in found for seq in b.instances.seq.tolist()] == list(range(2000))
    # The next window is numbered from there on.
    pipe.feed(records(record(seq=2000, func=Func.ALL_TO_ALL)), NOTHING, BASE_NS + 1)
    assert pipe.close(BASE_NS + 2, 1, Context)[0][0] == len(found) + 1


def test_cutting_that_does_not_help_makes_no_more_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every part repeats is too large by itself."""
    monkeypatch.setattr(encoding, "MAX_BATCH_BYTES", 10)
    pipe = pipeline(tmp_path)
    pipe.feed(records(record(func=Func.ALL_TO_ALL)), creation(), BASE_NS)
    assert len(decoded(pipe.close(BASE_NS + 1, 1, Context))) == 1


def test_hostile_arguments_do_not_cost_the_batch(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    huge = 2**64 - 1
    rows = records(
        record(seq=0, count=huge, enter_ns=2**63, flags=Flag.BLOCKING | Flag.PAIR),
        record(seq=1, count=2**41, dtype=4, func=Func.ALL_TO_ALL),
        record(seq=2, flags=Flag.BLOCKING | Flag.PAIR, duration_ns=huge),
        record(seq=3, func=200, dtype=99, peer=-5),
        exchange([0] * 9 + [5], [0] * 10, group=1),
    )
    pipe.feed(rows, creation(name=b"\x1b[31m\xff", flags=7 | CommFlag.NAME), BASE_NS)
    (batch,) = decoded(pipe.close(BASE_NS + 1, 1, Context, final=True))
    assert len(batch.instances.seq) == 5
    assert batch.communicators.name[0].isprintable()


def test_operations_before_their_communicator_is_known_come_later(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    pipe.feed(record(seq=0), NOTHING, BASE_NS)
    (batch,) = decoded(pipe.close(BASE_NS + 1, 1, Context))
    assert batch.communicators.rank == ()
    event = comm_event(CommKind.FIRST_USE, n_ranks=4, rank=2, id=b"h" * 8,
                       flags=CommFlag.ID | CommFlag.RANK)  # fmt: skip
    pipe.feed(record(seq=1), event, BASE_NS)
    (batch,) = decoded(pipe.close(BASE_NS + 2, 1, Context))
    assert batch.instances.seq.tolist() == [0, 1]
    assert pipe.operations_unresolved == 0


def test_constants_are_those_of_the_wire() -> None:
    assert [int(value) for value in encoding._LIBRARY] == pb.Library.values()
    assert [int(value) for value in encoding._IDENTITY] == pb.Identity.values()


def test_groups_forced_are_those_of_both_kinds(tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    pipe.groups = Groups(Rules(), max_records=1)
    pipe.rooted = Groups(Rules(), max_records=1, assemble=Rooted(pipe.registry.table()))
    pipe.feed(exchange([1, 1], [1, 1], group=1), NOTHING, BASE_NS)
    assert pipe.groups_forced == 1
    broadcast = {"func": Func.BROADCAST, "flags": Flag.GROUP, "group": 2}
    pipe.feed(records(record(**broadcast), record(**broadcast, seq=1)), NOTHING, BASE_NS)
    assert pipe.groups_forced == 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_an_agent_that_was_held_up_takes_no_group_apart(tmp_path: Path, size: int) -> None:
    """What it could not read for a minute comes in pieces, windows closing between them."""
    pipe = pipeline(tmp_path)
    pipe.feed(record()[:0], creation(), BASE_NS)
    waiting = records(*(exchange([1, 2], [2, 1], group=1 + k, seq=k) for k in range(6)))
    waiting["enter_ns"] = BASE_NS + 1000 * np.arange(len(waiting))
    now_ns, counted = BASE_NS + 60 * 10**9, 0
    while counted < 6:
        piece, waiting = waiting[:size], waiting[size:]
        until_ns = drained_until(piece, size, now_ns)
        assert until_ns == (int(piece["enter_ns"][-1]) if len(piece) == size else now_ns)
        pipe.feed(piece, NOTHING, until_ns)
        (batch,) = decoded(pipe.close(now_ns, 1, Context))
        assert set(batch.instances.payload_bytes.tolist()) <= {3}
        counted += int(batch.summaries.count.sum())
        now_ns += 10**9
    assert counted == 6
    assert not len(waiting)
