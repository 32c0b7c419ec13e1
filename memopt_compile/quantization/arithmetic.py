"""The codes of `formats` by arithmetic: what a compiler fuses and vectorizes, as no table is.

A dynamic map numbers the points of one sign from 1, upwards. Those numbered P to 2P − 1 are the
middles of P equal parts of a decade that ends at D; the next decade has twice as many parts.

    point k = D · (0.1 + 0.9 · (k + ½ − P) / P)         the element x is in part P·(x/D + 0.8)/0.9

Either is a line within a decade. From one decade to the next the first gets steeper and the second
flatter, each without a jump: they are sums of ramps, of which a decade adds one. A ramp takes four
instructions, whichever decade the element is in; a comparison and a choice take more.

What these functions give is the definition of a format: `tables` are made by calling them. So
eager and captured steps write the same codes, bit by bit. Against the exact map they round: an
element nearer to the middle of two points than 2⁻¹⁴ of their distance may get the other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .blocks import unpacked

if TYPE_CHECKING:
    from .formats import Format

# Where the line of a decade meets the last one's, its first part has already lasted this share of
# its length: between the last point of a decade and the first of the next is more than one part.
LATE = 0.2


class Line(NamedTuple):
    """x ↦ slope · x + start."""

    slope: float
    start: float


def codes(shares: Tensor, form: Format) -> Tensor:
    """The codes, uint8, of the points nearest to float32 shares within [−1, 1]."""
    if not form.decades:
        count = len(form.points)
        return (shares * count - 0.5).ceil().clamp(1, count).sub(1).to(torch.uint8)
    zero, first = numbering(form)
    size = shares.abs() if zero else shares
    # Beside the flattest line, that of the largest elements, to which no ramp reaches: so that
    # terms of like size are added, as the steepest line is far above the result.
    part = below(size, part_lines(form))
    power = (part.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^⌊log₂ part⌋
    number = torch.where(part - power < LATE, part - LATE, part).floor()
    if zero:
        number = torch.where(shares < 0, -number, number)
    last = first * 2**form.decades  # of 1, half a part above its predecessor
    number = torch.where(shares > (form.points[-2] + 1) / 2, float(last), number)
    return (number + (zero - (first - 1))).to(torch.uint8)


def points(blocks: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """The points, of `dtype`, of blocks of codes, each a row of bytes."""
    if form.bits == 4:
        blocks = unpacked(blocks.to(torch.int32), 4)
    return of_numbers(blocks, form, dtype)


def of_numbers(codes: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """The point of each code."""
    if not form.decades:
        return (codes.to(dtype) + 1) / len(form.points)
    zero, first = numbering(form)
    number = codes.to(dtype) - (zero - (first - 1))
    size = number.abs() if zero else number
    point = above(size, point_lines(form))
    point = torch.where(size < first * 2**form.decades, point, 1.0)
    return torch.where(number < 0, -point, point) if zero else point


def numbering(form: Format) -> tuple[int, int]:
    """The code of the point of least magnitude, and the number of the next one."""
    return (2**form.decades - 1, 1) if form.points[0] < 0 else (0, 2)


def decades(form: Format) -> list[tuple[float, float]]:
    """(D, P) of each: the share at which it ends, the number of its parts and of its first point."""
    _, first = numbering(form)
    return [(10.0 ** (i + 1 - form.decades), first * 2.0**i) for i in range(form.decades)]


def point_lines(form: Format) -> list[Line]:
    """Each steeper than the last: from number to point, the first one to that of least magnitude."""
    zero, first = numbering(form)
    lines = [Line(0.9 * end / parts, end * (0.45 / parts - 0.8)) for end, parts in decades(form)]
    least = form.points[zero]
    rise = lines[0].slope * first + lines[0].start - least
    return [Line(rise, least - rise * (first - 1)), *lines]


def part_lines(form: Format) -> list[Line]:
    """Each flatter than the last: from share to part."""
    zero, first = numbering(form)
    lines = [Line(parts / (0.9 * end), parts * 8 / 9) for end, parts in decades(form)]
    # The first begins `LATE` too, between the two points of least magnitude. A decade of one part
    # has no other middle to meet, and its line is moved there; else a steeper one leads there.
    middle = (form.points[zero] + form.points[zero + 1]) / 2
    slope = lines[0].slope * first
    lowest = Line(slope, first + LATE - slope * middle)
    return [lowest, *lines[1:]] if first == 1 else [lowest, *lines]


def above(x: Tensor, lines: list[Line]) -> Tensor:
    """The highest of lines that get steeper."""
    result = x * lines[0].slope + lines[0].start
    for one, other in zip(lines, lines[1:]):
        result = result + (x * (other.slope - one.slope) + (other.start - one.start)).relu()
    return result


def below(x: Tensor, lines: list[Line]) -> Tensor:
    """The lowest of lines that get flatter."""
    result = x * lines[-1].slope + lines[-1].start
    for one, other in zip(reversed(lines[:-1]), reversed(lines[1:])):
        result = result - (x * (other.slope - one.slope) + (other.start - one.start)).relu()
    return result
