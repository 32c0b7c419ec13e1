"""The codes of `formats` by tables: what is fast without a compiler."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .formats import Format


def codes(shares: Tensor, form: Format) -> Tensor:
    """The codes, uint8, of the points nearest to a float32 vector within [−1, 1].

    A binary search for each element is slow on a CPU. Instead a table is read by the upper 16 bits
    of a float: among the floats of one such cell there is one boundary at most, and what the table
    holds carries from the lower 16 bits into the code where they are past it.
    """
    bits = shares.view(torch.int32)
    result = _cells(form, shares.device).index_select(0, (bits >> 16).bitwise_and_(0xFFFF))
    result.add_(bits).bitwise_right_shift_(16)
    if form.points[0] < 0:  # among negative floats more bits are a lesser number
        result.bitwise_xor_(bits >> 31)
    return result.to(torch.uint8)


def points(codes: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """The points, of `dtype`, of bytes of codes."""
    return _table(form, dtype, codes.device).index_select(0, codes.long()).view(dtype)


def boundaries(form: Format, device: torch.device) -> Tensor:
    """The middles between neighbouring points. An element on one has the lower code."""
    points = torch.tensor(form.points, dtype=torch.float32, device=device)
    return (points[1:] + points[:-1]) / 2


@functools.cache
def _cells(form: Format, device: torch.device) -> Tensor:
    """For `codes`: int32 by the upper 16 bits of a float, to be added to the float's bits.

    The upper 16 bits of the sum are then the code, or of a negative float the code's inverse.
    """
    ends = boundaries(form, torch.device("cpu"))
    first = (torch.arange(1 << 16) << 16).to(torch.int32)  # of lowest magnitude in each cell
    last = first | 0xFFFF
    low, high = (torch.bucketize(bits.view(torch.float32).nan_to_num(), ends).to(torch.int32)
                 for bits in (first, last))
    # The bits of the last float that still has the code `low`, if the cell has two codes.
    end = torch.cat((ends, ends[-1:]))[torch.minimum(low, high).long()]
    split = end.view(torch.int32) - (first < 0).to(torch.int32)
    carry = torch.where(low == high, 0, 0xFFFF - (split & 0xFFFF))
    code = torch.where(first < 0, ~low, low)
    return ((code << 16) - first + carry).to(device)


@functools.cache
def _table(form: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a byte of codes stands for: a point, or two as one number of twice the size."""
    points, both = torch.tensor(form.points, dtype=dtype, device=device), torch.arange(256)
    if form.bits == 8:
        return points
    pair = {torch.float32: torch.float64, torch.float64: torch.complex128}[dtype]
    return points[torch.stack((both & 15, both >> 4), dim=1).to(device)].view(pair).view(-1)
