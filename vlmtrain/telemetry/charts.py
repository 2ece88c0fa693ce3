"""Charts as inline SVG, drawn with the page's own colours: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LOW = 640, 250, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 26
_POINTS = 400  # more than these are averaged: a chart has no more pixels to tell them apart


@dataclass(frozen=True)
class Series:
    """A line: y at each x, None where there is none; `colour` is a CSS value."""

    name: str
    colour: str
    values: Sequence[float | None]
    faint: bool = False
    dashed: bool = False


def number(value: float, digits: int = 3) -> str:
    """A number for people: 1,234 or 0.0123 or 12.3M."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{unit}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: float) -> str:
    if abs(value) < 0.0995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(xs: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float]]:
    """(x, y) with means of neighbours where there are too many."""
    pairs = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None and math.isfinite(y)]
    if len(pairs) <= _POINTS:
        return pairs
    result = []
    for i in range(_POINTS):
        part = pairs[i * len(pairs) // _POINTS : (i + 1) * len(pairs) // _POINTS]
        result.append(tuple(sum(column) / len(part) for column in zip(*part, strict=True)))
    return result  # type: ignore[return-value]


def smooth(values: Sequence[float], span: int) -> list[float]:
    """A mean over the last `span` values, exponentially weighted, from the first value on; of those
    that are finite."""
    result: list[float] = []
    top = weight = 0.0
    keep = 1 - 1 / max(span, 1)
    for value in values:
        if math.isfinite(value):
            top, weight = keep * top + value, keep * weight + 1
        result.append(top / weight if weight else math.nan)
    return result


def lines(
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    zero: bool = True,
    percent: bool = False,
    unit: str = "",
    most: float | None = None,
    height: int = HEIGHT,
) -> str:
    """A line chart over steps.

    Args:
        xs: steps.
        series: lines over them.
        zero: let the vertical axis start at 0.
        percent: label it in percent.
        unit: what it counts.
        most: highest value worth showing; spikes above it leave the frame.
        height: of the drawing, for one WIDTH wide.
    """
    drawn = [(one, thin(xs, one.values)) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        return '<p class="none">nothing was measured</p>'
    values = [y for _, points in drawn for _, y in points]
    low, high = (0.0 if zero and min(values) >= 0 else min(values)), max(values)
    if most is not None:
        high = min(high, most)
    pad = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    high += pad
    low -= 0.0 if low == 0 else pad
    first, last = min(xs), max(xs)
    wide = (last - first) or 1
    head = _TOP + 12 if unit else _TOP

    def px(x: float) -> float:
        return _LEFT + (x - first) / wide * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return head + (high - min(y, high)) / (high - low) * (height - head - _BOTTOM)

    parts = [_open(height, ", ".join(one.name for one, _ in drawn))]
    for y in ticks(low, high, 5 if height > LOW else 3):
        label = f"{y:.3g}" if not percent else f"{y * 100:.3g}%"
        label = number(y) if not percent and abs(y) >= 100 else label
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py(y):.1f}" '
            f'y2="{py(y):.1f}"/><text class="tick" x="{_LEFT - 7}" y="{py(y) + 3.5:.1f}" '
            f'text-anchor="end">{label}</text>'
        )
    for x in ticks(first, last, 8):
        if x == int(x):
            parts.append(
                f'<text class="tick" x="{px(x):.1f}" y="{height - 8}" text-anchor="middle">'
                f"{int(x):,}</text>"
            )
    if unit:
        parts.append(f'<text class="tick" x="{_LEFT}" y="{head - 7}">{escape(unit)}</text>')
    for one, points in drawn:
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        style = f"stroke:{one.colour}"
        style += ";stroke-width:1;opacity:.45" if one.faint else ""
        style += ";stroke-dasharray:5 4" if one.dashed else ""
        if len(points) == 1:
            x, y = points[0]
            parts.append(
                f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" style="fill:{one.colour}"/>'
            )
        parts.append(f'<polyline class="line" style="{style}" points="{path}"/>')
    return "".join(parts) + "</svg>" + legend([(one.name, one.colour) for one, _ in drawn])


def areas(xs: Sequence[float], series: Sequence[Series]) -> str:
    """Stacked areas over steps, seconds; negative values count as 0."""
    rows = [(one, thin(xs, [max(v or 0.0, 0.0) for v in one.values])) for one in series]
    points = len(rows[0][1])
    tops = [[0.0] * points]
    for _, row in rows:
        tops.append([below + y for below, (_, y) in zip(tops[-1], row, strict=True)])
    place = [x for x, _ in rows[0][1]]
    # the first steps of a run (and a checkpoint) may take far longer than all others
    ordered = sorted(tops[-1])
    high = min(ordered[-1], 2.2 * ordered[len(ordered) // 2]) * 1.04 or 1.0
    wide = (place[-1] - place[0]) or 1

    def px(x: float) -> float:
        return _LEFT + (x - place[0]) / wide * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return _TOP + (high - min(y, high)) / high * (HEIGHT - _TOP - _BOTTOM)

    parts = [_open(HEIGHT, "seconds of each step by cause")]
    for (one, _), low, top in zip(rows, tops, tops[1:], strict=False):
        if max(t - b for t, b in zip(top, low, strict=True)) <= 0:
            continue
        path = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(place, top, strict=True)]
        path += [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(place[::-1], low[::-1], strict=True)]
        parts.append(f'<polygon style="fill:{one.colour}" points="{" ".join(path)}"/>')
    for y in ticks(0.0, high):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py(y):.1f}" '
            f'y2="{py(y):.1f}"/><text class="tick" x="{_LEFT - 7}" y="{py(y) + 3.5:.1f}" '
            f'text-anchor="end">{seconds(y) if y else 0}</text>'
        )
    for x in ticks(place[0], place[-1], 8):
        if x == int(x):
            parts.append(
                f'<text class="tick" x="{px(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
                f"{int(x):,}</text>"
            )
    return "".join(parts) + "</svg>"


Bar = tuple[str, Sequence[tuple[str, str, float]]]  # label; (name, colour, value) from the left


def bars(rows: Sequence[Bar], label: str, unit: str) -> str:
    """Horizontal stacked bars, one below the other on one scale; totals at their ends."""
    left, right, step, thick = 118, 76, 30, 19
    most = max(sum(value for _, _, value in parts) for _, parts in rows) or 1.0
    height = step * len(rows) + 8
    scale = (WIDTH - left - right) / most
    out = [_open(height, label)]
    for i, (name, parts) in enumerate(rows):
        y, x = 5 + i * step, float(left)
        out.append(
            f'<text class="name" x="{left - 9}" y="{y + 14}" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        total = sum(value for _, _, value in parts)
        for part, colour, value in parts:
            if value <= 0:
                continue
            title = f"{part}: {number(value)} {unit}, {value / total:.1%}"
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(value * scale, 0.6):.1f}" '
                f'height="{thick}" style="fill:{colour}"><title>{escape(title)}</title></rect>'
            )
            x += value * scale
        text = seconds(total) if unit == "s" else f"{number(total)} {unit}"
        out.append(f'<text class="name" x="{x + 7:.1f}" y="{y + 14}">{text}</text>')
    return "".join(out) + "</svg>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Coloured squares with names; a name that comes twice is shown once."""
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in dict(entries).items()
    )
    return f'<div class="legend">{items}</div>'


def _open(height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
