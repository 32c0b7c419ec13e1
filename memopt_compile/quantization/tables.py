"""The codes of `arithmetic` by tables: what is fast without a compiler."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import arithmetic

if TYPE_CHECKING:
    from .formats import Format


def codes(shares: Tensor, form: Format) -> Tensor:
    """What `arithmetic.codes` gives for contiguous float32 shares.

    A table is read by the upper 16 bits of a float: among the floats of one such cell there is one
    boundary between codes at most, and what the table holds carries from the lower 16 bits into
    the code where they are past it.
    """
    bits = shares.view(-1).view(torch.int32)
    result = _cells(form, shares.device).index_select(0, (bits >> 16).bitwise_and_(0xFFFF))
    result.add_(bits).bitwise_right_shift_(16)
    if form.points[0] < 0:  # among negative floats more bits are a lesser number
        result.bitwise_xor_(bits >> 31)
    return result.to(torch.uint8).view(shares.shape)


def points(blocks: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """What `arithmetic.points` gives."""
    flat = blocks.view(-1)
    index = flat.view(torch.uint16).to(torch.int32) if form.bits == 8 else flat.to(torch.int32)
    pairs = _pairs(form, dtype, flat.device).index_select(0, index).view(dtype)
    if form.bits == 8:
        return pairs.view(blocks.shape)
    return pairs.view(*blocks.shape, 2).transpose(1, 2).contiguous()


@functools.cache
def _cells(form: Format, device: torch.device) -> Tensor:
    """For `codes`: int32 by the upper 16 bits of a float, to be added to the float's bits.

    The upper 16 bits of the sum are then the code, or of a negative float the code's inverse.
    """
    first = (torch.arange(1 << 16) << 16).to(torch.int32)  # of lowest magnitude in each cell

    def code(bits: Tensor) -> Tensor:
        shares = bits.view(torch.float32).nan_to_num().clamp(-1 if form.points[0] < 0 else 0, 1)
        return arithmetic.codes(shares, form).to(torch.int32)

    low, same = code(first), torch.zeros_like(first)
    for bit in reversed(range(16)):  # search for the last lower bits that still have the code `low`
        more = same | 1 << bit
        same = torch.where(code(first | more) == low, more, same)
    wanted = torch.where(first < 0, ~low, low)
    return ((wanted << 16) - first + (0xFFFF - same)).to(device)


@functools.cache
def _pairs(form: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The points of two codes as one number of twice the size: half as many are looked up."""
    points = arithmetic.of_numbers(torch.arange(2**form.bits), form, dtype)
    pair = {torch.float32: torch.float64, torch.float64: torch.complex128}[dtype]
    both = torch.arange(4**form.bits)
    both = torch.stack((both & 2**form.bits - 1, both >> form.bits), dim=1)
    return points[both].view(pair).view(-1).to(device)
