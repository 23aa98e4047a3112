"""Items from the ingest process to the analysis, as builtin values: what crosses the socket.

marshal, not pickle: both ends are the same program on the same machine, started together, and it is
several times faster. A node's communicators rarely change, so they are sent only when they do.
"""

from __future__ import annotations

import marshal
from dataclasses import astuple, fields

import numpy as np

from lanterne.collector.batch import (
    HISTOGRAM_BINS,
    NO_PENDING,
    NO_REPORTS,
    NO_STAGES,
    NO_STRIDES,
    Communicators,
    DecodedBatch,
    Head,
    Instances,
    Pending,
    Reports,
    Stages,
    Summaries,
    Traffic,
)
from lanterne.collector.clock import ClockObservation

Item = DecodedBatch | ClockObservation
Packed = tuple[object, ...]

_HEAD = tuple(f.name for f in fields(Head))
_COMMUNICATORS = tuple(f.name for f in fields(Communicators))


class Packer:
    """Items -> bytes; the other end needs an Unpacker that is fed everything in order."""

    def __init__(self, nodes: int = 8_192) -> None:
        """nodes: whose communicators both ends remember; beyond it they begin anew."""
        self._nodes = nodes
        self._known: dict[str, Communicators] = {}

    def pack(self, items: list[Item]) -> bytes:
        full = len(self._known) >= self._nodes
        if full:
            self._known.clear()
        return marshal.dumps((full, [self._item(item) for item in items]))

    def _item(self, item: Item) -> Packed:
        if isinstance(item, ClockObservation):
            return astuple(item)
        head, c = item.head, item.communicators
        changed = None
        if self._known.get(head.node) is not c:
            self._known[head.node] = c
            changed = tuple([getattr(c, name) for name in _COMMUNICATORS])
        i, s, t = item.instances, item.summaries, item.traffic
        return (
            None,  # no clock observation begins like this
            tuple([getattr(head, name) for name in _HEAD]),
            changed,
            (i.words.tobytes(), i.small.tobytes(), i.large.tobytes()),
            (
                s.communicator.tobytes(),
                s.small.tobytes(),
                s.large.tobytes(),
                s.histogram.tobytes(),
                s.token_bytes.tobytes(),
            ),
            (t.words.tobytes(), t.large.tobytes(), t.waits.tobytes()),
            (item.reports.expert_loads, item.reports.engine_readings),
            _stages(item.stages),
            _pending(item.pending),
            item.strides.tobytes(),
        )


def _stages(stages: Stages) -> Packed | None:
    if not len(stages):
        return None
    return stages.words.tobytes(), stages.small.tobytes(), stages.large.tobytes()


def _pending(pending: Pending) -> Packed | None:
    if not len(pending):
        return None
    return pending.words.tobytes(), pending.small.tobytes(), pending.entered_ns.tobytes()


class Unpacker:
    def __init__(self) -> None:
        self._known: dict[str, Communicators] = {}

    def unpack(self, data: bytes) -> list[Item]:
        # Written by our own child process, never by anyone else.
        anew, packed = marshal.loads(data)
        if anew:
            self._known.clear()
        return [self._item(item) for item in packed]

    def _item(self, packed: tuple) -> Item:  # type: ignore[type-arg]
        if packed[0] is not None:
            return ClockObservation(*packed)
        _, head_values, changed, instances, summaries, traffic, *others = packed
        reports, stages, pending, strides = others
        head = Head(*head_values)
        if changed is not None:
            self._known[head.node] = Communicators(*changed)
        u4, u1, i8 = np.uint32, np.uint8, np.int64
        communicator = np.frombuffer(summaries[0], u4)
        rows = len(communicator)
        return DecodedBatch(
            head=head,
            communicators=self._known[head.node],
            instances=Instances(
                np.frombuffer(instances[0], u4).reshape(2, -1),
                np.frombuffer(instances[1], u1).reshape(5, -1),
                np.frombuffer(instances[2], i8).reshape(4, -1),
            ),
            summaries=Summaries(
                communicator,
                np.frombuffer(summaries[1], u1).reshape(3, rows),
                np.frombuffer(summaries[2], i8).reshape(4, rows),
                np.frombuffer(summaries[3], u4).reshape(rows, HISTOGRAM_BINS),
                np.frombuffer(summaries[4], u4),
            ),
            traffic=Traffic(
                np.frombuffer(traffic[0], u4).reshape(2, -1),
                np.frombuffer(traffic[1], i8).reshape(2, -1),
                np.frombuffer(traffic[2], i8).reshape(2, -1),
            ),
            reports=Reports(*reports) if any(reports) else NO_REPORTS,
            stages=NO_STAGES
            if stages is None
            else Stages(
                np.frombuffer(stages[0], u4).reshape(2, -1),
                np.frombuffer(stages[1], u1).reshape(2, -1),
                np.frombuffer(stages[2], i8).reshape(5, -1),
            ),
            pending=NO_PENDING
            if pending is None
            else Pending(
                np.frombuffer(pending[0], u4).reshape(2, -1),
                np.frombuffer(pending[1], u1).reshape(4, -1),
                np.frombuffer(pending[2], i8),
            ),
            strides=np.frombuffer(strides, u4) if strides else NO_STRIDES,
        )
