"""`memopt::in_slabs_`: operators that run one behind the other on a slab of elements, and then on the next.

Elementwise operators give each element by itself. Run whole, each of them holds a result as large as its operands;
run on a slab at a time all of them together hold some slabs, which stay in a core's cache.

The operators are a program in text, so that a printed step shows them: statements on slabs ``a0, a1 ...`` of the
tensors, first those that are written, on numbers ``n0, n1 ...``, tensors without dimensions that each slab has
whole, and on the places ``first`` to ``stop`` of the slab. (The pass `run_in_slabs` writes such programs.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .quantization.operators import some

_NAMES = {"aten": torch.ops.aten, "prims": torch.ops.prims, "torch": torch, "device": torch.device,
          "inf": math.inf, "nan": math.nan}


@torch.library.custom_op("memopt::in_slabs_", mutates_args=("written",))
def in_slabs_(written: list[Tensor], read: list[Tensor], numbers: list[Tensor], program: str, length: int) -> None:
    """Run `program` on each `length` elements, in the order in which they lie in memory."""
    tensors, count = [*written, *read], written[0].numel()
    run = _function(program, len(tensors), len(numbers))
    for first in some(range(0, count, length)):
        stop = min(first + length, count)
        run(first, stop, *(_cut(each, first, stop) for each in tensors), *numbers)


IN_SLABS_ = torch.ops.memopt.in_slabs_.default


def of_one_slab(written: Sequence[Tensor], read: Sequence[Tensor], numbers: Sequence[Tensor], program: str,
                length: int) -> tuple[Any, ...]:
    """Arguments by which the operator holds as much, and which are small."""
    return ([each.new_empty(length) for each in written], [each.new_empty(length) for each in read], numbers,
            program, length)


def slab_length() -> int:
    """Elements of a slab: a share for each thread, and a multiple of what any vector holds, so that kernels treat
    each element as they do in the whole. So it is at most 2 MiB in float32, however many threads there are."""
    return min(torch.get_num_threads(), 8) << 16


def _cut(tensor: Tensor, first: int, stop: int) -> Tensor:
    """A view of these elements; one that repeats a single number repeats it there too."""
    stride = int(any(tensor.stride()))
    return tensor.as_strided((stop - first,), (stride,), tensor.storage_offset() + first * stride)


@functools.cache
def _function(program: str, tensors: int, numbers: int) -> Callable[..., None]:
    given = ["first", "stop", *(f"a{i}" for i in range(tensors)), *(f"n{i}" for i in range(numbers))]
    scope = dict(_NAMES)
    exec(compile(f"def run({', '.join(given)}): {program}", "<memopt slab>", "exec"), scope)
    return scope["run"]
