"""Draw memory over time: one or several timelines, their peaks and a budget, as one picture.

A single measurement is drawn with what holds the bytes, category upon category.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from memopt_compile.measure import Measurement

Timeline = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 900, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 876, 92, 404  # the plot's edges inside the picture
_COLORS = 7  # how many lines or categories look different

# Colours that people with any colour vision tell apart, in a light and a dark set.
_STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --faint: #59636e; --grid: #e3e7eb; --budget: #b3261e;
  --c0: #0b6bb8; --c1: #c2550a; --c2: #00795c; --c3: #a3447f; --c4: #7a6a00; --c5: #5b51b5;
  --c6: #6b5b52; background: var(--page);
  font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --page: #14171b; --ink: #e8eaed; --faint: #a3abb5;
  --grid: #2c3138; --budget: #ff8a80; --c0: #5db3f5; --c1: #f7a35c; --c2: #40c99b;
  --c3: #e493c4; --c4: #d6c13c; --c5: #aaa2f2; --c6: #c0aea4; } }
text { fill: var(--ink); } .faint { fill: var(--faint); } .title { font-size: 17px;
  font-weight: 600; } .grid { stroke: var(--grid); } .number { font-weight: 600;
  paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.budget { stroke: var(--budget); stroke-width: 1.5; stroke-dasharray: 6 4; }
text.over { fill: var(--budget); } .line { fill: none; stroke-width: 1.6; } .area { opacity: .1; }
.band { stroke: var(--page); stroke-width: .5; }
"""


def draw(
    timelines: Measurement | Mapping[str, Measurement | Timeline] | Timeline,
    path: str | Path,
    budget_bytes: int | None = None,
    title: str = "Memory over one call",
) -> None:
    """Write a picture of memory over time to `path`: an SVG, or a page holding it for `.html`.

    `timelines` is a measurement, drawn by category, or (position, live bytes) pairs, or several of
    these by label, say before and after. If all are measurements the horizontal axis is time; otherwise each
    timeline is stretched over its own length, so that a planned one compares with a measured one.
    Raises ValueError if there is nothing to draw, and OSError if the file cannot be written.
    """
    named = dict(timelines) if isinstance(timelines, Mapping) else {"": timelines}
    if not named or not all(_points(each) for each in named.values()):
        raise ValueError("no timeline to draw: each needs at least one (position, bytes) pair")
    timed = all(isinstance(each, Measurement) for each in named.values())
    lines = {label: _stretched(_points(each), timed) for label, each in named.items()}
    end = max(line[-1][0] for line in lines.values()) or 1.0
    peak = max(value for line in lines.values() for _, value in line)
    axis = "milliseconds" if timed else "progress through the call (%)"
    parts, x, y = frame(title, max(peak, budget_bytes or 0), end, axis)

    numbers: list[tuple[float, float]] = []  # where peaks' numbers already stand
    labels, legend = [], float(_LEFT)

    def shape(line: Timeline) -> tuple[str, str]:
        trace = _trace([(x(position), y(size)) for position, size in line])
        return trace, f"{trace}V{y(0):.1f}H{_LEFT}Z"

    def name(label: str, color: str) -> str:
        nonlocal legend
        swatch = f'x="{legend}" y="50" width="14" height="10" rx="2" style="fill:{color}"'
        text = f'<rect {swatch}/><text x="{legend + 20}" y="60">{escape(label)}</text>'
        legend += 40 + 7.4 * len(label)
        return text

    if isinstance(timelines, Measurement):
        for index, (label, line) in enumerate(_piled(timelines).items()):
            color = f"color-mix(in srgb, var(--c{index % _COLORS}) 45%, var(--page))"
            parts.insert(0, f'<path class="band" style="fill:{color}" d="{shape(_stretched(line, timed))[1]}"/>')
            parts.append(name(label, color))
    for index, (label, line) in enumerate(lines.items()):
        color = f"var(--c{index % _COLORS})"
        trace, shut = shape(line)
        parts.append(f'<path class="area" style="fill:{color}" d="{shut}"/>')
        parts.append(f'<path class="line" style="stroke:{color}" d="{trace}"/>')
        position, size = max(line, key=lambda point: point[1])
        at, height = x(position), y(size)
        parts.append(f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" style="fill:{color}"/>')
        at, height = min(max(at, _LEFT + 46), _RIGHT - 46), height - 10
        while any(abs(at - u) < 96 and abs(height - v) < 17 for u, v in numbers):
            height += 17  # Below the other number, where the line itself is not.
        numbers.append((at, height))
        style = f'style="fill:{color}" {_MID}'
        text = f"{size / 2**20:,.1f} MiB"
        labels.append(f'<text class="number" x="{at:.1f}" y="{height:.1f}" {style}>{text}</text>')
        if label:
            parts.append(name(label, color))
    if budget_bytes is not None:
        line, label = limit_line("budget", budget_bytes, y)
        parts.append(line)
        labels.append(label)
    write_picture(parts + labels, path, title)


def frame(title: str, largest_bytes: float, end: float,
          axis: str) -> tuple[list[str], Callable[[float], float], Callable[[float], float]]:
    """Title, grid and numbers of a picture of MiB over 0 to `end`; where a position is, where bytes are."""
    step, top = scale(largest_bytes / 2**20)

    def x(position: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * position / end

    def y(size: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * size / 2**20 / top

    parts = [f'<text class="title" x="{_LEFT}" y="32">{escape(title)}</text>']
    for tick in range(round(top / step) + 1):
        at, label = y(tick * step * 2**20), f"{tick * step:,.10g}"
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>')
        parts.append(f'<text class="faint" x="{_LEFT - 8}" y="{at + 4:.1f}" {_END}>{label}</text>')
    parts.append(f'<text class="faint" x="{_LEFT - 8}" y="{_TOP - 14}" {_END}>MiB</text>')
    step, _ = scale(end)
    for tick in range(math.floor(end / step + 1e-9) + 1):
        at, label = x(tick * step), f"{tick * step:,.10g}"
        parts.append(f'<text class="faint" x="{at:.1f}" y="{_BOTTOM + 20}" {_MID}>{label}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text class="faint" x="{middle}" y="{_BOTTOM + 42}" {_MID}>{axis}</text>')
    return parts, x, y


def limit_line(name: str, size: int, y: Callable[[float], float]) -> tuple[str, str]:
    """A dashed line across the picture at so many bytes, and its label."""
    at, text = y(size), f"{name} {size / 2**20:,.1f} MiB"
    place = f'x="{_RIGHT}" y="{at - 6:.1f}" {_END}'
    return (f'<path class="budget" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>',
            f'<text class="number over" {place}>{text}</text>')


def write_picture(parts: Sequence[str], path: str | Path, title: str) -> None:
    body = "\n".join(parts)
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}"'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n<style>{_STYLE}</style>\n{body}\n'
    picture += "</svg>\n"
    if Path(path).suffix == ".html":
        head = f'<meta charset="utf-8"/><meta name="color-scheme" content="light dark"/><title>{escape(title)}</title>'
        picture = f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{picture}</body></html>\n"
    Path(path).write_text(picture, encoding="utf-8")


_END, _MID = 'text-anchor="end"', 'text-anchor="middle"'


def _points(timeline: Measurement | Timeline) -> Timeline:
    return timeline.timeline if isinstance(timeline, Measurement) else timeline


def _piled(measurement: Measurement) -> dict[str, list[tuple[float, float]]]:
    """The bytes of each category that is ever there on top of those before it."""
    categories = measurement.categories
    piled, height = {}, [0] * len(categories)
    for label in categories[0][1]:
        sizes = [held[label] for _, held in categories]
        if any(sizes):
            height = [below + size for below, size in zip(height, sizes)]
            piled[label] = [(seconds, at) for (seconds, _), at in zip(categories, height)]
    return piled


def _stretched(points: Timeline, timed: bool) -> list[tuple[float, float]]:
    """Positions as milliseconds, or as percentages of the timeline's own length."""
    start, length = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    factor = 1e3 if timed else 100 / length
    return [((position - start) * factor, size) for position, size in points]


def scale(largest: float) -> tuple[float, float]:
    """A round distance between ticks, and the first tick above the largest value."""
    rough = (largest or 1.0) / 7
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return step, step * math.ceil(largest * 1.06 / step or 1)


def _trace(points: list[tuple[float, float]]) -> str:
    """A step line. Of the changes within half a pixel only the first, extremes and last stay."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0] * 2), []).append(point)
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for column in columns.values():
        heights = [height for _, height in column]
        path += f"H{column[0][0]:.1f}"
        for height in dict.fromkeys((heights[0], min(heights), max(heights), heights[-1])):
            path += f"V{height:.1f}"
        if heights[-1] in heights[:-1]:
            path += f"V{heights[-1]:.1f}"
    return path
