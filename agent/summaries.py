"""Sums of a window: one row per (communicator, operation, role, evidence), with a histogram."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.agent.events import BLOCKING, DEVICE, I64, U8, U16, U32, U64, Operations, concatenate
from lanterne.probes.layout import Func

HISTOGRAM_BINS = 48
OP_CODES = 256
OF_TOKENS = np.zeros(OP_CODES, np.bool_)
OF_TOKENS[[Func.DISPATCH, Func.COMBINE, Func.ALL_TO_ALL_V]] = True


@dataclass(frozen=True)
class Summaries:
    slot: U16
    op: U8
    role: U8
    evidence: U8
    count: U64
    errors: U64
    bytes: U64
    duration_sum_ns: U64
    duration_min_ns: U64
    duration_max_ns: U64
    histogram: U32  # [rows, 48]
    token_bytes: U32  # of one token, as these operations carry it; 0: unknown or several sizes


def summarize(
    operations: Operations,
    role: U8,
    timed_only: Operations | None = None,
    timed_role: U8 | None = None,
) -> Summaries:
    """``timed_only``: operations that were counted before, for what they add to durations."""
    counted = np.ones(len(operations), np.bool_)
    if timed_only is not None and timed_role is not None and len(timed_only):
        counted = np.concatenate([counted, np.zeros(len(timed_only), np.bool_)])
        operations = concatenate([operations, timed_only])
        role = np.concatenate([role, timed_role])
    key = (
        (operations.slot.astype(np.int64) * OP_CODES + operations.op) * 12
        + role.astype(np.int64) * 4
        + operations.evidence
    )
    keys, row = _number(key)
    n = len(keys)
    timed = (operations.evidence == BLOCKING) | (operations.evidence == DEVICE)
    timed &= ~operations.error
    total = np.zeros(n, np.uint64)
    low = np.zeros(n, np.uint64)
    high = np.zeros(n, np.uint64)
    histogram = np.zeros((n, HISTOGRAM_BINS), np.uint32)
    if timed.any():
        at, duration = row[timed], operations.duration_ns[timed]
        low[:] = np.iinfo(np.uint64).max
        np.add.at(total, at, duration)
        np.minimum.at(low, at, duration)
        np.maximum.at(high, at, duration)
        there = np.bincount(at, minlength=n) > 0
        low[~there] = 0
        bins = np.bincount(at * HISTOGRAM_BINS + histogram_bin(duration), minlength=n * 48)
        histogram = bins.reshape(n, HISTOGRAM_BINS).astype(np.uint32)
    amount = np.zeros(n, np.uint64)
    np.add.at(amount, row[counted], operations.bytes[counted])
    code, rest = np.divmod(keys, 12)
    return Summaries(
        slot=(code // OP_CODES).astype(np.uint16),
        op=(code % OP_CODES).astype(np.uint8),
        role=(rest // 4).astype(np.uint8),
        evidence=(rest % 4).astype(np.uint8),
        count=np.bincount(row[counted], minlength=n).astype(np.uint64),
        errors=np.bincount(row[operations.error & counted], minlength=n).astype(np.uint64),
        bytes=amount,
        duration_sum_ns=total,
        duration_min_ns=low,
        duration_max_ns=high,
        histogram=histogram,
        token_bytes=_token_bytes(operations, row, n),
    )


def _token_bytes(operations: Operations, row: I64, n: int) -> U32:
    """Where every operation of a row that carried something tells the same."""
    if not OF_TOKENS[operations.op].any():
        return np.zeros(n, np.uint32)
    told = operations.root.astype(np.int64)
    told[~OF_TOKENS[operations.op] | (told < 0)] = 0
    carried = (operations.bytes > 0) & ~operations.error
    low = np.full(n, np.iinfo(np.int64).max)
    high = np.zeros(n, np.int64)
    np.minimum.at(low, row[carried], told[carried])
    np.maximum.at(high, row[carried], told[carried])
    return np.where(low == high, high, 0).astype(np.uint32)


def _number(key: I64) -> tuple[I64, I64]:
    """Distinct keys in order, and for each row the position of its key."""
    if not len(key):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    low = int(key.min())
    span = int(key.max()) - low + 1
    if span > 4 * len(key) + (1 << 20):
        keys, row = np.unique(key, return_inverse=True)
        return keys, row
    present = np.zeros(span, np.bool_)
    present[key - low] = True
    keys = np.flatnonzero(present)
    number = np.zeros(span, np.int64)
    number[keys] = np.arange(len(keys))
    return keys + low, number[key - low]


def histogram_bin(duration_ns: U64) -> I64:
    """b of [2^b, 2^(b+1)) ns, 0 for less than 2, the last for everything longer.

    The binary exponent of the float64 is the answer; rounding to 53 bits could only lift values
    above 2^53, far beyond the last bin.
    """
    exponent = (duration_ns.astype(np.float64).view(np.int64) >> 52) - 1023
    clipped: I64 = np.clip(exponent, 0, HISTOGRAM_BINS - 1)
    return clipped
