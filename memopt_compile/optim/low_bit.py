"""States of few bits: read and written a slab at a time, in the formats of `quantization`.

A moment `name` of a parameter is then a vector of codes under that name and one of scales under
``name_scale``. Small parameters keep full precision: they need no saving, and are the sensitive
ones (biases, norms).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..quantization.formats import Format, decode, encode
from .slabs import Slab, cut

SMALL = 4096  # elements

State = dict[str, Tensor]
Formats = Mapping[str, Format]


def precise(p: Tensor) -> torch.dtype:
    """The type of arithmetic: the parameter's, float32 in place of 16 bits."""
    return torch.promote_types(p.dtype, torch.float32)


def ranges(form: Format, p: Tensor, slab: Slab | None) -> tuple[slice, slice, int]:
    """Where the codes and the scales of a slab along the first dimension are, and its elements."""
    if slab is None:
        return slice(None), slice(None), p.numel()
    row = math.prod(p.shape[1:])
    first, count = slab.start * row, slab.length * row
    (code, scale), (codes, scales) = form.sizes(first), form.sizes(count)
    return slice(code, code + codes), slice(scale, scale + scales), count


def read(state: State, name: str, p: Tensor, slab: Slab | None, formats: Formats) -> Tensor:
    """One slab of a moment: the state's own memory in full precision, else a copy."""
    if name not in formats:
        return cut(state[name], slab)
    codes, scales, count = ranges(formats[name], p, slab)
    flat = decode(state[name][codes], state[f"{name}_scale"][scales], formats[name], count,
                  precise(p))
    return flat.view(cut(p, slab).shape)


def write(state: State, name: str, value: Tensor, p: Tensor, slab: Slab | None,
          formats: Formats) -> None:
    """Store what `read` gave, after a change in place."""
    if name in formats:
        codes, scales, _ = ranges(formats[name], p, slab)
        new_codes, new_scales = encode(value, formats[name])
        state[name][codes].copy_(new_codes)
        state[f"{name}_scale"][scales].copy_(new_scales)


def compressed(state: State, formats: Formats) -> State:
    """A state in full precision with its moments encoded."""
    result = dict(state)
    for name, form in formats.items():
        if name in state:
            result[name], result[f"{name}_scale"] = encode(state[name], form)
    return result


def expanded(state: State, p: Tensor, formats: Formats) -> State:
    """A state with all moments in full precision, as checkpoints have it."""
    return {name: read(state, name, p, None, formats) if name in formats else value
            for name, value in state.items() if not name.endswith("_scale")}
