"""Blockwise formats: a code of a few bits for each element, a scale for each block.

    x ≈ scale · points[code]

The scale is the element of largest magnitude, with its sign, and the largest point is 1: that
element is exact, whichever its sign, and encoding what was decoded gives the same codes again.
A block of zeros has scale 0.

The points of a dynamic map are denser the smaller they are: a decade more of range for each bit
that is spent on it. The maps for non-negative values have no zero: a second moment that is read as
0 would make an enormous step. In place of 0 the one of 8 bits has the lower end of its range.

Parameters and their gradients are kept in linear formats: see `linear`. A format with a seed rounds
stochastically (`rounding.moves`): each element to one of the two points around it, and in the mean
to itself, but for one beyond the first point, which is all there is on its side: that of least magnitude
of a map without 0, or of the largest one below 0. One without a seed rounds to the nearest.

Of one bit, a sign, or none are blocks that are kept as factors: see `factored`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import arithmetic, factored, tables
from .blocks import extremes, packed, whole_blocks
from .factored import Factored
from .rounding import moves, noise, places_from


class Format(NamedTuple):
    """How a tensor is stored: bits of a code, elements of a block, ascending points of the map."""

    bits: int
    block: int
    points: tuple[float, ...]
    decades: int = 0
    """Of a dynamic map. The points of another are at equal distances."""
    seed: int | None = None
    """By which it is rounded stochastically; None: to the nearest."""
    first: int = 0
    """The place of its first element in the whole, of which it may be this rank's part."""

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

    def part_sizes(self, count: int) -> list[int]:
        """Elements of each part that `encode` makes of `count`."""
        return list(self.sizes(count))

    @property
    def map(self) -> str:
        """The key of its maps, whatever its bits and block."""
        return "signed" if self.points[0] < 0 else "unsigned"


class Linear(NamedTuple):
    """How a parameter or its gradient is stored: points at equal distances, as many on either side
    of 0, the code in `bits` of a byte or more (see `linear`), a positive scale for each block."""

    bits: int
    block: int = 2048
    seed: int | None = None
    """By which it is rounded stochastically; None: to the nearest."""
    first: int = 0
    """The place of its first element in the whole, of which it may be this rank's part."""

    @property
    def largest(self) -> int:
        """The code of the scale itself, B in the points −B/B .. B/B."""
        return 2 ** (self.bits - 1) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.block,)

    def sizes(self, count: int) -> tuple[int, int]:
        """Bytes of the codes and number of the scales of `count` elements."""
        return count + math.ceil(count * (self.bits - 8) / 8), math.ceil(count / self.block)

    def part_sizes(self, count: int) -> list[int]:
        """Elements of each part that `linear.encode` makes of `count`."""
        codes, scales = self.sizes(count)
        return [count, codes - count, scales] if self.bits > 8 else [count, scales]

    @property
    def map(self) -> str:
        return "linear"


def dynamic_map(bits: int, signed: bool) -> tuple[float, ...]:
    """The 2^bits points 0 (unsigned: 10^−d), 1, and the middles of equal parts of d decades."""
    decades = bits - 1
    points = [0.0 if signed else 10.0**-decades, 1.0]
    for i in range(decades):
        parts = 2**i if signed else 2 ** (i + 1)
        middles = [(0.1 + 0.9 * (j + 0.5) / parts) * 10.0 ** (i - decades + 1) for j in range(parts)]
        points += middles + [-m for m in middles if signed]
    return tuple(sorted(points))


def encode(value: Tensor, form: Format | Factored, draws: Any = 0, first: Any = 0,
           by: Any = None) -> tuple[Tensor, Tensor]:
    """(codes, scales) of all elements in row-major order: uint8, see `Format.shape`; float32.

    In float32 each element gets its nearest point, or with a seed one of the two around it, which
    `draws` (a count, see `rounding.noise`) and its place, from `first` on, decide. NaN and infinite
    values have none. `by` is `tables` or `arithmetic`: None, what is faster here.
    """
    if isinstance(form, Factored):
        return factored.encode(value, form)
    count = value.numel()
    flat = whole_blocks(value.reshape(-1).to(torch.float32), form.block)
    blocks = flat.view(-1, *form.shape)
    inner = list(range(1, blocks.dim()))
    scales = extremes(blocks, inner) if form.points[0] < 0 else blocks.amax(inner, keepdim=True)
    shares = blocks / torch.where(scales == 0, 1.0, scales)
    codes = (by or _faster()).codes(shares, form)
    if form.seed is not None:
        drawn = noise(places_from(first + form.first, flat), form.seed, draws).view(shares.shape)
        codes = _one_of_two(shares, codes, form, drawn, by or _faster())
    if form.bits == 4:
        codes = packed(codes, 4)
    return codes.view(-1)[:form.sizes(count)[0]], scales.view(-1)


def _one_of_two(shares: Tensor, codes: Tensor, form: Format, drawn: Tensor, by: Any) -> Tensor:
    """The codes of the nearest points, or where `drawn` says so those on the other side of a share.

    By sums and products: to choose by `torch.where` takes a CPU as long as twenty of them.
    """
    point = partial(by.points, form=form, dtype=torch.float32) if form.bits == 8 else partial(
        arithmetic.of_numbers, form=form, dtype=torch.float32)
    points, near = point(codes), codes.to(torch.int32)
    other = (shares - points).sign().to(torch.int32).add(near).clamp(0, len(form.points) - 1)
    go = moves(shares, points, point(other.to(torch.uint8)), drawn)
    return (other - near).mul(go).add(near).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, form: Format | Factored, count: int, dtype: torch.dtype,
           by: Any = None) -> Tensor:
    """The `count` elements as a vector."""
    if isinstance(form, Factored):
        return factored.decode(codes, scales, form, count, dtype)
    size = form.block * form.bits // 8
    blocks = whole_blocks(codes, size).view(-1, size)
    values = (by or _faster()).points(blocks, form, dtype)
    return values.mul_(scales.to(dtype).view(-1, *[1] * len(form.shape))).view(-1)[:count]


def _faster() -> Any:
    return arithmetic if torch.compiler.is_compiling() else tables
