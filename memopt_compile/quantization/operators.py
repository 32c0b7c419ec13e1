"""The operators `memopt::quantize` and `memopt::dequantize`: parameters, gradients and moments; and
`memopt::decode` of the moments of what is itself in full precision.

They go through a tensor a slab at a time, so that what they hold beside operand and result stays
small. For Inductor `whole_value` stands in the place of `dequantize`: see `inlining`. `decode` stays what
it is: a dynamic map is a long formula, which Inductor would write out in each of a moment's readers. A
format is named by its map, bits and block: see `named.form_of`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import arithmetic, formats, linear, tables
from .formats import Format, Linear
from .named import form_of

ELEMENTS = 1 << 15  # of a slab: a few arrays of so many are held
ON_A_GPU = 8  # times as many: every operator on a slab is a launch


@torch.library.custom_op("memopt::quantize", mutates_args=())
def quantize(value: Tensor, draws: Tensor, map: str, bits: int, block: int,
             seed: int | None, first: int = 0) -> list[Tensor]:
    """The parts of all elements in row-major order. `draws` is a 0-dim count: see `rounding.noise`;
    `first` the place of the first element."""
    form = form_of(map, bits, block, seed, first)
    flat = value.reshape(-1)
    parts = _empty(value, form)
    for start, length in slabs(form, flat.numel(), value.device):
        made = encode(flat[start:start + length], form, draws, start, by=tables)
        for part, new in zip(part_of(parts, form, start, length), made):
            part.copy_(new)
    return parts


@torch.library.custom_op("memopt::dequantize", mutates_args=())
def dequantize(parts: list[Tensor], map: str, bits: int, block: int, size: list[int],
               dtype: torch.dtype) -> Tensor:
    """The contiguous tensor of this size that has these parts."""
    form, count = form_of(map, bits, block), math.prod(size)
    result = torch.empty(count, dtype=dtype, device=parts[0].device)
    for first, length in slabs(form, count, result.device):
        those = part_of(parts, form, first, length)
        result[first:first + length] = decode(those, form, length, by=tables)
    return result.view(size)


@torch.library.custom_op("memopt::decode", mutates_args=())
def decode_moment(codes: Tensor, scales: Tensor, map: str, bits: int, block: int, count: int,
                  dtype: torch.dtype) -> Tensor:
    """The vector of `count` elements that has these codes and scales, computed in its own type."""
    form = form_of(map, bits, block)
    result = codes.new_empty(count, dtype=dtype)
    for first, length in slabs(form, count, result.device):
        those = part_of((codes, scales), form, first, length)
        result[first:first + length] = formats.decode(*those, form, length, dtype, by=tables)
    return result


def whole_moment(codes: Tensor, scales: Tensor, map: str, bits: int, block: int, count: int,
                 dtype: torch.dtype) -> Tensor:
    """`decode_moment` in one go, by arithmetic."""
    return formats.decode(codes, scales, form_of(map, bits, block), count, dtype, by=arithmetic)


def whole_value(parts: Sequence[Tensor], map: str, bits: int, block: int, size: Sequence[int],
                dtype: torch.dtype) -> Tensor:
    """`dequantize` in one go, by arithmetic."""
    form = form_of(map, bits, block)
    return decode(parts, form, math.prod(size), by=arithmetic).to(dtype).view(size)


def encode(value: Tensor, form: Format | Linear, draws: Any = 0, first: Any = 0,
           by: Any = None) -> list[Tensor]:
    """The parts of a value in either kind of format."""
    if isinstance(form, Linear):
        return linear.encode(value, form, draws, first)
    return list(formats.encode(value, form, draws, first, by))


def decode(parts: Sequence[Tensor], form: Format | Linear, count: int, by: Any = None) -> Tensor:
    """The vector of float32 that has these parts."""
    if isinstance(form, Linear):
        return linear.decode(parts, form, count)
    return formats.decode(*parts, form, count, torch.float32, by)


def slabs(form: Format | Linear, count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """(first, length) of pieces of whole blocks, but for the last."""
    length = max(1, elements_on(device, ELEMENTS) // form.block) * form.block
    for first in some(range(0, count, length)):
        yield first, min(length, count - first)


_few: torch.device | None = None  # in `few_slabs`; plain, since Dynamo reads it


@contextlib.contextmanager
def few_slabs(device: torch.device | None = None) -> Iterator[None]:
    """A scope in which only the first slabs of a tensor are gone through, and the last: as much memory is
    held as for all of them, which is what a measurement wants to know. They are as large as on `device`."""
    global _few
    before, _few = _few, device or torch.device("cpu")
    try:
        yield
    finally:
        _few = before


def some(slabs: Sequence[Any]) -> Sequence[Any]:
    """All slabs, or in `few_slabs` some."""
    return slabs if _few is None else [*slabs[:3], *slabs[3:][-1:]]


def elements_on(device: torch.device, count: int) -> int:
    """Of how many elements a slab is on `device`, where it is of `count` on a CPU."""
    return count if (_few or device).type == "cpu" else ON_A_GPU * count


def part_of(parts: Sequence[Tensor], form: Format | Linear, first: int, length: int) -> list[Tensor]:
    """Views of the parts of a slab that begins with a block."""
    return [part.narrow(0, start, size) for part, start, size
            in zip(parts, form.part_sizes(first), form.part_sizes(length))]


def _empty(value: Tensor, form: Format | Linear) -> list[Tensor]:
    *planes, scales = form.part_sizes(value.numel())
    return [*(value.new_empty(n, dtype=torch.uint8) for n in planes),
            value.new_empty(scales, dtype=torch.float32)]


@quantize.register_fake
def _(value: Tensor, draws: Tensor, *form: Any) -> list[Tensor]:
    return _empty(value, form_of(*form))


@dequantize.register_fake
def _(parts: list[Tensor], map: str, bits: int, block: int, size: list[int],
      dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(size, dtype=dtype)


@decode_moment.register_fake
def _(codes: Tensor, scales: Tensor, map: str, bits: int, block: int, count: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(count, dtype=dtype)


QUANTIZE = torch.ops.memopt.quantize.default
DEQUANTIZE = torch.ops.memopt.dequantize.default
DECODE = torch.ops.memopt.decode.default
