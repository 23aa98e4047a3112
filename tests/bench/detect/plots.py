"""Line plots as SVG text; of these figures only, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 170, 30, 44
COLOURS = ("#c1121f", "#1d4e89", "#2a9d8f", "#8d6a9f", "#e09f3e", "#6c757d", "#588157", "#333333")
Series = Sequence[tuple[float, float, float] | None]  # value, low, high at each position


def lines(
    title: str,
    x_label: str,
    y_label: str,
    positions: Sequence[str],
    series: Mapping[str, Series],
    *,
    top: float = 1.0,
) -> str:
    """Values from 0 to `top` at equally spaced positions, with their intervals; the first series
    is drawn strongest.
    """
    across = (WIDTH - LEFT - RIGHT) / max(1, len(positions) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 18, title, size=13),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, anchor="middle"),
        _text(6, TOP - 4, y_label),
    ]
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", anchor="end"))
    for i, name in enumerate(positions):
        parts.append(_text(LEFT + i * across, HEIGHT - BOTTOM + 16, name, anchor="middle"))
    # The first is drawn last, on top of the others.
    for number, (name, values) in reversed(list(enumerate(series.items()))):
        parts += _series(number, name, values, across, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series(number: int, name: str, values: Series, across: float, top: float) -> list[str]:
    colour, width = COLOURS[number % len(COLOURS)], 2.4 if number == 0 else 1.2
    at = [(LEFT + i * across, v) for i, v in enumerate(values) if v is not None]
    points = " ".join(f"{x:.1f},{_y(v[0], top):.1f}" for x, v in at)
    parts = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>']
    for x, (value, low, high) in at:
        parts.append(
            f'<line x1="{x:.1f}" y1="{_y(low, top):.1f}" x2="{x:.1f}" y2="{_y(high, top):.1f}" '
            f'stroke="{colour}" stroke-opacity="0.5"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{_y(value, top):.1f}" r="2.5" fill="{colour}"/>')
    y = TOP + 10 + 16 * number
    parts.append(
        f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 8}" width="12" height="4" fill="{colour}"/>'
    )
    parts.append(_text(WIDTH - RIGHT + 32, y - 3, name))
    return parts


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(max(value / top, 0.0), 1.0))


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
