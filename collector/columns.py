"""The columns of an encoded Batch -> checked blocks, one for each width of value.

A block is made by joining the columns' bytes and read with one numpy.frombuffer; one maximum over
it checks all of its columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.collector.batch import (
    HISTOGRAM_BINS,
    I64,
    NO_PENDING,
    NO_STAGES,
    U8,
    U32,
    Communicators,
    Instances,
    Pending,
    Stages,
    Summaries,
    Traffic,
)
from lanterne.collector.checks import Limits, refuse
from lanterne.proto import telemetry_pb2 as pb

TIME_LIMIT_NS = 1 << 62  # keeps sums of a time and a duration inside int64
SPAN_LIMIT_NS = 7 * 86_400 * 10**9  # longest credible duration, and longest window
AHEAD_LIMIT_NS = 10 * 10**9  # an arrival may lie this far after its window's end
BYTES_LIMIT = 1 << 56
COUNT_LIMIT = 1 << 48

Bound = tuple[str, int, str]  # field, first value that is refused, code of the refusal

SMALL: tuple[Bound, ...] = (
    ("lane", 2, "enumeration"),
    ("op", 256, "enumeration"),
    ("role", 3, "enumeration"),
    ("evidence", 4, "enumeration"),
    ("flags", 8, "enumeration"),
)
INSTANCE_LARGE: tuple[Bound, ...] = (
    ("arrival_ns", TIME_LIMIT_NS, "time"),
    ("duration_ns", SPAN_LIMIT_NS, "time"),
    ("payload_bytes", BYTES_LIMIT, "number"),
    ("sync_blocked_ns", SPAN_LIMIT_NS, "time"),
)
SUMMARY_SMALL: tuple[Bound, ...] = SMALL[1:4]
SUMMARY_LARGE: tuple[Bound, ...] = (
    ("count", COUNT_LIMIT, "number"),
    ("errors", COUNT_LIMIT, "number"),
    ("payload_bytes", BYTES_LIMIT, "number"),
    ("duration_sum_ns", BYTES_LIMIT, "time"),
)
TRAFFIC_LARGE: tuple[Bound, ...] = (
    ("sent_bytes", BYTES_LIMIT, "number"),
    ("received_bytes", BYTES_LIMIT, "number"),
)

STAGE_WORDS: tuple[Bound, ...] = (("pid", 1 << 32, "number"), ("device", 1 << 16, "number"))
STAGE_SMALL: tuple[Bound, ...] = (("stage", 10, "enumeration"), ("whole", 2, "enumeration"))
STAGE_LARGE: tuple[Bound, ...] = (
    ("start_ticks", TIME_LIMIT_NS, "number"),
    ("count", COUNT_LIMIT, "number"),
    ("sum_ns", BYTES_LIMIT, "time"),
    ("union_ns", BYTES_LIMIT, "time"),
    ("span_ns", BYTES_LIMIT, "time"),
)
TRAFFIC_WAITS: tuple[Bound, ...] = (
    ("receives", COUNT_LIMIT, "number"),
    ("wait_ns", BYTES_LIMIT, "time"),
)

PENDING_ROWS = 4096
PENDING_STATES = 3

_U1, _U4, _U8 = np.dtype("<u1"), np.dtype("<u4"), np.dtype("<u8")
_top = np.maximum.reduce  # ndarray.max without its Python wrapper
_TIMED = b"\x01\x02"  # evidence with durations

NO_INSTANCES = Instances(
    np.zeros((2, 0), np.uint32), np.zeros((5, 0), np.uint8), np.zeros((4, 0), np.int64)
)
NO_TOKENS = np.zeros(0, np.uint32)
NO_SUMMARIES = Summaries(
    np.zeros(0, np.uint32),
    np.zeros((3, 0), np.uint8),
    np.zeros((4, 0), np.int64),
    np.zeros((0, HISTOGRAM_BINS), np.uint32),
    NO_TOKENS,
)
NO_WAITS = np.zeros((2, 0), np.int64)
NO_TRAFFIC = Traffic(np.zeros((2, 0), np.uint32), np.zeros((2, 0), np.int64), NO_WAITS)


class _Table:
    """Reads the columns of one message, each of `rows` values."""

    def __init__(self, message: object, name: str, limit: int, n_communicators: int) -> None:
        self._message = message
        self._name = name
        self.rows: int = message.rows  # type: ignore[attr-defined]
        self._n = n_communicators
        if self.rows > limit:
            refuse("rows", f"{name}.rows is {self.rows}, the limit is {limit}")

    def column(self, field: str, size: int) -> bytes:
        """The bytes of a column of values of `size` bytes."""
        data: bytes = getattr(self._message, field)
        want = self.rows * size
        if len(data) != want:
            refuse("column", f"{self._name}.{field} is {len(data)} bytes, not {want}")
        return data

    def block(
        self, bounds: tuple[Bound, ...], dtype: np.dtype[Any]
    ) -> tuple[npt.NDArray[Any], list[int]]:
        """-> [columns, rows] values within their bounds, and the largest of each column."""
        parts = [self.column(field, dtype.itemsize) for field, _, _ in bounds]
        block = np.frombuffer(b"".join(parts), dtype).reshape(len(bounds), self.rows)
        tops: list[int] = _top(block, axis=1, initial=0).tolist()
        for (field, below, code), top in zip(bounds, tops, strict=True):
            if top >= below:
                refuse(code, f"{self._name}.{field} holds {top}, the limit is {below - 1}")
        return block, tops

    def words(self, *fields: str) -> U32:
        """[columns, rows] u32; the first column is the index into the communicators."""
        parts = [self.column(field, 4) for field in ("communicator", *fields)]
        block: U32 = np.frombuffer(b"".join(parts), _U4).reshape(len(parts), self.rows)
        if self.rows and (top := int(_top(block[0]))) >= self._n:
            refuse("index", f"{self._name}.communicator names {top} of {self._n} communicators")
        return block


def instances(m: pb.Instances, n: int, end_ns: int, limits: Limits) -> Instances:
    """Raises BatchRefused. n: communicators in the batch."""
    t = _Table(m, "instances", limits.instances, n)
    small, _ = t.block(SMALL, _U1)
    large, tops = t.block(INSTANCE_LARGE, _U8)
    words = t.words("seq")
    latest, longest = tops[0], tops[1]
    if latest > end_ns + AHEAD_LIMIT_NS:
        refuse("time", f"instances.arrival_ns {latest} is after the window's end {end_ns}")
    if longest and m.evidence.translate(None, _TIMED):
        untimed = (small[3] == 0) | (small[3] == 3)
        if bool(large[1][untimed].any()):
            refuse("time", "instances.duration_ns is not 0 where evidence is 0 or 3")
    return Instances(words, small, large.view(np.int64))


def summaries(m: pb.Summaries, n: int, limits: Limits) -> Summaries:
    """Raises BatchRefused."""
    t = _Table(m, "summaries", limits.summaries, n)
    if not t.rows and not m.ByteSize():
        return NO_SUMMARIES
    small: U8 = t.block(SUMMARY_SMALL, _U1)[0]
    large = t.block(SUMMARY_LARGE, _U8)[0]
    t.column("duration_min_ns", 8)
    t.column("duration_max_ns", 8)
    histogram = np.frombuffer(t.column("histogram", 4 * HISTOGRAM_BINS), _U4)
    return Summaries(
        communicator=t.words()[0],
        small=small,
        large=large.view(np.int64),
        histogram=histogram.reshape(t.rows, HISTOGRAM_BINS),
        token_bytes=np.frombuffer(t.column("token_bytes", 4), _U4) if m.token_bytes else NO_TOKENS,
    )


def pending(m: pb.Pending, n: int, end_ns: int) -> Pending:
    """Raises BatchRefused. n: communicators in the batch."""
    if not m.rows and not m.ByteSize():
        return NO_PENDING
    t = _Table(m, "pending", PENDING_ROWS, n)
    bounds = (SMALL[0], SMALL[1], SMALL[3])
    if m.state:  # else a call, all of them
        small: U8 = t.block((*bounds, ("state", PENDING_STATES, "enumeration")), _U1)[0]
    else:
        small = np.concatenate([t.block(bounds, _U1)[0], np.zeros((1, t.rows), np.uint8)])
    large, tops = t.block((("entered_ns", TIME_LIMIT_NS, "time"),), _U8)
    if tops[0] > end_ns:
        refuse("time", f"pending.entered_ns {tops[0]} is after the window's end {end_ns}")
    return Pending(t.words("seq"), small, large[0].view(np.int64))


def traffic(m: pb.Traffic, communicators: Communicators, limits: Limits) -> Traffic:
    """Raises BatchRefused."""
    t = _Table(m, "traffic", limits.traffic, len(communicators.rank))
    if not t.rows and not m.ByteSize():
        return NO_TRAFFIC
    words = t.words("peer")
    large: I64 = t.block(TRAFFIC_LARGE, _U8)[0].view(np.int64)
    if t.rows:
        sizes = np.array(communicators.n_ranks, dtype=np.int64)[words[0]]
        wrong = np.flatnonzero(words[1] >= sizes)
        if len(wrong):
            row = wrong[0]
            refuse("rank", f"traffic.peer {words[1][row]} of a communicator of {sizes[row]} ranks")
    waits: I64 = NO_WAITS
    if m.receives or m.wait_ns:
        waits = t.block(TRAFFIC_WAITS, _U8)[0].view(np.int64)
    return Traffic(words, large, waits)


def stages(m: pb.Stages, limits: Limits) -> Stages:
    """Raises BatchRefused."""
    if not m.ByteSize():
        return NO_STAGES
    t = _Table(m, "stages", limits.stages, 0)
    words = t.block(STAGE_WORDS, _U4)[0]
    small = t.block(STAGE_SMALL, _U1)[0]
    large: I64 = t.block(STAGE_LARGE, _U8)[0].view(np.int64)
    if bool((large[3] > large[2]).any()):
        refuse("time", "stages.union_ns is more than stages.sum_ns")
    return Stages(words, small, large)
