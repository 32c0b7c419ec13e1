"""Blocks of a moment as the outer product of their row and column means: one bit an element, or none.

    x ≈ ± R·C / mean(x)        R, C: means of |x| over the 64 columns and the 64 rows of a block

which has the row and column sums of |x| (Adafactor's approximation, arXiv 1804.04235, of the magnitudes; to keep
the signs of a first moment beside it is SMMF's idea, arXiv 2412.08894). A block is 64 · 64 elements in row-major
order, with factors of its own. So it is cut and written like any other format, slab by slab, and is nearer to the
tensor than one product for the whole of it. Means are over the elements that there are: the last block may have
fewer.

Beside the signs, eight to a byte, the parts are R and C / mean(x) of each block, float32: 128 for 4,096 elements.
That is 0.25 bytes an element, or 0.125 without signs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import packed, unpacked, whole_blocks

SIDE = 64


class Factored(NamedTuple):
    """How a tensor is stored: a sign for each element if it is `signed`, and two vectors for each block."""

    signed: bool
    block: int = SIDE * SIDE
    seed: int | None = None
    """Not used: nothing is rounded."""
    first: int = 0
    bits: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (SIDE, SIDE)

    def sizes(self, count: int) -> tuple[int, int]:
        """Bytes of the signs and number of the means of `count` elements."""
        return math.ceil(count / 8) * self.signed, math.ceil(count / self.block) * 2 * SIDE

    def part_sizes(self, count: int) -> list[int]:
        """Elements of each part that `encode` makes of `count`."""
        return list(self.sizes(count))

    @property
    def map(self) -> str:
        return "signed" if self.signed else "unsigned"


def encode(value: Tensor, form: Factored) -> tuple[Tensor, Tensor]:
    """(signs, means) of all elements in row-major order: uint8, float32."""
    flat = value.reshape(-1).to(torch.float32)
    count = flat.numel()
    blocks = whole_blocks(flat, form.block).view(-1, SIDE, SIDE)
    sizes = blocks.abs() if form.signed else blocks
    rows, columns, all_of_it = _counts(count, form, flat.device)
    row, column = sizes.sum(2) / rows, sizes.sum(1) / columns
    mean = sizes.sum((1, 2)).div(all_of_it).unsqueeze(1)
    means = torch.cat((row, column / torch.where(mean == 0, 1.0, mean)), 1).view(-1)
    if not form.signed:
        return torch.empty(0, dtype=torch.uint8, device=flat.device), means
    return packed((whole_blocks(flat, 8) < 0).view(-1, 8).to(torch.uint8), 1), means


def decode(signs: Tensor, means: Tensor, form: Factored, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements as a vector."""
    row, column = means.to(dtype).view(-1, 2, SIDE).unbind(1)
    value = (row.unsqueeze(2) * column.unsqueeze(1)).view(-1)[:count]
    if not form.signed:
        return value
    negative = unpacked(signs, 1).view(-1)[:count] != 0
    return torch.where(negative, -value, value)


def _counts(count: int, form: Factored, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """How many elements rows, columns and blocks have, at least 1: all of them float32. (Of integers Inductor makes
    an index, which its code for GPUs cannot order.)"""
    full, rest = divmod(count, form.block)
    rows, all_of_it = torch.full((full, SIDE), float(SIDE), device=device), torch.full((full,), float(form.block), device=device)
    if not rest:
        return rows, rows, all_of_it
    places = torch.arange(SIDE, dtype=torch.float32, device=device)
    of_rows, of_columns = rest - places * SIDE, ((rest - places + SIDE - 1) / SIDE).floor()
    return (*(torch.cat((rows, last.clamp(1, SIDE).unsqueeze(0))) for last in (of_rows, of_columns)),
            torch.cat((all_of_it, all_of_it.new_full((1,), float(rest)))))
