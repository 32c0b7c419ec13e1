"""States of few bits: read and written a slab at a time, in the formats of `quantization`.

A moment `name` of a parameter is then a vector of codes under that name and one of scales under
``name_scale``, or one of bfloat16 numbers. Small parameters keep full precision: they need no
saving, and are the sensitive ones (biases, norms).

A parameter in bfloat16 that is updated in float32 is read and written the same way. With 24 bits
the state has what it lacks as a vector of int8, `CORRECTION`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..quantization.formats import Format, decode, encode
from ..quantization.rounding import Rounded, joined, rounded, split
from .slabs import Slab, cut

SMALL = 4096  # elements
CORRECTION = "correction"

State = dict[str, Tensor]
Formats = Mapping[str, Format | Rounded]


def precise(p: Tensor) -> torch.dtype:
    """The type of arithmetic: the parameter's, float32 in place of 16 bits."""
    return torch.promote_types(p.dtype, torch.float32)


def ranges(form: Format | Rounded, p: Tensor, slab: Slab | None) -> tuple[slice, slice, int]:
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
    form = formats[name]
    codes, scales, count = ranges(form, p, slab)
    if isinstance(form, Rounded):
        flat = state[name][codes].to(precise(p))
    else:
        flat = decode(state[name][codes], state[f"{name}_scale"][scales], form, count, precise(p))
    return flat.view(cut(p, slab).shape)


def write(state: State, name: str, value: Tensor, p: Tensor, slab: Slab | None,
          formats: Formats) -> None:
    """Store what `read` gave, after a change in place."""
    if name not in formats:
        return
    form = formats[name]
    codes, scales, _ = ranges(form, p, slab)
    if isinstance(form, Rounded):
        state[name][codes].copy_(rounded(value, form, whole(state["step"]), codes.start or 0))
    else:
        new_codes, new_scales = encode(value, form)
        state[name][codes].copy_(new_codes)
        state[f"{name}_scale"][scales].copy_(new_scales)


def read_weight(p: Tensor, state: State, slab: Slab | None, form: Rounded | None) -> Tensor:
    """One slab of a parameter: its own memory without a format, else a copy in float32."""
    part = cut(p, slab)
    if form is None:
        return part
    if form.bits == 16:
        return part.to(torch.float32)
    codes, _, _ = ranges(form, p, slab)
    return joined(part, state[CORRECTION][codes].view(part.shape))


def write_weight(p: Tensor, value: Tensor, state: State, slab: Slab | None,
                 form: Rounded | None) -> None:
    """Store what `read_weight` gave, after a change in place."""
    if form is None:
        return
    (codes, _, _), part = ranges(form, p, slab), cut(p, slab)
    given = value, form, whole(state["step"]), codes.start or 0
    if form.bits == 16:
        part.copy_(rounded(*given).view(part.shape))
    else:
        high, low = split(*given)
        part.copy_(high.view(part.shape))
        state[CORRECTION][codes].copy_(low)


def whole(step: Tensor) -> Any:
    """The step count as an integer, or under capture as a 0-dim int64 tensor."""
    return step.to(torch.int64) if torch.compiler.is_compiling() else int(step.item())


def compressed(state: State, formats: Formats) -> State:
    """A state in full precision with its moments encoded, those of 16 bits to the nearest."""
    result = dict(state)
    for name, form in formats.items():
        if name not in state:
            continue
        if isinstance(form, Rounded):
            result[name] = state[name].reshape(-1).to(torch.bfloat16)
        else:
            result[name], result[f"{name}_scale"] = encode(state[name], form)
    return result


def expanded(state: State, p: Tensor, formats: Formats) -> State:
    """A state with all moments in full precision, as checkpoints have it."""
    return {name: read(state, name, p, None, formats) if name in formats else value
            for name, value in state.items() if not name.endswith("_scale")}
