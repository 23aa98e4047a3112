"""A report as plain text, for a terminal or a file."""

from __future__ import annotations

import textwrap

import numpy as np

from lanterne.collector.report import Bars, Document, HeatMap, Section, Table, levels

WIDTH = 96
SHADES = " ░▒▓█"
BAR = 32
MAP_COLUMNS = 64
MAP_ROWS = 32


def text(document: Document) -> str:
    lines = [document.title, "=" * len(document.title), "", *_wrapped(document.lead), ""]
    width = max((len(name) for name, _ in document.facts), default=0)
    lines += [f"{name:<{width}}  {value}" for name, value in document.facts]
    for section in document.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> list[str]:
    lines = ["", section.heading, "-" * len(section.heading)]
    for sentence in section.text:
        lines += _wrapped(sentence)
    if section.table is not None:
        lines += ["", *_table(section.table)]
    for plot in section.plots:
        lines += ["", *(_bars(plot) if isinstance(plot, Bars) else _map(plot))]
    return lines


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH) or [""]


def _table(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _bars(bars: Bars) -> list[str]:
    longest = max((abs(v) for v in bars.lengths if np.isfinite(v)), default=0.0)
    width = max((len(name) for name in bars.names), default=0)
    lines = [bars.label]
    for name, length, value in zip(bars.names, bars.lengths, bars.values, strict=True):
        known = longest > 0 and np.isfinite(length)
        filled = round(BAR * max(length, 0.0) / longest) if known else 0
        lines.append(f"  {name:<{width}}  {'█' * filled:<{BAR}}  {value}")
    return lines


def _map(plot: HeatMap) -> list[str]:
    """Every n-th row and column where there are more than fit."""
    values = levels(plot, len(SHADES) - 1)
    across = -(-values.shape[1] // MAP_COLUMNS) if values.size else 1
    down = -(-values.shape[0] // MAP_ROWS) if values.size else 1
    width = max((len(row) for row in plot.rows), default=0)
    lines = [
        f"{plot.label} ({plot.row_axis} × {plot.column_axis}; blank is {plot.low}, █ {plot.high})"
    ]
    for r in range(0, values.shape[0], down):
        cells = ""
        for c in range(0, values.shape[1], across):
            part = values[r : r + down, c : c + across]
            cells += SHADES[int(part.max())] if part.max() >= 0 else "·"
        lines.append(f"  {plot.rows[r]:>{width}} {cells}")
    if plot.columns:
        lines.append(f"  {'':>{width}} {plot.columns[0]} … {plot.columns[-1]}")
    return lines
