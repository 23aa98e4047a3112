"""What a report consists of, before it is text or a page: headings, sentences, tables, plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

MOST_ROWS = 96  # of a heat map: more are put together, the largest value of each group shown
MOST_COLUMNS = 120


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars; values from 0, `values` as texts beside them."""

    label: str  # what the lengths are
    names: tuple[str, ...]
    lengths: tuple[float, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class HeatMap:
    """`values` [row, column]; NaN: not known. `low` and `high`: what the ends of the scale say."""

    label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]  # one a column; only some are printed
    row_axis: str
    column_axis: str
    values: F64
    bottom: float  # the value of the palest colour
    top: float  # and of the darkest
    low: str
    high: str


Plot = Bars | HeatMap


@dataclass(frozen=True)
class Section:
    heading: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True)
class Document:
    title: str
    lead: str  # the answer, in a sentence or two
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = field(default_factory=tuple)


def heat_map(
    label: str,
    values: F64,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row_axis: str,
    column_axis: str,
    show: Callable[[float], str],
    relative: bool = False,
) -> HeatMap:
    """Made small enough to be looked at. The scale begins at 0, or where `relative` at the least
    value (figures around a mean), and ends at the largest. `show`: a value as text.
    """
    step = -(-len(rows) // MOST_ROWS) if len(rows) else 1
    if step > 1:
        groups = [values[i : i + step] for i in range(0, len(rows), step)]
        values = np.array([_largest(g) for g in groups])
        rows = [
            f"{rows[i]}–{rows[min(i + step, len(rows)) - 1]}" for i in range(0, len(rows), step)
        ]
    wide = -(-len(columns) // MOST_COLUMNS) if len(columns) else 1
    if wide > 1:
        groups = [values[:, i : i + wide].T for i in range(0, len(columns), wide)]
        values = np.array([_largest(g) for g in groups]).T
        columns = columns[::wide]
    known = values[np.isfinite(values)]
    top = float(known.max()) if known.size else 0.0
    bottom = float(known.min()) if known.size and relative else 0.0
    return HeatMap(label, tuple(rows), tuple(columns), row_axis, column_axis, values, bottom, top,
                   show(bottom), show(top))  # fmt: skip


def levels(plot: HeatMap, most: int) -> npt.NDArray[np.int64]:
    """[row, column] 0 to `most`, by where the value is on the scale; -1 where it is not known."""
    span = plot.top - plot.bottom
    share = (plot.values - plot.bottom) / span if span > 0 else np.zeros_like(plot.values)
    level = np.clip(np.ceil(np.nan_to_num(share) * most - 1e-9), 0, most)
    return np.where(np.isfinite(plot.values), level, -1).astype(np.int64)


def _largest(group: F64) -> F64:
    """[column] largest known value of the rows; NaN where none is known."""
    filled = np.where(np.isfinite(group), group, -np.inf).max(axis=0)
    largest: F64 = np.where(np.isfinite(filled), filled, np.nan)
    return largest


def times(value: float) -> str:
    return f"{value:.2f}×"


def three(value: float) -> str:
    """Three significant digits or all before the point, never an exponent."""
    rounded = float(f"{value:.3g}")
    return f"{value:.0f}" if abs(rounded) >= 1000 else f"{rounded:g}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def share(value: float, digits: int = 1) -> str:
    if not np.isfinite(value):
        return "–"
    return f"{round(100 * value, digits) + 0.0:.{digits}f} %"  # + 0.0: no minus before a zero


def seconds(value: float) -> str:
    """With the unit that suits: 1.25 ms, 3.10 s."""
    if not np.isfinite(value):
        return "–"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * factor >= 0.9995:
            return f"{three(value * factor)} {unit}"
    return "0 s" if value == 0 else f"{three(value * 1e9)} ns"


def size(value: float) -> str:
    """Bytes, with the unit that suits."""
    if not np.isfinite(value):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{three(value)} {unit}"
        value /= 1024
    return f"{three(value)} TiB"
