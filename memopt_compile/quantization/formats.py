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

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import arithmetic, tables


class Format(NamedTuple):
    """How a tensor is stored: bits of a code, elements of a block, ascending points of the map."""

    bits: int
    block: int
    points: tuple[float, ...]
    decades: int = 0
    """Of a dynamic map. The points of another are at equal distances."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a block: two codes of 4 bits share a byte, those of its first and second half, which
        so are read and written side by side."""
        return (self.block,) if self.bits == 8 else (2, self.block // 2)

    def sizes(self, count: int) -> tuple[int, int]:
        """Bytes of the codes and number of the scales of `count` elements."""
        whole, rest = divmod(count, self.block)
        size = self.block * self.bits // 8
        return whole * size + min(rest, size), math.ceil(count / self.block)


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
    (8, True): Format(8, 256, dynamic_map(8, True), 7),
    (8, False): Format(8, 256, dynamic_map(8, False), 7),
    (4, True): Format(4, 128, dynamic_map(4, True), 3),
    (4, False): Format(4, 128, tuple((i + 1) / 16 for i in range(16))),
}


def encode(value: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """(codes, scales) of all elements in row-major order: uint8, see `Format.shape`; float32.

    Each element gets its nearest point, in float32. NaN and infinite values have none.
    """
    count = value.numel()
    flat = whole_blocks(value.reshape(-1).to(torch.float32), form.block)
    blocks = flat.view(-1, *form.shape)
    inner = list(range(1, blocks.dim()))
    scales = blocks.amax(inner, keepdim=True)
    if form.points[0] < 0:
        least = blocks.amin(inner, keepdim=True)
        scales = torch.where(scales >= -least, scales, least)
    shares = blocks / torch.where(scales == 0, 1.0, scales)
    codes = (arithmetic if torch.compiler.is_compiling() else tables).codes(shares, form)
    if form.bits == 4:
        codes = codes[:, 0] | (codes[:, 1] << 4)
    return codes.view(-1)[:form.sizes(count)[0]], scales.view(-1)


def decode(codes: Tensor, scales: Tensor, form: Format, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements as a vector."""
    size = form.block * form.bits // 8
    blocks = whole_blocks(codes, size).view(-1, size)
    values = (arithmetic if torch.compiler.is_compiling() else tables).points(blocks, form, dtype)
    return values.mul_(scales.to(dtype).view(-1, *[1] * len(form.shape))).view(-1)[:count]


def whole_blocks(flat: Tensor, block: int) -> Tensor:
    """The vector, with zeros to the end of its last block."""
    missing = -flat.numel() % block
    return F.pad(flat, (0, missing)) if missing else flat
