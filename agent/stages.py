"""Time per stage of a layer: kernels of a process and device -> count, sum and union of intervals.

The sum counts kernels that run side by side each by itself; the union counts time once. Unions of
a window begin where those of the window before ended, so that windows add up: of a kernel that is
told late, the part before is in the sum alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lanterne.agent.events import I64, U8, U32, U64
from lanterne.agent.kernel_names import COMMUNICATION, Stage
from lanterne.agent.unique import unique

MAX_DEVICES = 64  # of one process


@dataclass(frozen=True)
class StageColumns:
    """One row per (process, device, stage) with kernels; see message Stages of telemetry.proto."""

    pid: U32
    start_ticks: U64
    device: U32
    stage: U8
    whole: U8
    count: U64
    sum_ns: U64
    union_ns: U64
    span_ns: U64

    def __len__(self) -> int:
        return len(self.pid)


_COLUMNS: tuple[tuple[str, str], ...] = (
    ("pid", "<u4"), ("start_ticks", "<u8"), ("device", "<u4"), ("stage", "u1"), ("whole", "u1"),
    ("count", "<u8"), ("sum_ns", "<u8"), ("union_ns", "<u8"), ("span_ns", "<u8"),
)  # fmt: skip


def union(start: I64, stop: I64) -> int:
    """Time that at least one of the intervals covers."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    begin, end = start[order], stop[order]
    covered = np.maximum.accumulate(end)
    before = np.r_[begin[0], covered[:-1]]
    return int(np.maximum(end - np.maximum(begin, before), 0).sum())


@dataclass
class Spans:
    """Where the unions of one process have come to, by device."""

    until: dict[int, int] = field(default_factory=dict)

    def rows(
        self, pid: int, ticks: int, whole: bool, device: U32, stage: U8, start: I64, stop: I64
    ) -> list[tuple[int, ...]]:
        """Of the kernels of one process in a window: rows in the order of StageColumns."""
        found: list[tuple[int, ...]] = []
        for number in unique(device).tolist():
            if number not in self.until and len(self.until) >= MAX_DEVICES:
                continue
            on = device == number
            begin, end, of = start[on], stop[on], stage[on]
            since = self.until.get(number, int(begin.min()))
            until = self.until[number] = max(since, int(end.max()))
            clipped = np.maximum(begin, since)

            def row(
                what: int, pick: np.ndarray, span: int = 0, number: int = number,
                begin: I64 = begin, end: I64 = end, clipped: I64 = clipped,
            ) -> None:  # fmt: skip
                sums = int((end[pick] - begin[pick]).sum())
                covered = union(clipped[pick], end[pick])
                found.append(
                    (pid, ticks, number, what, int(whole), int(pick.sum()), sums, covered, span)
                )

            for what in unique(of).tolist():
                row(what, of == what)
            compute = ~np.isin(of, COMMUNICATION)
            if compute.any():
                row(Stage.COMPUTE, compute)
            row(Stage.ALL, np.ones(len(of), np.bool_), until - since)
        return found


def columns(rows: list[tuple[int, ...]]) -> StageColumns:
    values = list(zip(*rows, strict=True)) if rows else [()] * len(_COLUMNS)
    return StageColumns(
        **{
            name: np.array(column, np.dtype(dtype))
            for (name, dtype), column in zip(_COLUMNS, values, strict=True)
        }
    )
