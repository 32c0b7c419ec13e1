"""`memopt::quantized_update`: what an optimizer does to one parameter in few bits, as one operator.

In few bits is the parameter, or its states. Captured as operators of their own, decoding, arithmetic and
encoding of an update hold several arrays of the parameter's size in full precision. In one operator they
go through it a slab at a time, as in eager: its body is the eager code, on copies that are its results,
so that captured steps write eager's codes. `memopt::quantized_update_` needs no copies: see the pass
`update_in_place`. It holds a few slabs, whatever the size. So are, in any width, the updates of large parameters
by CAME and Adafactor: what their means over rows and columns are of would be there whole. Where ranks share
parameters, these means are collectives of the step: then each part of the update between two is an operator.

An operator takes tensors and plain numbers. A method is named by its class and itself, and has the
signature ``(p, grad, state, group)``; settings that are tensors go beside the others, and so does the
count of steps, which no method changes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantization.formats import Linear
from ..quantization.parameters import LowPrecisionTensor, register
from .low_bit import DRAWS, GRADIENT, OF_STATES

ADD = "_add_in_slabs"  # the method that adds a gradient to those kept
KEPT = (GRADIENT, f"{GRADIENT}_scale")
STEP = "step"
KEEP = "keep"  # whether there is anything to do: a setting known only as the step runs
RESULT = "result"  # of a method that finds a number: a state of that name
INTEGERS = ("state_bits", "weight_bits", "gradient_bits", "rounding_seed", "factor_dims", "rows", "ranks")
SEVERAL = ("betas", "eps", "factor_dims")  # numbers, or a word
BITS = (8, 4, 1)  # of states: those of more would be copied whole
LARGE = 1 << 20  # elements of a parameter: as in the pass `run_in_slabs`, which serves elementwise updates


def applies(optimizer: Any, p: Tensor, group: Mapping[str, Any], largest: int | None = None) -> bool:
    """Whether what is done to this parameter is one operator of the step that is being captured. `largest` asks it
    of a part between sums over ranks, which have so many elements at most: they decide alike.

    On a GPU the update of a parameter in full precision is fused as it is."""
    if (not torch.compiler.is_compiling() or getattr(optimizer, "ranks", 1) != 1
            or type(optimizer).__module__.rpartition(".")[0] != __package__):
        return False
    few = group["state_bits"] in BITS
    if isinstance(p, LowPrecisionTensor):
        return few
    by_strides = p.permute(sorted(range(p.dim()), key=p.stride, reverse=True))
    if p.device.type != "cpu" or not by_strides.is_contiguous():
        return False
    if not (optimizer.elementwise or optimizer.shards.ranks == 1):
        return largest is not None and largest >= LARGE and copies_are_removed()
    whole = not optimizer.elementwise or not p.is_contiguous()  # without this each of its operators takes it whole
    if few and optimizer.formats(p, group):
        return p.is_contiguous() or copies_are_removed()
    return whole and p.numel() >= LARGE and copies_are_removed()


def copies_are_removed() -> bool:
    """By `update_in_place`: not where anybody else compiles. memopt's capture has another answer."""
    return False


def apply(optimizer: Any, method: str, p: Tensor, grad: Tensor | None, state: dict[str, Any],
          group: Mapping[str, Any], changes: Sequence[str] | None = None, moves: bool = True,
          reads: Sequence[str] = ()) -> None:
    """``optimizer.method(p, grad, state, group)`` by the operator. It `changes` these states, by default
    all but a kept gradient, which is read where `grad` is None; and with `moves` the parameter. `reads` are others."""
    if isinstance(grad, LowPrecisionTensor) and group["gradient_bits"] == 32:
        grad = grad.dequantize()  # of an optimizer that keeps no gradients
    kept = [state[name] for name in KEPT if name in state] if grad is None else []
    names = [name for name in (state if changes is None else changes) if isinstance(state.get(name), Tensor)
             and (changes is not None or name not in (*KEPT, STEP))]
    keys, values, numbers = [], [], []
    for name, value in [*group.items(), (STEP, state.get(STEP)), *((name, state[name]) for name in reads)]:
        for number in value if name in SEVERAL and isinstance(value, (tuple, list)) else [value]:
            if isinstance(number, Tensor):
                keys.append(f"{name}*")
                numbers.append(number)
            elif name in SEVERAL and (number is None or isinstance(number, str)):
                keys.append(f"{name}={number}")
            elif isinstance(number, (bool, int, float)):
                keys.append(name)
                values.append(float(number))
    form = p.form if isinstance(p, LowPrecisionTensor) else Linear(0, 0)
    new = torch.ops.memopt.quantized_update(
        [p] if moves else [], kept if grad is None else [grad], [state[name] for name in names],
        f"{type(optimizer).__name__} {method}", " ".join([*names, *reads]), " ".join(keys), values, numbers,
        [form.bits, form.block, -1 if form.seed is None else form.seed, form.first, *p.shape], p.dtype)
    for old, made in zip([p, *(state[n] for n in names)] if moves else [state[n] for n in names], new):
        old.copy_(made)


@torch.library.custom_op("memopt::quantized_update", mutates_args=())
def quantized_update(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], method: str,
                     names: str, keys: str, values: list[float], numbers: list[Tensor],
                     layout: list[int], dtype: torch.dtype) -> list[Tensor]:
    """The new parts of the parameter, or if it is in full precision itself, if given; and the new states."""
    parts, states = [part.clone() for part in parameter], [each.clone() for each in state]
    change(parts, grad, states, method, names, keys, values, numbers, layout, dtype)
    return [*parts, *states]


@torch.library.custom_op("memopt::quantized_update_", mutates_args=("parameter", "state"))
def quantized_update_(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], method: str,
                      names: str, keys: str, values: list[float], numbers: list[Tensor],
                      layout: list[int], dtype: torch.dtype) -> None:
    """The same in place."""
    change(parameter, grad, state, method, names, keys, values, numbers, layout, dtype)


def change(parts: Sequence[Tensor], grad: Sequence[Tensor], states: Sequence[Tensor], method: str, names: str,
           keys: str, values: Sequence[float], numbers: Sequence[Tensor], layout: Sequence[int],
           dtype: torch.dtype) -> None:
    """What the operator does, in place."""
    optimizer, p, group = subject(parts, states, method, keys, values, numbers, layout, dtype)
    if not group.get(KEEP, True):
        return
    found = dict(zip(names.split(), states))
    for name in (STEP, *names.split()[len(states):]):
        if name in group:
            found[name] = group.pop(name)
    if len(grad) != 1:
        found |= dict(zip(KEPT, grad))
    result = getattr(optimizer, method.split()[1])(p, grad[0] if len(grad) == 1 else None, found, group)
    if result is not None:
        found[RESULT].copy_(result)


def subject(parts: Sequence[Tensor], states: Sequence[Tensor], method: str, keys: str, values: Sequence[float],
            numbers: Sequence[Tensor], layout: Sequence[int],
            dtype: torch.dtype) -> tuple[Any, Tensor, dict[str, Any]]:
    """The optimizer, with methods and no state; the parameter, without values if no parts are given; and
    the settings. Of 0 bits is a parameter in full precision."""
    bits, block, seed, first, *size = layout
    optimizer = object.__new__(getattr(sys.modules[__package__], method.split()[0]))
    group = _settings(keys.split(), values, numbers)
    if not bits:
        p = parts[0] if parts else torch.empty((), dtype=dtype, device=states[0].device).expand(size)
        return optimizer, p, {**group, "place": first}  # of its first element
    like = parts or [torch.empty(0, dtype=torch.uint8, device=states[0].device)] * 4
    form = Linear(bits, block, None if seed < 0 else seed, first)
    return optimizer, LowPrecisionTensor(like, form, size, dtype), group


def _settings(keys: Sequence[str], values: Sequence[float], numbers: Sequence[Tensor]) -> dict[str, Any]:
    """The group again, with 0 and 1 for flags, which is as good. A key with * has a tensor, one with = a word
    or None, and one that comes again has several."""
    group: dict[str, Any] = {"weight_bits": None}
    plain, tensors, every = iter(values), iter(numbers), [re.split("[*=]", key)[0] for key in keys]
    for name, key in zip(every, keys):
        word = key.partition("=")[2]
        number = (None if word == "None" else word) if word else next(tensors if key[-1] == "*" else plain)
        number = int(number) if name in INTEGERS and not word else number
        group[name] = (*(group.get(name) or ()), number) if every.count(name) > 1 else number
    return group


@quantized_update.register_fake
def _(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t in (*parameter, *state)]


def _of_parts(func: Any, parameter: list[Tensor], grad: list[Tensor], *rest: Any) -> list[Tensor]:
    """The operator of a parameter is that of its parts, as is that of a gradient in few bits."""
    if grad and isinstance(grad[0], LowPrecisionTensor):
        grad = grad[0].parts[:-1]
    p, = parameter
    new = func(p.parts, grad, *rest)
    return [p.like_this(new[:len(p.parts)]), *new[len(p.parts):]]


register(torch.ops.memopt.quantized_update, _of_parts)


def _add(func: Any, total: Tensor, value: Tensor, alpha: float = 1) -> Tensor:
    """``total.add_(value)``. To 8 bits by `ADD`, as autograd adds to a gradient, else as any operator."""
    if not (isinstance(total, LowPrecisionTensor) and total.form.bits == 8 and alpha == 1
            and type(value) is not LowPrecisionTensor and value.shape == total.shape):
        return LowPrecisionTensor.in_full_precision(func, (total, value), {"alpha": alpha})
    seed = -1 if total.form.seed is None else total.form.seed ^ OF_STATES[GRADIENT]
    new = torch.ops.memopt.quantized_update(
        [], [value], total.parts, f"SGD {ADD}", f"{' '.join(KEPT)} {DRAWS}", "state_bits gradient_bits maximize first",
        [8, 8, 0, 0], [], [8, total.form.block, seed, total.form.first, *total.shape], total.dtype)
    for part, made in zip(total.parts, new):
        part.copy_(made)
    return total


register(torch.ops.aten.add_, _add)

QUANTIZED_UPDATE = torch.ops.memopt.quantized_update.default
QUANTIZED_UPDATE_ = torch.ops.memopt.quantized_update_.default
UPDATES = (QUANTIZED_UPDATE, QUANTIZED_UPDATE_)
