"""Large tensors a slab at a time: what an eager update holds for a moment stays small.

A slab is a range along one dimension, the longest, so that it is a view whatever the layout. Under
capture there is one slab, the whole: fusion does there what slabs do in eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.operators import elements_on, some

# An update holds at most four arrays of this many elements: 4 MiB in float64, and more on a GPU.
ELEMENTS = 1 << 17


class Slab(NamedTuple):
    """The elements from `start`, `length` long, along `dim`."""

    dim: int
    start: int
    length: int


def slabs(tensor: Tensor, block: int = 1, encoding: bool = False) -> list[Slab | None]:
    """The slabs of a tensor of this shape; ``[None]``, the whole, for a small or a traced one."""
    return [None] if torch.compiler.is_compiling() else sliced(tensor, block, encoding)


def sliced(tensor: Tensor, block: int = 1, encoding: bool = False) -> list[Slab | None]:
    """The same, traced or not. `encoding` stochastically holds more arrays: then slabs are smaller.

    With blocks of more than one element, counted in row-major order, they are along the first
    dimension, and whole blocks but for the last.
    """
    shape, count = tensor.shape, tensor.numel()
    most = elements_on(tensor.device, ELEMENTS) // (4 if encoding else 1)
    if count <= most:
        return [None]
    dim = 0 if block > 1 else max(range(len(shape)), key=lambda d: shape[d])
    step = block // math.gcd(block, count // shape[dim])
    length = max(1, most * shape[dim] // count // step) * step
    return [Slab(dim, start, min(length, shape[dim] - start))
            for start in some(range(0, shape[dim], length))]


def cut(tensor: Tensor, slab: Slab | None) -> Tensor:
    """The part of `tensor` in the slab, a view. A dimension of size 1 broadcasts: it stays."""
    if slab is None or tensor.dim() == 0 or tensor.shape[slab.dim] == 1:
        return tensor
    return tensor.narrow(slab.dim, slab.start, slab.length)


def shape_of(shape: Sequence[int], slab: Slab | None) -> tuple[int, ...]:
    """The shape of what `cut` makes of a tensor of this shape, all of whose dimensions it has."""
    if slab is None:
        return tuple(shape)
    return (*shape[:slab.dim], slab.length, *shape[slab.dim + 1:])


def kept(found: dict[str, Tensor], name: str, value: Callable[[Slab | None], Tensor],
         pieces: list[Slab | None]) -> Callable[[Slab | None], Tensor]:
    """`value` made again for each use of a slab; but where the only slab is the whole once, to be `found` under
    that name."""
    if len(pieces) > 1:
        return value
    if name not in found:
        found[name] = value(pieces[0])
    return lambda slab: found[name]


def square_sum(value: Callable[[Slab | None], Tensor], pieces: list[Slab | None]) -> Tensor:
    """The sum of the squares, 0-dim, of a tensor that `value` makes a slab at a time."""
    square: Any = 0.0
    for slab in pieces:
        square = square + torch.linalg.vector_norm(value(slab)) ** 2
    return square
