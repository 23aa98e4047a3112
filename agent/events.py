"""Drained kernel records to operation columns: the call, its bytes, and on what evidence.

Everything here is one pass over whole arrays. Records of point-to-point calls are set apart
(`point_to_point`) for `groups`; every other record is one operation.

Bytes are those that this rank sends, or its buffer for reductions: elements x element size x a
factor of the function. NCCL's `count` means: all-gather, gather: what one rank contributes;
reduce-scatter: what one rank receives, so the buffer holds n_ranks times that; all-to-all: what
goes to one peer, itself included, so n_ranks times; scatter: what one rank receives, so the root
sends n_ranks times. n_ranks may not be known yet at this point, hence `scaled_bytes` is applied
when the window closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.probes.layout import RECORD, Flag, Func

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]

# Evidence of Instances.evidence and Summaries.evidence.
ORDER, DEVICE, BLOCKING, ENQUEUE = 0, 1, 2, 3
# Bits of Instances.flags.
GROUPED, CAPTURED, FIRST = 1, 2, 4
NO_SLOT = 0xFFFF
MAX_CALL_BYTES = 1 << 44  # no buffer is larger: such a count is nonsense, its bytes are unknown
IN_PROGRESS = 7  # ncclInProgress: a non-blocking communicator, no error

ELEMENT_BYTES = np.ones(256, np.uint64)  # ncclDataType_t; unknown types count as bytes
ELEMENT_BYTES[:12] = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)

TIMES_RANKS = np.zeros(256, np.bool_)
TIMES_RANKS[[Func.REDUCE_SCATTER, Func.ALL_TO_ALL, Func.SCATTER]] = True
EXPERTS = np.zeros(256, np.bool_)
EXPERTS[[Func.DISPATCH, Func.COMBINE]] = True
SENDS = np.zeros(256, np.bool_)
SENDS[[Func.SEND, Func.PUT_SIGNAL, Func.SIGNAL]] = True

_FLAG_BITS = np.zeros(256, np.uint8)
for _flags in range(256):
    _FLAG_BITS[_flags] = (
        (GROUPED if _flags & Flag.GROUP else 0)
        | (CAPTURED if _flags & Flag.CAPTURE else 0)
        | (FIRST if _flags & Flag.FIRST else 0)
    )
_WAITED = int(Flag.BLOCKING | Flag.PAIR)


@dataclass(frozen=True)
class Rules:
    """When an enqueue time stands for the rank's arrival; see docs of `evidence_of`."""

    max_launches: int = 2
    max_sync_age_us: int = 10_000


@dataclass(frozen=True)
class CommTable:
    """What the registry knows, one row per slot."""

    n_ranks: U32
    rank: U32
    resolved: Bool
    complete: Bool
    expert: Bool | None = None  # named or configured as expert-parallel; None: nobody is


@dataclass(frozen=True)
class Operations:
    """Columns of one row per operation, in the order of the records of each communicator."""

    slot: U16  # row of the communicator registry
    seq: U32
    lane: U8  # 0 collective, 1 point-to-point group
    op: U8  # layout.Func
    evidence: U8
    flags: U8
    error: Bool
    arrival_ns: U64
    duration_ns: U64
    bytes: U64  # not yet times n_ranks, see scaled_bytes
    root: I32  # of dispatch, combine and ALL_TO_ALL_V: bytes of one token, -1 or 0 unknown
    sync_blocked_ns: U64
    send_shape: U64  # hash of the relative sizes per peer, 0: no vector (groups.shape_hash)
    receive_shape: U64
    uniform: Bool  # same bytes to and from each of the same peers
    send_peers: U16
    receive_peers: U16

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, index: npt.NDArray[Any]) -> Operations:
        """Rows chosen by a mask or by positions."""
        return Operations(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))


_DTYPES: dict[str, Any] = {
    "slot": np.uint16, "seq": np.uint32, "lane": np.uint8, "op": np.uint8, "evidence": np.uint8,
    "flags": np.uint8, "error": np.bool_, "arrival_ns": np.uint64, "duration_ns": np.uint64,
    "bytes": np.uint64, "root": np.int32, "sync_blocked_ns": np.uint64, "send_shape": np.uint64,
    "receive_shape": np.uint64, "uniform": np.bool_, "send_peers": np.uint16,
    "receive_peers": np.uint16,
}  # fmt: skip


def rows_of(records: Records, index: npt.NDArray[Any]) -> Records:
    """`records[index]`, for a mask or positions, ten times as fast: numpy copies structured rows
    field by field, but rows of plain words as they are."""
    if index.dtype == np.bool_:
        index = np.flatnonzero(index)
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), -1)
    taken: Records = words.take(index, axis=0).view(RECORD).reshape(-1)
    return taken


def empty_operations() -> Operations:
    return Operations(**{name: np.empty(0, dtype) for name, dtype in _DTYPES.items()})


def concatenate(parts: Sequence[Operations]) -> Operations:
    """One after the other; the order of each part is kept."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return empty_operations()
    if len(parts) == 1:
        return parts[0]
    return Operations(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _DTYPES}
    )


def point_to_point(records: Records) -> Bool:
    """Mask of the records that `groups` assembles; the rest are operations by themselves.

    Sends and receives, and the calls of Gloo whose bytes per peer come in records of their own.
    """
    mask: Bool = (records["flags"] & np.uint8(Flag.P2P)) != 0
    vector_call: Bool = (records["func"] == Func.ALL_TO_ALL_V) & (records["group"] != 0)
    return np.logical_or(mask, vector_call)


def payload_bytes(records: Records) -> U64:
    """count x element size; 0 where no real buffer could be that large."""
    count = np.ascontiguousarray(records["count"])
    size = ELEMENT_BYTES[records["dtype"]]
    size[(records["flags"] & np.uint8(Flag.BYTES)) != 0] = 1
    amount: U64 = count * size
    amount[count > MAX_CALL_BYTES >> 3] = 0
    return amount


def errors_of(records: Records) -> Bool:
    """Calls that returned an error. Gloo's functions return nothing: they raise, and what the
    register held at their return means nothing."""
    rc = records["rc"]
    returned = (records["flags"] & np.uint8(_WAITED)) == np.uint8(Flag.PAIR)
    failed: Bool = returned & (rc != 0) & (rc != IN_PROGRESS)
    return failed


def evidence_of(records: Records, rules: Rules) -> U8:
    """Evidence code of each record.

    A call that returns only when the operation has ended is `blocking`, and its duration counts.
    An entry time is an arrival (`enqueue`) only where this thread had just waited for the GPU:
    it returned from a synchronise call at most `max_sync_age_us` ago and has enqueued at most
    `max_launches` kernels and operations since. All else is order, not time; and so is what is
    recorded into a CUDA graph, which does not run now. Dispatch and combine of expert-parallel
    libraries are several launches each: the host's wait for the others' counts is evidence, the
    time of a launch is none.
    """
    flags = records["flags"]
    captured = (flags & np.uint8(Flag.CAPTURE)) != 0
    waited = (flags & np.uint8(_WAITED)) == _WAITED
    fresh = (
        ((flags & np.uint8(Flag.SYNCED)) != 0)
        & (records["launches"] <= rules.max_launches)
        & (records["sync_age_us"] <= rules.max_sync_age_us)
    )
    evidence = np.where(fresh, np.uint8(ENQUEUE), np.uint8(ORDER))
    evidence[EXPERTS[records["func"]]] = ORDER
    evidence[waited] = BLOCKING
    evidence[captured] = ORDER
    return evidence


def collectives(records: Records, slots: U16, rules: Rules) -> Operations:
    """Operations of records that are not point-to-point; `slots` is the registry row of each."""
    n = len(records)
    flags = records["flags"]
    error = errors_of(records)
    evidence = evidence_of(records, rules)
    bits = _FLAG_BITS[flags]
    amount = payload_bytes(records)
    # A failed call moves nothing, and neither does one that only goes into a graph.
    amount[error | ((bits & CAPTURED) != 0)] = 0
    op = np.ascontiguousarray(records["func"])
    duration = np.where(evidence == BLOCKING, records["duration_ns"], np.uint64(0))
    # NCCL's equal-split all-to-all has one size for every peer, by definition.
    uniform = op == Func.ALL_TO_ALL
    return Operations(
        slot=slots,
        seq=np.ascontiguousarray(records["seq"]),
        lane=np.zeros(n, np.uint8),
        op=op,
        evidence=evidence,
        flags=bits,
        error=error,
        arrival_ns=np.ascontiguousarray(records["enter_ns"]),
        duration_ns=duration,
        bytes=amount,
        root=_roots(records),
        sync_blocked_ns=records["sync_blocked_us"].astype(np.uint64) * np.uint64(1000),
        send_shape=np.zeros(n, np.uint64),
        receive_shape=np.zeros(n, np.uint64),
        uniform=uniform,
        send_peers=np.zeros(n, np.uint16),
        receive_peers=np.zeros(n, np.uint16),
    )


def _roots(records: Records) -> I32:
    """The peer of a record; of NCCL EP, whose tokens are told in elements, their bytes."""
    peer: I32 = np.array(records["peer"])
    elements = EXPERTS[records["func"]] & ((records["flags"] & np.uint8(Flag.BYTES)) == 0)
    elements &= peer > 0
    if elements.any():
        size = ELEMENT_BYTES[records["dtype"][elements]].astype(np.int64)
        peer[elements] = np.minimum(peer[elements] * size, np.iinfo(np.int32).max)
    return peer


def scaled_bytes(operations: Operations, n_ranks: U32, rank: U32) -> Operations:
    """Apply the factor n_ranks where the function has it; `n_ranks` and `rank` per operation.

    A scatter sends from the root only. Where the root is another rank the bytes are 0.
    """
    times = TIMES_RANKS[operations.op]
    if not times.any():
        return operations
    factor = np.where(times, n_ranks, np.uint32(1)).astype(np.uint64)
    away = (operations.op == Func.SCATTER) & (operations.root != rank.astype(np.int64))
    factor[away] = 0
    return replace(operations, bytes=operations.bytes * factor)
