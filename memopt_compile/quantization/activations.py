"""How an activation may be kept from forward to backward in fewer bytes.

A tensor is taken as a matrix, `rows`, in the order of its memory: a column is a channel where the
channels are innermost. A format makes a few tensors of it, its parts, the first dimension of each in
proportion to the rows, so that a slab of rows gives a slab of each part.

Lossless:
    "1-bit mask"      a boolean, 8 in a byte
    "1-bit sign"      whether an element is above 0, for who asks no more than that; comes back as 0 or 1
    "uint8 index" ..  integers known to be small
Lossy, with the share of the norm that is lost of normal numbers:
    "int8", "int4"    groups of 128 neighbours, x ≈ scale · code, scale = −extreme / 2^(bits−1), where
                      `extreme` is the element of largest magnitude: its code, −2^(bits−1), is exact
    "fp8"             the same with scale = max|x| / 448 and a code of 4 exponent and 3 mantissa bits
    "int4 outliers"   "int4" of all but the 1 in 32 columns with the largest sums of magnitudes, which
                      are kept as they are (Adacc, section 3.2; see `Outliers`)
    "int4 channels"   groups of 128 rows of one column (Adacc's for query, key and value)
    "int4 offset"     x ≈ scale · code + offset, offset = (max + min)/2, scale = (max − min)/16
                      (Adacc's for the results of softmax)

A group with an element that is not finite comes back as NaN throughout, and its scale is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .blocks import extremes, packed, unpacked, whole_blocks

BLOCK = 128  # elements, or rows, of a group
LARGEST_FP8 = 448.0
Parts = Sequence[Tensor]


@dataclass(frozen=True)
class Packing:
    """What every format has. `error` is the share that is lost of the norm of normal numbers, 0.0 for
    a lossless format; `restores` says that decoding gives the elements, if not exactly; `scales` is
    the place of a lossy format's scales among its parts."""

    error: float = 0.0
    restores: bool = True
    scales: ClassVar[int] = 1

    def unit(self, columns: int) -> int:
        """Whole multiples of so many rows can be encoded by themselves."""
        return BLOCK // math.gcd(BLOCK, columns)

    def statistic(self, rows: Tensor) -> Any:
        """What `shared` needs to know of the rows; that of several slabs is the sum of theirs."""
        return 0

    def shared(self, statistic: Any) -> list[Tensor]:
        """What all slabs have in common, to be kept before the parts."""
        return []

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        raise NotImplementedError

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The rows of this shape again."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mask(Packing):
    """One bit: the element, a boolean, or whether a number is anything but ≤ 0."""

    def unit(self, columns: int) -> int:
        return 8 * BLOCK // math.gcd(8 * BLOCK, columns)

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        bits = rows if rows.dtype == torch.bool else ~(rows <= 0)
        bits = whole_blocks(bits.reshape(-1), 8 * BLOCK).view(-1, 8, BLOCK).to(torch.int32)
        return [packed(bits, 1)]

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return _cut(unpacked(parts[0], 1), shape).to(dtype)


@dataclass(frozen=True)
class Index(Packing):
    """Integers in the range of `dtype`."""

    dtype: torch.dtype = torch.int32

    def unit(self, columns: int) -> int:
        return 1

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        return [rows.to(self.dtype)]

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


@dataclass(frozen=True)
class Groups(Packing):
    """Groups of neighbours in a row, in `bits`; with an `offset` around the middle of their range."""

    bits: int = 4
    offset: bool = False

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        blocks = whole_blocks(rows.reshape(-1), BLOCK).view(-1, 2, BLOCK // 2)
        return _quantized(blocks, (1, 2), self.bits, self.offset)

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return _cut(_dequantized(parts, self.bits, dtype), shape)


@dataclass(frozen=True)
class Channels(Packing):
    """Groups of rows of one column, in 4 bits."""

    def unit(self, columns: int) -> int:
        return BLOCK

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        columns = rows.shape[1]
        flat = whole_blocks(rows.reshape(-1), BLOCK * columns)
        return _quantized(flat.view(-1, 2, BLOCK // 2, columns), (1, 2), 4, False)

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return _cut(_dequantized(parts, 4, dtype), shape)


@dataclass(frozen=True)
class Outliers(Packing):
    """The columns with outliers as they are, and `Groups` of 4 bits of all others.

    Adacc's outliers are the columns whose sum of magnitudes is more than 3 standard deviations above
    the mean of these sums: at most a tenth, and how many depends on the data. Here it is the largest
    `share` of the columns, so that the bytes are known in advance; if more are outliers the others stay
    in their groups, whose scales they enlarge. (No number of columns that are all outliers exists.)
    """

    share: float = 1 / 32
    scales: ClassVar[int] = 3  # behind places, columns and codes

    def statistic(self, rows: Tensor) -> Tensor:
        """The sum of magnitudes of each column."""
        return rows.abs().sum(0, dtype=torch.float32)

    def shared(self, statistic: Tensor) -> list[Tensor]:
        columns = max(1, int(len(statistic) * self.share))
        return [torch.topk(statistic, columns).indices.to(torch.int32)]

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        index = shared[0].to(torch.int64)
        # Not rows.index_fill: a scatter is a copy of all rows.
        outlying = torch.zeros_like(rows[0], dtype=torch.bool).index_fill(0, index, True)
        return [rows.index_select(1, index), *Groups().encode(torch.where(outlying, 0, rows), ())]

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        rows = Groups().decode((), parts[1:], shape, dtype)
        return rows.index_copy(1, shared[0].to(torch.int64), parts[0].to(dtype))


@dataclass(frozen=True)
class Float8(Packing):
    """Groups of neighbours in 8-bit floats."""

    def encode(self, rows: Tensor, shared: Parts) -> list[Tensor]:
        blocks = whole_blocks(rows.reshape(-1), BLOCK).view(-1, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / LARGEST_FP8).to(_of_scales(rows.dtype))
        shares = (blocks / torch.where(scales == 0, 1, scales)).clamp(-LARGEST_FP8, LARGEST_FP8)
        return [shares.to(torch.float8_e4m3fn), scales]

    def decode(self, shared: Parts, parts: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return _cut(_finite(parts[0].to(dtype) * parts[1].to(dtype)), shape)


def _of_scales(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize > 2 else torch.bfloat16


def _quantized(blocks: Tensor, inner: tuple[int, ...], bits: int, offset: bool) -> list[Tensor]:
    """[codes, scales(, offsets)] of groups that extend over the dimensions `inner`."""
    half, of_scales = 2.0 ** (bits - 1), _of_scales(blocks.dtype)
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    if offset:
        high, low = blocks.amax(inner, keepdim=True), blocks.amin(inner, keepdim=True)
        middle = (high / 2 + low / 2).to(of_scales)  # high + low may be beyond the type
        scales, blocks, more = ((high - low) / (2 * half)).to(of_scales), blocks - middle, [middle]
    else:
        scales, more = (extremes(blocks, inner) / -half).to(of_scales), []
    codes = (blocks / torch.where(scales == 0, 1.0, scales)).round().clamp(-half, half - 1)
    if bits == 8:
        return [codes.to(torch.int8), scales, *more]
    return [packed((codes + half).to(torch.uint8), 4), scales, *more]


def _dequantized(parts: Parts, bits: int, dtype: torch.dtype) -> Tensor:
    codes, scales, *offset = parts
    if bits == 4:
        codes = unpacked(codes, 4)
    values = codes.to(scales.dtype) - (8 if bits == 4 else 0)
    values = values.to(dtype) * scales.to(dtype)
    return _finite(values + offset[0].to(dtype) if offset else values)


def _finite(values: Tensor) -> Tensor:
    """The largest numbers of 16 bits in place of the infinities that a rounded scale makes of them; NaN stays."""
    largest = torch.finfo(values.dtype).max
    return values.clamp(-largest, largest) if values.dtype.itemsize == 2 else values


def _cut(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    return blocks.reshape(-1)[:shape[0] * shape[1]].view(shape)
