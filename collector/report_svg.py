"""Plots as inline SVG: no script, no file beside them, colours from the page's style.

Cells of one colour are one path, so that thousands of cells stay small. A value is shown by one of
LEVELS colours (CSS class h0, h1, ...), unknown ones by a hatched background.
"""

from __future__ import annotations

from html import escape

import numpy as np

from lanterne.collector.report import Bars, HeatMap, Plot, levels

LEVELS = 9
WIDTH = 760
MAP_HEIGHT = 420
ROW = 26  # of bars
FONT = 12


def svg(plot: Plot, number: int) -> str:
    """`number`: of the plot in the page, for names that must be unique there."""
    return _bars(plot, number) if isinstance(plot, Bars) else _heat_map(plot, number)


def _open(number: int, height: float, title: str, description: str) -> list[str]:
    return [
        f'<svg role="img" aria-labelledby="t{number} d{number}" viewBox="0 0 {WIDTH} {height:g}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f'<title id="t{number}">{escape(title)}</title>',
        f'<desc id="d{number}">{escape(description)}</desc>',
    ]


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{name}>{escape(words)}</text>'


def _bars(bars: Bars, number: int) -> str:
    known = [v for v in bars.lengths if np.isfinite(v)]
    longest = max(known, default=0.0)
    left = 12 + min(300, 7 * max((len(n) for n in bars.names), default=0))
    room = WIDTH - left - 110
    listed = ", ".join(f"{n}: {v}" for n, v in zip(bars.names, bars.values, strict=True))
    lines = _open(number, ROW * len(bars.names) + 8, bars.label, listed[:2000])
    for i, (name, length, value) in enumerate(
        zip(bars.names, bars.lengths, bars.values, strict=True)
    ):
        y = 4 + ROW * i
        width = room * max(length, 0.0) / longest if longest > 0 and np.isfinite(length) else 0.0
        lines.append(_text(left - 8, y + 16, _short(name, left), anchor="end"))
        lines.append(
            f'<rect class="bar" x="{left}" y="{y + 3}" width="{max(width, 1):.1f}" '
            f'height="{ROW - 8}" rx="2"/>'
        )
        lines.append(_text(left + max(width, 1) + 8, y + 16, value, "quiet"))
    return "\n".join([*lines, "</svg>"])


def _heat_map(plot: HeatMap, number: int) -> str:
    rows, columns = plot.values.shape
    left = 16 + min(150, 7 * max((len(r) for r in plot.rows), default=0))
    high = max(4.0, min(22.0, MAP_HEIGHT / max(rows, 1)))
    wide = (WIDTH - left - 4) / max(columns, 1)
    if plot.row_axis == plot.column_axis:
        wide = min(wide, max(high, 10.0))
    bottom = 20 + high * rows
    lines = _open(number, bottom + 66, plot.label, _described(plot))
    lines.append(_text(left, 12, f"{plot.row_axis} ↓   {plot.column_axis} →", "quiet"))
    lines.append(
        f'<rect class="unknown" x="{left}" y="20" width="{wide * columns:.1f}" '
        f'height="{high * rows:.1f}"/>'
    )
    lines += _cells(plot, left, wide, high)
    every = max(1, int(np.ceil(13 / high)))
    lines += [
        _text(left - 6, 20 + high * r + high / 2 + 4, _short(plot.rows[r], left), anchor="end")
        for r in range(0, rows, every)
    ]
    label = max((len(c) for c in plot.columns), default=1)
    apart = max(1, int(np.ceil((7 * label + 12) / wide)))
    lines += [
        _text(left + wide * c, bottom + 14, plot.columns[c], "quiet")
        for c in range(0, columns, apart)
        if left + wide * c + 7 * len(plot.columns[c]) <= WIDTH
    ]
    return "\n".join([*lines, *_scale(plot, left, bottom + 32), "</svg>"])


def _described(plot: HeatMap) -> str:
    """For who cannot see it: what is shown, and where the highest values are."""
    known = np.isfinite(plot.values)
    text = f"Heat map of {plot.values.shape[0]} rows and {plot.values.shape[1]} columns."
    if not known.any() or plot.top <= 0:
        return text + " No value above zero."
    mean = np.where(known, plot.values, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    first = np.argsort(-mean, kind="stable")[:3]
    names = ", ".join(f"{plot.row_axis} {plot.rows[int(r)]}" for r in first)
    return f"{text} Highest in the mean: {names}. The scale is from {plot.low} to {plot.high}."


def _cells(plot: HeatMap, left: float, wide: float, high: float) -> list[str]:
    """One path a colour; neighbours of one colour in a row are one rectangle."""
    paths: dict[int, list[str]] = {}
    for r, row in enumerate(levels(plot, LEVELS - 1).tolist()):
        c = 0
        while c < len(row):
            end = c
            while end < len(row) and row[end] == row[c]:
                end += 1
            if row[c] >= 0:
                x, width = left + wide * c, wide * (end - c)
                paths.setdefault(row[c], []).append(
                    f"M{x:.1f} {20 + high * r:.1f}h{width:.1f}v{high:.1f}h-{width:.1f}z"
                )
            c = end
    return [
        f'<path class="h{n}" shape-rendering="crispEdges" d="{"".join(parts)}"/>'
        for n, parts in sorted(paths.items())
    ]


def _scale(plot: HeatMap, left: float, y: float) -> list[str]:
    each = 22
    lines = [
        f'<rect class="h{n}" x="{left + each * n:g}" y="{y:g}" width="{each}" height="12"/>'
        for n in range(LEVELS)
    ]
    return [
        *lines,
        _text(left, y + 26, plot.low, "quiet"),
        _text(left + each * LEVELS, y + 26, plot.high, "quiet", "end"),
    ]


def _short(words: str, left: float) -> str:
    most = max(4, int((left - 8) / 7))
    return words if len(words) <= most else words[: most - 1] + "…"
