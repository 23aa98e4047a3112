"""The columns of a batch: instances and their summaries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.proto import telemetry_pb2 as pb

I64 = npt.NDArray[np.int64]

FIRST = 4  # flag of the first operation on a communicator
BINS = 48
KINDS = 4096


@dataclass
class Rows:
    """Columns of every event that is seen, ordered by window, node and step."""

    window: I64
    node: I64
    place: I64  # of the group's rank in its node's list
    kind: I64  # evidence, op and role as one number
    seq: I64
    lane: I64
    op: I64
    role: I64
    arrival: I64
    duration: I64
    size: I64
    blocked: I64
    evidence: I64


def instances(r: Rows, rows: slice) -> pb.Instances:
    """One batch's."""
    n = rows.stop - rows.start
    return pb.Instances(
        rows=n,
        communicator=r.place[rows].astype("<u4").tobytes(),
        seq=r.seq[rows].astype("<u4").tobytes(),
        lane=r.lane[rows].astype("u1").tobytes(),
        op=r.op[rows].astype("u1").tobytes(),
        role=r.role[rows].astype("u1").tobytes(),
        evidence=r.evidence[rows].astype("u1").tobytes(),
        flags=np.where(r.seq[rows] == 0, FIRST, 0).astype("u1").tobytes(),
        arrival_ns=r.arrival[rows].astype("<u8").tobytes(),
        duration_ns=r.duration[rows].astype("<u8").tobytes(),
        payload_bytes=r.size[rows].astype("<u8").tobytes(),
        sync_blocked_ns=r.blocked[rows].astype("<u8").tobytes(),
    )


def summaries(r: Rows, rows: slice) -> pb.Summaries:
    """One batch's, summed by rank of a group and kind of operation."""
    key, index = np.unique(r.place[rows] * KINDS + r.kind[rows], return_inverse=True)
    n = len(key)
    duration, size = r.duration[rows], r.size[rows]
    count = np.bincount(index, minlength=n)
    least, most = np.full(n, np.iinfo(np.int64).max), np.zeros(n, np.int64)
    np.minimum.at(least, index, duration)
    np.maximum.at(most, index, duration)
    bins = np.zeros((n, BINS), np.int64)
    timed = duration > 0
    np.add.at(bins, (index[timed], np.log2(duration[timed]).astype(np.int64)), 1)

    def total(values: I64) -> bytes:
        return np.bincount(index, values, minlength=n).astype("<u8").tobytes()

    return pb.Summaries(
        rows=n,
        communicator=(key // KINDS).astype("<u4").tobytes(),
        op=(key // 4 % 256).astype("u1").tobytes(),
        role=(key % 4).astype("u1").tobytes(),
        evidence=(key // 1024 % 4).astype("u1").tobytes(),
        count=count.astype("<u8").tobytes(),
        errors=np.zeros(n, "<u8").tobytes(),
        payload_bytes=total(size),
        duration_sum_ns=total(duration),
        duration_min_ns=least.astype("<u8").tobytes(),
        duration_max_ns=most.astype("<u8").tobytes(),
        histogram=bins.astype("<u4").tobytes(),
    )
