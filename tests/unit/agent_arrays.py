"""Synthetic kernel records for the agent's unit tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from lanterne.agent.events import CommTable, Records
from lanterne.probes.layout import COMM_EVENT, RECORD, CommKind, Flag, Func

BASE_NS = 1_000_000_000
FIELDS = RECORD.names or ()


def record(**fields: Any) -> Records:
    """One record; enough defaults to be a plain all-reduce of 8 floats."""
    row = np.zeros(1, RECORD)
    values = {"enter_ns": BASE_NS, "comm": 0x1000, "tgid": 10, "tid": 10, "peer": -1, "dtype": 7,
              "func": Func.ALL_REDUCE, "count": 8}  # fmt: skip
    for name, value in (values | fields).items():
        row[name] = value
    return row


def records(*rows: Records) -> Records:
    return np.concatenate(rows) if rows else np.zeros(0, RECORD)


def exchange(
    sends: list[int], receives: list[int], *, group: int, seq: int = 0, **fields: Any
) -> Records:
    """One group: a send and a receive per peer, bytes as given; 0 bytes are left out."""
    rows = []
    for peer, amount in enumerate(sends):
        if amount:
            rows.append(p2p(Func.SEND, peer, amount, group=group, seq=seq, **fields))
        if receives[peer]:
            rows.append(p2p(Func.RECV, peer, receives[peer], group=group, seq=seq, **fields))
    return records(*rows)


def p2p(func: Func, peer: int, amount: int, *, group: int = 0, **fields: Any) -> Records:
    flags = Flag.P2P | (Flag.GROUP if group else Flag(0)) | fields.pop("flags", Flag(0))
    return record(func=func, peer=peer, count=amount, dtype=0, flags=flags, group=group, **fields)


def comm_event(kind: CommKind, **fields: Any) -> Records:
    row = np.zeros(1, COMM_EVENT)
    values = {"time_ns": BASE_NS, "comm": 0x1000, "tgid": 10, "tid": 10}
    for name, value in (values | fields).items():
        if name == "id":
            row["id"][0, : len(value)] = np.frombuffer(value, np.uint8)
        else:
            row[name] = value
    row["kind"] = kind
    return row


def table(n: int = 8, *, n_ranks: int = 4, rank: int = 1, complete: bool = True) -> CommTable:
    return CommTable(
        n_ranks=np.full(n, n_ranks, np.uint32),
        rank=np.full(n, rank, np.uint32),
        resolved=np.ones(n, np.bool_),
        complete=np.full(n, complete),
    )


def slots(n: int, value: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.full(n, value, np.uint16)
