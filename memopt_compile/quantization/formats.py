"""Blockwise formats: a code of a few bits for each element, a scale for each block.

    x ≈ scale · points[code]

The scale is the element of largest magnitude, with its sign, and the largest point is 1: that
element is exact, whichever its sign, and encoding what was decoded gives the same codes again.
A block of zeros has scale 0.

The points of a dynamic map are denser the smaller they are: a decade more of range for each bit
that is spent on it. The maps for non-negative values have no zero: a second moment that is read as
0 would make an enormous step. In place of 0 the one of 8 bits has the lower end of its range.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Format(NamedTuple):
    """How a tensor is stored: bits of a code, elements of a block, ascending points of the map."""

    bits: int
    block: int
    points: tuple[float, ...]

    def sizes(self, count: int) -> tuple[int, int]:
        """Bytes of the codes and number of the scales of `count` elements."""
        return math.ceil(count * self.bits / 8), math.ceil(count / self.block)


def dynamic_map(bits: int, signed: bool) -> tuple[float, ...]:
    """The 2^bits points 0 (unsigned: 10^−d), 1, and the middles of equal parts of d decades."""
    decades = bits - 1
    points = [0.0 if signed else 10.0**-decades, 1.0]
    for i in range(decades):
        parts = 2**i if signed else 2 ** (i + 1)
        middles = [(0.1 + 0.9 * (j + 0.5) / parts) * 10.0 ** (i - decades + 1) for j in range(parts)]
        points += middles + [-m for m in middles if signed]
    return tuple(sorted(points))


# Formats by (bits, whether values may be negative).
FORMATS = {
    (8, True): Format(8, 256, dynamic_map(8, True)),
    (8, False): Format(8, 256, dynamic_map(8, False)),
    (4, True): Format(4, 128, dynamic_map(4, True)),
    (4, False): Format(4, 128, tuple((i + 1) / 16 for i in range(16))),
}


def encode(value: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """(codes, scales) of all elements in row-major order: uint8, two 4-bit codes in one; float32.

    Each element gets its nearest point, in float32. NaN and infinite values have none.
    """
    count = value.numel()
    flat = value.reshape(-1).to(torch.float32)
    blocks = F.pad(flat, (0, -count % form.block)).view(-1, form.block)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    codes = nearest((blocks / torch.where(scales == 0, 1.0, scales)).view(-1), form)
    if form.bits == 4:
        codes = codes[0::2] | (codes[1::2] << 4)
    return codes[:form.sizes(count)[0]], scales.view(-1)


def decode(codes: Tensor, scales: Tensor, form: Format, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements as a vector."""
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)
    points = torch.tensor(form.points, dtype=dtype, device=codes.device)
    flat = F.pad(points.index_select(0, codes[:count].int()), (0, -count % form.block))
    return (flat.view(-1, form.block) * scales.to(dtype)[:, None]).view(-1)[:count]


def nearest(shares: Tensor, form: Format) -> Tensor:
    """The codes, uint8, of a float32 vector within [−1, 1].

    A binary search for each element is slow on a CPU. In eager a table knows the code of the
    least element of each cell of 2^16 floats; a cell holds one boundary at most, and one comparison
    tells on which side of it an element is. The codes are the same.
    """
    if torch.compiler.is_compiling():
        return torch.bucketize(shares, boundaries(form, shares.device)).to(torch.uint8)
    table, ends = _cells(form, shares.device)
    guess = table.index_select(0, (shares.view(torch.int32) >> 16) & 0xFFFF)
    return guess + (shares > ends.index_select(0, guess.int()))


def boundaries(form: Format, device: torch.device) -> Tensor:
    """The middles between neighbouring points."""
    points = torch.tensor(form.points, dtype=torch.float32, device=device)
    return (points[1:] + points[:-1]) / 2


@functools.cache
def _cells(form: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    """For `nearest`: the code of each cell's least element, and the upper boundary of each code."""
    first = (torch.arange(1 << 16, device=device) << 16).to(torch.int32)
    last = first | 0xFFFF
    least = torch.where(first < 0, last, first).view(torch.float32).nan_to_num()
    ends = boundaries(form, device)
    end = torch.full((1,), torch.inf, device=device)
    return torch.bucketize(least, ends).to(torch.uint8), torch.cat((ends, end))
