"""Rows of GPU kernels on their way from parcagpu's records to operations, and what is known of
their processes and communicators meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lanterne.agent.stages import Spans

CODES = np.dtype(
    [("stage", "u1"), ("library", "u1"), ("func", "u1"), ("role", "u1"), ("begins", "?")]
)
ROW = np.dtype(
    [("tgid", "<i8"), ("device", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("told", "<i8"),
     ("round", "<i8"), ("length", "<i8"), ("graph", "?"), ("pad", "u1", (2,)),
     *CODES.descr]
)  # fmt: skip


class Owner(Protocol):
    """agent.identity.Communicator."""

    @property
    def slot(self) -> int: ...
    @property
    def tgid(self) -> int: ...
    @property
    def start_ticks(self) -> int: ...
    @property
    def library(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    @property
    def born_ns(self) -> int: ...


@dataclass(frozen=True)
class Facts:
    """Of the end of a window. ``owners``: communicators that are identified. ``told``:
    parcagpu.TOLD rows by tgid, read after the last record was. ``since_ns``: when the probes stood;
    0: not all of them do."""

    owners: Sequence[Owner] = ()
    told: Mapping[int, np.void] = field(default_factory=dict)
    since_ns: int = 0


@dataclass
class Process:
    next_seq: int = -1
    broken: str = ""  # why its kernels have no numbers any more
    spans: Spans = field(default_factory=Spans)
    started: dict[int, int] = field(default_factory=dict)  # slot -> start of its last operation

    def break_off(self, why: str) -> None:
        """The first reason stays."""
        self.broken = self.broken or why


def take(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    """`rows[index]`, as plain words: numpy copies structured rows field by field."""
    if index.dtype == np.bool_:
        index = np.flatnonzero(index)
    words = rows.view(np.uint64).reshape(-1, ROW.itemsize // 8)
    taken: np.ndarray = words.take(index, axis=0).view(ROW).reshape(-1)
    return taken


def join(parts: list[np.ndarray]) -> np.ndarray:
    if not parts:
        return np.empty(0, ROW)
    words = [part.view(np.uint64).reshape(-1) for part in parts]
    joined: np.ndarray = np.concatenate(words).view(ROW)
    return joined
