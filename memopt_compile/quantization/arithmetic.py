"""The codes of `formats` by arithmetic: what a compiler fuses and vectorizes, as no table is.

A dynamic map numbers the points of one sign from 1, upwards. Those numbered 2^i to 2^(i+1) − 1 are
the middles of 2^i equal parts of one decade; the next decade has twice as many. So a number's
leading bit says which decade, and its other bits where in it:

    point k = 10^(i−d+1) · (0.1 + 0.9 · (k + ½ − 2^i) / 2^i)        of decade i of d

In float32 this differs from the tables by rounding: an element that is within rounding of the
middle of two points may get the other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .formats import Format


def codes(shares: Tensor, form: Format) -> Tensor:
    """The codes, uint8, of the points nearest to shares within [−1, 1]."""
    if not form.decades:
        count = len(form.points)
        return (shares * count - 0.5).ceil().clamp(1, count).sub(1).to(torch.uint8)
    zero, first = numbering(form)
    least, decades = first - 1, range(form.decades)
    middles = [(low + high) / 2 for low, high in zip(form.points[zero:], form.points[zero + 1:])]
    starts = [middles[first * 2**i - first] for i in decades]
    size = shares.abs() if zero else shares
    count = choose(size, starts, [first * 2.0**i for i in decades])
    slope = choose(size, starts, [first * 2.0**i / (0.9 * 10.0**(i + 1 - form.decades))
                                  for i in decades])
    # Below the middle that ends a decade no element is rounded into the next.
    number = torch.minimum((size * slope + count * (8 / 9)).floor(), count * 2 - 1)
    number = torch.where(size > starts[0], number, float(least))
    if zero:
        number = torch.where(shares < 0, -number, number)
    number = torch.where(shares > middles[-1], float(len(middles) + least), number)
    return (number + (zero - least)).to(torch.uint8)


def points(codes: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """The points, of `dtype`, of bytes of codes."""
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)
    if not form.decades:
        return (codes.to(dtype) + 1) / len(form.points)
    zero, first = numbering(form)
    least, decades = first - 1, range(form.decades)
    number = codes.to(dtype) - (zero - least)
    size = number.abs() if zero else number
    starts = [first * 2.0**i - 0.5 for i in decades]
    decade = choose(size, starts, [10.0**(i + 1 - form.decades) for i in decades])
    part = choose(size, starts, [0.9 / (first * 2.0**i) for i in decades])
    point = decade * (part * (size + 0.5) - 0.8)
    point = torch.where(size > starts[0], point, form.points[zero])
    point = torch.where(size < first * 2**form.decades, point, 1.0)
    return torch.where(number < 0, -point, point) if zero else point


def numbering(form: Format) -> tuple[int, int]:
    """The code of the point of least magnitude, and the number of the next one."""
    return (2**form.decades - 1, 1) if form.points[0] < 0 else (0, 2)


def choose(value: Tensor, starts: list[float], results: list[float]) -> Tensor:
    """The result of the last start that is below `value`; the first if there is none."""
    chosen = torch.full_like(value, results[0])
    for start, result in zip(starts[1:], results[1:]):
        chosen = torch.where(value > start, result, chosen)
    return chosen
