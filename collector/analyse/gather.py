"""Several batches -> one set of columns of each kind, in the registry's numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import load, totals
from lanterne.collector.analyse.who import Resolved
from lanterne.collector.batch import DecodedBatch

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

Group = list[tuple[DecodedBatch, Resolved]]

ARRIVAL_BITS = 43  # 2.4 hours: longest spread of arrivals of one node in one flush kept in order


@dataclass
class Flow:
    """Columns of the instances of several batches, length R, ordered by process and arrival."""

    table: I32
    slot: I32
    rank: I64
    member: I64
    process: I32
    seq: I64
    op: U8
    role: U8
    evidence: U8
    flags: U8
    arrival: I64
    duration: I64
    size: I64
    sync: I64
    stride: I64 | int


def collect(batches: Group) -> Flow | None:
    """Join the instances of batches; rows of dropped communicators are left out."""
    some = [(b, r) for b, r in batches if len(b.instances)]
    if not some:
        return None
    counts = [len(b.instances) for b, _ in some]
    offsets = np.cumsum([0] + [len(r.slot) for _, r in some[:-1]])
    index, seq = np.concatenate([b.instances.words for b, _ in some], axis=1).astype(np.int64)
    index += np.repeat(offsets, counts)
    small = np.concatenate([b.instances.small for b, _ in some], axis=1)
    large = np.concatenate([b.instances.large for b, _ in some], axis=1)
    slot = np.concatenate([r.slot for _, r in some])[index]
    process = np.concatenate([r.process for _, r in some])[index]
    order = _order(some, counts, slot, process, large[0])
    if order is not None:
        index, seq, slot, process = index[order], seq[order], slot[order], process[order]
        small, large = small[:, order], large[:, order]
    if not len(slot):
        return None
    lane, op, role, evidence, flags = small
    arrival, duration, size, sync = large
    stride: I64 | int = 1
    if max(b.stride for b, _ in some) > 1:
        stride = np.concatenate([_strides(b, len(r.slot)) for b, r in some])[index]
    return Flow(
        table=slot * 2 + lane.astype(np.int32),
        slot=slot,
        rank=np.concatenate([r.rank for _, r in some])[index],
        member=np.concatenate([r.member for _, r in some])[index],
        process=process,
        seq=seq,
        op=op,
        role=role,
        evidence=evidence,
        flags=flags,
        arrival=arrival,
        duration=duration,
        size=size,
        sync=sync,
        stride=stride,
    )


def _strides(b: DecodedBatch, communicators: int) -> I64:
    if len(b.strides):
        return b.strides.astype(np.int64)
    return np.full(communicators, b.stride, np.int64)


def _order(
    some: Group,
    counts: list[int],
    slot: I32,
    process: I32,
    arrival: I64,
) -> I64 | None:
    """Row numbers by process and arrival, without dropped communicators; None: as they are."""
    # Nodes' clocks start at different times: order by arrival within a node only.
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    origins = np.minimum.reduceat(arrival, starts).tolist()
    lowest: dict[str, int] = {}
    for (b, _), o in zip(some, origins, strict=True):
        lowest[b.node] = min(o, lowest.get(b.node, o))
    origin = np.repeat(np.array([lowest[b.node] for b, _ in some]), counts)
    key = np.minimum(arrival - origin, (1 << ARRIVAL_BITS) - 1)
    key += process.astype(np.int64) << ARRIVAL_BITS
    if bool((slot < 0).any()):
        keep = np.flatnonzero(slot >= 0)
        kept: I64 = keep[np.argsort(key[keep], kind="stable")]
        return kept
    if bool((key[1:] < key[:-1]).any()):
        return np.argsort(key, kind="stable")  # a merge of sorted runs: the common case
    return None


def take(f: Flow, pick: npt.NDArray[np.bool_]) -> Flow:
    """The rows of `f` that are picked."""
    values = {k: (v[pick] if isinstance(v, np.ndarray) else v) for k, v in vars(f).items()}
    return Flow(**values)


def summaries(batches: Group, into: totals.Grouped) -> None:
    """Add the batches' summaries to their totals."""
    some = [(b.summaries, r) for b, r in batches if len(b.summaries)]
    if not some:
        return
    slot = np.concatenate([r.slot[s.communicator] for s, r in some]).astype(np.int64)
    op, role, evidence = np.concatenate([s.small for s, _ in some], axis=1).astype(np.int64)
    values = np.empty((len(slot), totals.SUMMARY_WIDTH), np.int64)
    values[:, : totals.HISTOGRAM] = np.concatenate([s.large for s, _ in some], axis=1).T
    values[:, totals.HISTOGRAM :] = np.concatenate([s.histogram for s, _ in some])
    keys = totals.key(slot, op, role, evidence)
    good = slot >= 0
    if not good.all():
        keys, values = keys[good], values[good]
    into.add(keys, values)


def loads(batches: Group, into: load.Loads) -> None:
    """Add what the batches' summaries tell of the spread of tokens."""
    for b, r in batches:
        s = b.summaries
        if s.small[1].any():  # roles
            op, role, evidence = s.small.astype(np.int64)
            count, _, size, _ = s.large
            token = s.token_bytes.astype(np.int64) if len(s.token_bytes) else np.zeros_like(size)
            into.add(r.member[s.communicator], op, role, evidence, count, size, token)


def traffic(batches: Group) -> list[totals.TrafficRows]:
    """The batches' traffic, in the registry's numbers."""
    return [_traffic(b, r) for b, r in batches if len(b.traffic)]


def _traffic(b: DecodedBatch, r: Resolved) -> totals.TrafficRows:
    index = b.traffic.communicator
    slot = r.slot[index].astype(np.int64)
    good = slot >= 0
    if b.traffic.waits.size:  # pairs of which only the waits are known are rows, too
        good &= b.traffic.large.any(axis=0)
    rank = r.rank[index][good]
    return totals.TrafficRows(
        slot=slot[good],
        base=r.member[index][good] - rank,
        rank=rank,
        peer=b.traffic.peer[good].astype(np.int64),
        sent=b.traffic.sent_bytes[good],
        since_ns=np.full(len(rank), b.received_ns),
    )
