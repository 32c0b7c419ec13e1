"""States of few bits: read and written a slab at a time, in the formats of `quantization`.

A moment `name` of a parameter is then a vector of codes under that name and one of scales under
``name_scale``, or one of bfloat16 numbers. Small parameters keep full precision: they need no
saving, and are the sensitive ones (biases, norms).

The states of a low-precision parameter are as it is: of any size, in groups of its size and, if it
is, rounded stochastically. Its own codes are read and written here too.

A parameter in bfloat16 that is updated in float32 is read and written the same way. With 24 or 32 bits
the state has what it lacks in its shape, int8 or int16: `CORRECTION`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantization.factored import Factored
from ..quantization.formats import Format, Linear, decode
from ..quantization.named import LINEAR, moment
from ..quantization.operators import decode_moment, dequantize, encode, quantize
from ..quantization.parameters import LowPrecisionTensor
from ..quantization.rounding import Rounded, joined, rounded, split, to_bytes
from .slabs import Slab, cut, shape_of

SMALL = 4096  # elements
CORRECTION = "correction"
GRADIENT = "gradient"  # the sum of the micro-batches so far: see `gradients`
DRAWS = "draws"  # how often the states have been rounded stochastically
OF_STATES = {"exp_avg": 0x11C5, "exp_avg_sq": 0x2B39, GRADIENT: 0x5A27}  # each draws other numbers

State = dict[str, Tensor]
Form = Format | Factored | Linear | Rounded
Formats = Mapping[str, Form]


def precise(p: Tensor) -> torch.dtype:
    """The type of arithmetic: the parameter's, float32 in place of 16 bits."""
    return torch.promote_types(p.dtype, torch.float32)


def formats_of(p: Tensor, group: Mapping[str, Any], moments: Mapping[str, bool]) -> Formats:
    """The formats of the states of `p` that are not in full precision. Of `moments`, that is of each
    whether it may be negative, those that `state_bits` is for."""
    low, bits = isinstance(p, LowPrecisionTensor), group["state_bits"]
    formats: dict[str, Form] = {}
    if low and group["gradient_bits"] != 32:
        formats[GRADIENT] = beside(GRADIENT, LINEAR[group["gradient_bits"]], p)
    if bits == 32 or p.numel() < SMALL and not low:
        return formats
    for name, signed in moments.items():
        if bits != 16:
            form = moment(bits, signed)
            formats[name] = beside(name, form, p) if low else form
        elif signed:
            formats[name] = Rounded(group["rounding_seed"])
    return formats


def beside(name: str, form: Format | Factored | Linear, p: LowPrecisionTensor) -> Format | Factored | Linear:
    """The format of state `name` of a low-precision parameter."""
    seed = p.form.seed
    if seed is not None:
        seed ^= OF_STATES.get(name, 0x70E3)
    return form._replace(seed=seed, block=form.block if form.bits < 8 else p.form.block, first=p.form.first)


def ranges(form: Form, p: Tensor, slab: Slab | None) -> tuple[slice, slice, int]:
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
        value = state[name]
        if isinstance(p, LowPrecisionTensor) and name not in ("step", DRAWS):
            value = value.view(p.shape)  # it may have come as a vector
        return cut(value, slab)
    form = formats[name]
    codes, scales, count = ranges(form, p, slab)
    if isinstance(form, Rounded):
        flat = state[name][codes].to(precise(p))
    elif isinstance(p, LowPrecisionTensor):
        parts = [state[name][codes], state[f"{name}_scale"][scales]]
        flat = dequantize(parts, form.map, form.bits, form.block, [count], precise(p))
    elif by_operators(p):
        flat = decode_moment(state[name], state[f"{name}_scale"], form.map, form.bits, form.block, count, precise(p))
    else:
        flat = decode(state[name][codes], state[f"{name}_scale"][scales], form, count, precise(p))
    return flat.view(shape_of(p.shape, slab))


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
        if slab is None and (isinstance(p, LowPrecisionTensor) or by_operators(p)):
            draws = state[DRAWS] if DRAWS in state else state[f"{name}_scale"]  # nearest: not read
            new = quantize(value, draws, form.map, form.bits, form.block, form.seed, form.first)
        else:
            first = 0 if slab is None else slab.start * math.prod(p.shape[1:])
            new = encode(value, form, state.get(DRAWS, 0), first)
        new_codes, new_scales = new
        state[name][codes].copy_(new_codes)
        state[f"{name}_scale"][scales].copy_(new_scales)


def by_operators(p: Tensor) -> bool:
    """Whether moments are decoded and encoded by an operator each: in a captured step on a CPU, where an
    update is not one operator as a whole. Inductor would write out their formulas again and again."""
    return torch.compiler.is_compiling() and p.device.type == "cpu"


def read_weight(p: Tensor, state: State, slab: Slab | None, form: Rounded | None) -> Tensor:
    """One slab of a parameter: its own memory without a format, else a copy in float32."""
    if isinstance(p, LowPrecisionTensor):
        return p.to(precise(p)).dequantize() if slab is None else p.read(*slab[1:]).to(precise(p))
    part = cut(p, slab)
    if form is None:
        return part
    if form.bits == 16:
        return part.to(torch.float32)
    return joined(part, cut(state[CORRECTION].view(p.shape), slab))


def write_weight(p: Tensor, value: Tensor, state: State, slab: Slab | None,
                 form: Rounded | None) -> None:
    """Store what `read_weight` gave, after a change in place."""
    if isinstance(p, LowPrecisionTensor):
        if slab is None:
            p.copy_(value)
            return
        if slab.start == 0:
            p.draws.add_(1)
        p.write(value, slab.start)
        return
    if form is None:
        return
    (codes, _, _), part = ranges(form, p, slab), cut(p, slab)
    given = value, form, whole(state["step"]) if form.random else 0, codes.start or 0
    if form.bits == 16:
        part.copy_(rounded(*given).view(part.shape))
    else:
        high, low = split(*given)
        part.copy_(high.view(part.shape))
        cut(state[CORRECTION].view(p.shape), slab).copy_(low.view(part.shape))


def vectors(p: LowPrecisionTensor, others: Sequence[Tensor]) -> list[Tensor]:
    """A low-precision parameter and what has its shape, outside of a trace as vectors; what is not in low
    precision in the type of the arithmetic."""
    if not torch.compiler.is_compiling():
        others = [o.as_vector() if isinstance(o, LowPrecisionTensor) else o.reshape(-1) for o in others]
        p = p.as_vector()
    return [p, *(o if isinstance(o, LowPrecisionTensor) else o.to(precise(p)) for o in others)]


def whole(step: Tensor) -> Any:
    """The step count as an integer, or under capture as a 0-dim int64 tensor."""
    return step.to(torch.int64) if torch.compiler.is_compiling() else int(step.item())


def compressed(state: State, formats: Formats) -> State:
    """A state in full precision with its moments encoded, to the nearest."""
    result = dict(state)
    for name, form in formats.items():
        if name not in state:
            continue
        if isinstance(form, Rounded):
            result[name] = state[name].reshape(-1).to(torch.bfloat16)
        else:
            made = encode(state[name], form._replace(seed=None))  # a part of whole blocks' memory
            result[name], result[f"{name}_scale"] = (part.clone() for part in made)
    return result


def expanded(state: State, p: Tensor, formats: Formats) -> State:
    """A state with all moments in full precision and the correction in bytes, as checkpoints have it."""
    return {name: read(state, name, p, None, formats) if name in formats else
            to_bytes(value) if name == CORRECTION else value
            for name, value in state.items() if not name.endswith("_scale")}
