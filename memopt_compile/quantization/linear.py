"""Linear formats of 8, 10 and 12 bits, for parameters and gradients: `formats.Linear`.

    x ≈ scale · code / B,   |code| ≤ B = 2^(bits−1) − 1,   scale = max|x| of the block

The largest element of a block is exact, nothing overflows, and encoding what was decoded gives the
same codes again. (δ of the LPMM paper, its equation 6, is scale/B, computed anew each time.) A
block with an element that is not finite comes back as NaN throughout.

A code is kept in two's complement: its lower 8 bits in a byte of `low`, and of what is above them
2 or 4 bits in `high`, which has those of 4 or 2 neighbours in one byte. So 4 codes of 10 bits take
5 bytes, 2 of 12 bits 3 bytes, and a tail no more than its last byte of `high`. With 8 bits there is
no `high`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import packed, unpacked, whole_blocks
from .formats import Linear
from .rounding import moves, noise, places_from

TOGETHER = 4  # elements that may share a byte: slabs and blocks are multiples of it


def encode(value: Tensor, form: Linear, draws: Any = 0, first: Any = 0) -> list[Tensor]:
    """[low, (high,) scales] of all elements in row-major order: uint8, uint8, float32.

    In float32 each gets its nearest point, or with a seed one of the two around it, which `draws`
    (a count, see `rounding.noise`) and its place, from `first` on, decide.
    """
    count, most = value.numel(), form.largest
    blocks = whole_blocks(value.reshape(-1).to(torch.float32), form.block).view(-1, form.block)
    scales = blocks.abs().amax(1, keepdim=True)
    scales = torch.where(scales.isfinite(), scales, float("nan"))
    codes = (blocks / torch.where(scales == 0, 1.0, scales) * most).round().clamp(-most, most)
    if form.seed is not None:
        drawn = noise(places_from(first + form.first, blocks), form.seed, draws).view(blocks.shape)
        near = codes / most * scales
        others = (blocks - near).sign().add(codes).clamp(-most, most)
        codes = (others - codes).mul(moves(blocks, near, others / most * scales, drawn)).add(codes)
    return [*planes_of(codes.to(torch.int32).view(-1)[:count], form.bits), scales.view(-1)]


def decode(parts: Sequence[Tensor], form: Linear, count: int) -> Tensor:
    """The `count` elements as a vector of float32."""
    *planes, scales = parts
    codes = whole_blocks(codes_of(planes, form.bits, count), form.block).view(-1, form.block)
    return (codes.to(torch.float32) / form.largest * scales[:, None]).view(-1)[:count]


def planes_of(codes: Tensor, bits: int) -> list[Tensor]:
    """[low, (high)] of a vector of int32."""
    low = (codes & 255).to(torch.uint8)
    if bits == 8:
        return [low]
    width = bits - 8
    rest = (codes >> 8) & (2**width - 1)
    return [low, packed(whole_blocks(rest, 8 // width).view(-1, 8 // width), width)]


def codes_of(planes: Sequence[Tensor], bits: int, count: int) -> Tensor:
    """The vector of int32 again."""
    codes = planes[0].to(torch.int32)
    if bits > 8:
        codes = codes | (unpacked(planes[1].to(torch.int32), bits - 8).view(-1)[:count] << 8)
    half = 2 ** (bits - 1)
    return (codes ^ half) - half
