"""The operators `memopt::compress` and `memopt::decompress`.

They go through the tensor a slab of rows at a time, so that what they hold beside operand and result
stays small. For Inductor `whole_parts` and `whole_value` stand in their place: see `inlining`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .compat.sizes import symbols_of_data
from .compat.trace import hinted
from .quantization.activations import Packing
from .quantization.named import FORMATS

ELEMENTS = 1 << 15  # of a slab: a few arrays of so many are held


@torch.library.custom_op("memopt::compress", mutates_args=())
def compress(value: Tensor, form: str) -> list[Tensor]:
    """The parts of `value`, whose memory is dense, in one of `FORMATS`; what is shared comes first."""
    packing, rows = FORMATS[form], in_rows(value)
    slabs = list(slabs_of(packing, *rows.shape))
    if len(slabs) == 1:
        return whole_parts(value, form)
    shared = packing.shared(sum(packing.statistic(rows[some]) for some in slabs))
    parts = [torch.empty(shape, dtype=dtype, device=value.device)
             for shape, dtype in _layouts(packing, rows)]
    ends = [0] * len(parts)
    for some in slabs:
        for i, part in enumerate(packing.encode(rows[some], shared)):
            parts[i][ends[i]:ends[i] + len(part)] = part
            ends[i] += len(part)
    return [*shared, *parts]


@torch.library.custom_op("memopt::decompress", mutates_args=())
def decompress(parts: list[Tensor], form: str, size: list[int], stride: list[int],
               dtype: torch.dtype) -> Tensor:
    """The tensor of this layout that `compress` made the parts of."""
    packing = FORMATS[form]
    result = torch.empty_strided(size, stride, dtype=dtype, device=parts[0].device)
    rows = in_rows(result)
    slabs = list(slabs_of(packing, *rows.shape))
    lengths = [shape[0] for shape, _ in _layouts(packing, rows[slabs[0]])]
    shared, parts = parts[:-len(lengths)], parts[-len(lengths):]
    for i, some in enumerate(slabs):
        taken = [p[i * length:(i + 1) * length] for p, length in zip(parts, lengths)]
        rows[some] = packing.decode(shared, taken, tuple(rows[some].shape), dtype)
    return result


def whole_parts(value: Tensor, form: str) -> list[Tensor]:
    """`compress` in one go."""
    packing, rows = FORMATS[form], in_rows(value)
    shared = packing.shared(packing.statistic(rows))
    return [*shared, *packing.encode(rows, shared)]


def whole_value(parts: Sequence[Tensor], form: str, size: Sequence[int], stride: Sequence[int],
                dtype: torch.dtype) -> Tensor:
    """`decompress` in one go."""
    packing, order = FORMATS[form], order_of(size, stride)
    inner = [size[d] for d in order]
    columns = inner[-1]
    rows = 1
    for n in inner[:-1]:
        rows *= n
    count = len(_layouts(packing, torch.empty(rows, columns, dtype=dtype, device="meta")))
    value = packing.decode(parts[:-count], parts[-count:], (rows, columns), dtype)
    return value.view(inner).permute([order.index(d) for d in range(len(order))])


compress.register_fake(whole_parts)
decompress.register_fake(lambda parts, form, size, stride, dtype: torch.empty_strided(
    size, stride, dtype=dtype, device=parts[0].device))
COMPRESS = torch.ops.memopt.compress.default
DECOMPRESS = torch.ops.memopt.decompress.default


def layout(value: Tensor) -> tuple[list[int], list[int], torch.dtype]:
    """What `decompress` has to be told of a value."""
    return list(map(hinted, value.shape)), list(map(hinted, value.stride())), value.dtype


def in_rows(value: Tensor) -> Tensor:
    """A view of dense memory as a matrix, whose columns lie along the innermost dimension."""
    inner = value.permute(order_of(value.shape, value.stride()))
    return inner.view(-1, inner.shape[-1])


def order_of(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions from the outermost to the innermost; those of size 1 lie outside."""
    return sorted(range(len(size)), key=lambda d: (size[d] == 1, stride[d]), reverse=True)


def is_dense(value: Tensor) -> bool:
    """Whether `value` is a matrix at least, whatever the data are, and has each element of its storage once."""
    if symbols_of_data(value):
        return False
    sizes, strides, _ = layout(value)
    expected = 1
    for d in reversed(order_of(sizes, strides)):
        if sizes[d] != 1 and strides[d] != expected:
            return False
        expected *= sizes[d]
    return value.dim() > 0 and expected * value.element_size() == hinted(value.untyped_storage().nbytes())


def slabs_of(packing: Packing, rows: int, columns: int) -> Iterator[slice]:
    unit = packing.unit(columns)
    length = max(1, ELEMENTS // (unit * columns)) * unit
    for start in range(0, rows, length):
        yield slice(start, min(start + length, rows))


def _layouts(packing: Packing, rows: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and type of each part of such rows."""
    rows = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
    parts = packing.encode(rows, packing.shared(packing.statistic(rows)))
    return [(p.shape, p.dtype) for p in parts]
