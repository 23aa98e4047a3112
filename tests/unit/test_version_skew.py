"""One minor version apart: batches of released agents, and of agents that know more than we do.

tests/fixtures/recordings/VERSION.ltr is what that release's agent says of a job with a slow rank
(tests/fixtures/record_batches.py makes it, when a version is released). first.ltr and its schema
are of the time before 0.1.0: without what engines tell, calls in flight, stages, steps and places.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from lanterne.agent.stream import Stream, _Session
from lanterne.collector import recording, replay
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.collector.snapshot import Snapshot
from lanterne.proto import telemetry_pb2 as pb
from tests.fixtures.record_batches import RANKS, SLOW_RANK, WORKLOAD

RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"
RELEASES = sorted(path.name for path in RECORDINGS.glob("*.ltr"))
UNKNOWN = b"\xfa\x3f\x05later"  # field 1023 of wire type 2: no message of ours has it


def test_there_are_recordings_of_both_schemas() -> None:
    assert {"first.ltr", "0.1.0.ltr"} <= set(RELEASES)


def batches(name: str) -> list[pb.Batch]:
    received = recording.read(RECORDINGS / name, recording.Damage())
    frames = (pb.Frame.FromString(one.frame) for one in received if one.flags & recording.BATCH)
    return [pb.Batch.FromString(frame.batch) for frame in frames]


def replayed(path: Path) -> tuple[replay.Source, list[Snapshot]]:
    source, files = replay.open_recording(path)
    return source, [moment.snapshot for moment in replay.snapshots(source, files)]


def named(taken: list[Snapshot]) -> set[int]:
    return {
        int(rank)
        for snapshot in taken
        for rank, flag in zip(snapshot.ranks.rank, snapshot.ranks.straggler, strict=True)
        if flag
    }


def changed(path: Path, out: Path, change: Callable[[bytes], bytes]) -> Path:
    """The recording with every encoded batch changed."""
    records = []
    for received in recording.read(path, recording.Damage()):
        frame = pb.Frame.FromString(received.frame)
        if frame.batch:
            frame.batch = change(frame.batch)
        records.append(recording.record(received._replace(frame=frame.SerializeToString())))
    header = recording.header_block(recording.read_header(path))
    out.write_bytes(header + recording.frames_block(records))
    return out


@pytest.mark.parametrize("name", RELEASES)
def test_what_a_release_said_is_understood(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copy(RECORDINGS / name, path)
    source, taken = replayed(path)
    assert source.refused == 0
    assert not source.damage
    assert source.batches >= 20
    (comm,) = [c for c in taken[-5].communicators if c.n_ranks == RANKS and c.library == "nccl"]
    assert comm.workload == WORKLOAD
    assert named(taken) == {SLOW_RANK}


def calls(snapshot: Snapshot) -> dict[tuple[str, str], int]:
    return {
        (comm.name, op): counts[0]
        for comm in snapshot.communicators
        for (op, _), counts in comm.calls.items()
    }


def with_unknown_fields(data: bytes) -> bytes:
    """Of every message inside, too."""
    batch = pb.Batch.FromString(data)
    for messages in (batch.communicators, batch.gpus, batch.processes):
        for one in messages:
            one.MergeFromString(UNKNOWN)
    for one in (batch.instances, batch.summaries, batch.traffic, batch.health):
        one.MergeFromString(UNKNOWN)
    return batch.SerializeToString() + UNKNOWN


def test_fields_of_a_later_version_change_nothing(tmp_path: Path) -> None:
    source, taken = replayed(RECORDINGS / "0.1.0.ltr")
    path = changed(RECORDINGS / "0.1.0.ltr", tmp_path / "later.ltr", with_unknown_fields)
    later_source, later = replayed(path)
    assert (later_source.refused, later_source.batches) == (0, source.batches)
    assert named(later) == named(taken) == {SLOW_RANK}
    assert [calls(s) for s in later] == [calls(s) for s in taken]
    assert sum(calls(taken[-1]).values()) > 100


def with_unknown_values(data: bytes) -> bytes:
    """An operation, a role, a flag and an identity that are not known here, in every batch."""
    batch = pb.Batch.FromString(data)
    for comm in batch.communicators:
        comm.identity = 40  # type: ignore[assignment]
    if batch.instances.rows:
        batch.instances.role = bytes(r or 9 for r in batch.instances.role)
        batch.instances.flags = bytes(f | 0x80 for f in batch.instances.flags)
    return batch.SerializeToString()


def test_values_of_a_later_version_cost_only_what_they_say(tmp_path: Path) -> None:
    path = changed(RECORDINGS / "0.1.0.ltr", tmp_path / "later.ltr", with_unknown_values)
    source, taken = replayed(path)
    assert source.refused == 0
    assert named(taken) == {SLOW_RANK}


# ---- value by value


def u8(*values: int) -> bytes:
    return bytes(values)


def busy() -> pb.Batch:
    """The batch of the recording with the most in it."""
    return max(batches("0.1.0.ltr"), key=lambda b: b.instances.rows)


def decoded(batch: pb.Batch) -> tuple[Any, Counter[str]]:
    left_out: Counter[str] = Counter()
    return decode(batch.SerializeToString(), left_out=left_out), left_out


def test_what_is_known_is_left_alone() -> None:
    batch = busy()
    assert decoded(batch)[1] == Counter()
    assert decoded(batch)[0].instances.lane.size == batch.instances.rows > 10


def test_rows_of_an_unknown_lane_are_left_out_and_counted() -> None:
    batch = busy()
    rows = batch.instances.rows
    lane = bytearray(batch.instances.lane)
    lane[3], lane[7] = 2, 255
    batch.instances.lane = bytes(lane)
    found, left_out = decoded(batch)
    assert left_out == Counter(unknown_rows=2)
    kept = np.delete(np.frombuffer(batch.instances.arrival_ns, "<u8"), [3, 7])
    assert found.instances.arrival_ns.tolist() == kept.tolist()
    assert found.instances.lane.size == rows - 2


def test_evidence_of_an_unknown_kind_is_no_evidence() -> None:
    batch = busy()
    evidence = bytearray(batch.instances.evidence)
    evidence[0] = 77
    batch.instances.evidence = bytes(evidence)
    duration = np.frombuffer(batch.instances.duration_ns, "<u8").copy()
    duration[0] = 12345
    batch.instances.duration_ns = duration.tobytes()
    found, left_out = decoded(batch)
    assert left_out == Counter(unknown_values=1)
    assert int(found.instances.evidence[0]) == int(found.instances.duration_ns[0]) == 0
    assert found.instances.evidence[1:].tolist() == list(evidence[1:])


def test_a_communicator_of_an_unknown_library_goes_with_its_rows() -> None:
    batch = busy()
    batch.communicators[1].library = 40  # type: ignore[assignment]
    count = len(batch.communicators)
    batch.strides = np.arange(1, count + 1, dtype="<u4").tobytes()
    index = np.frombuffer(batch.instances.communicator, "<u4")
    hashes = [c.comm_hash for c in batch.communicators]
    ranks = [c.rank for c in batch.communicators]
    assert 0 < int((index == 1).sum()) < len(index)
    found, left_out = decoded(batch)
    assert left_out["unknown_communicators"] == 1
    assert left_out["unknown_rows"] >= int((index == 1).sum())
    assert found.communicators.rank == tuple(ranks[:1] + ranks[2:])
    assert found.strides.tolist() == [1, *range(3, count + 1)]
    # Every row still says of whom it is.
    want = [(hashes[i], ranks[i]) for i in index[index != 1].tolist()]
    have = found.instances.communicator.tolist()
    table = found.communicators
    assert [(table.comm_hash[i], table.rank[i]) for i in have] == want


def test_stages_and_loads_of_unknown_kinds_are_left_out() -> None:
    batch = busy()
    u32, u64 = (lambda *v, t=t: np.array(v, t).tobytes() for t in ("<u4", "<u8"))
    batch.stages.MergeFrom(
        pb.Stages(
            rows=2, pid=u32(10, 10), start_ticks=u64(4, 4), device=u32(0, 0), stage=u8(4, 30),
            whole=u8(1, 1), count=u64(3, 3), sum_ns=u64(60, 60), union_ns=u64(50, 50),
            span_ns=u64(0, 0),
        )
    )  # fmt: skip
    batch.expert_loads.add(engine="x", unit=17, rows=1, experts=1)  # type: ignore[arg-type]
    found, left_out = decoded(batch)
    assert left_out == Counter(unknown_rows=2)
    assert found.stages.small.tolist() == [[4], [1]]
    assert not found.reports.expert_loads


def test_columns_that_do_not_fit_are_refused_as_ever() -> None:
    batch = busy()
    batch.instances.lane = b"\x09" + batch.instances.lane[1:]
    batch.instances.seq = batch.instances.seq[:-1]
    with pytest.raises(BatchRefused, match=r"instances\."):
        decode(batch.SerializeToString())


def test_more_rows_than_bytes_cost_no_memory() -> None:
    batch = busy()
    batch.instances.lane = b"\x09" + batch.instances.lane[1:]
    batch.pending.rows = (1 << 32) - 1
    with pytest.raises(BatchRefused, match=r"pending\.rows"):
        decode(batch.SerializeToString())


# ---- what an agent makes of a later collector's answers


def test_an_answer_of_a_later_collector_loses_no_later_batch() -> None:
    stream = Stream(("127.0.0.1:1",), "node0")
    stream.offer(1, b"one")
    stream.offer(2, b"two")
    session = _Session(stream, "127.0.0.1:1", first=True)
    for status in (99, pb.STATUS_ACCEPTED):
        item, _ = stream._outbox.next(0.0)
        assert item is not None
        session._frame(item, 0.0)
        ack = pb.Ack(status=status, stride=2)  # type: ignore[arg-type]
        ack.MergeFromString(UNKNOWN)
        session.answered(ack)
    assert stream.queued == (0, 0)
    totals = stream.totals()
    assert (totals.refused, totals.acknowledged, stream.stride) == (1, 1, 2)


def test_no_field_number_has_changed_its_meaning() -> None:
    """Of what the first schema had, every field is still there, with its number and type."""
    released = descriptor_pb2.FileDescriptorProto.FromString(
        (RECORDINGS / "first.schema.pb").read_bytes()
    )
    now = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(now)
    have = {m.name: {f.name: f for f in m.field} for m in now.message_type}
    for message in released.message_type:
        for field in message.field:
            same = have[message.name][field.name]
            assert (same.number, same.type, same.label) == (field.number, field.type, field.label)
    values = {e.name: {v.name: v.number for v in e.value} for e in now.enum_type}
    for enum in released.enum_type:
        for value in enum.value:
            assert values[enum.name][value.name] == value.number
