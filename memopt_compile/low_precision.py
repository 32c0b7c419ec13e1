"""`quantize_parameters_` and `dequantize_parameters_`: a model's parameters in few bits (LPMM)."""

from __future__ import annotations

import fnmatch
import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence

from torch import Tensor, finfo, nn, strided
from torch.nn.parameter import is_lazy

from . import replaced
from .compat import trace
from .distributed.storage import storage_of
from .errors import QuantizationError
from .quantization.formats import Linear
from .quantization.linear import TOGETHER
from .quantization.named import LINEAR
from .quantization.parameters import NAMES, LowPrecisionTensor, encoded

ROUNDINGS = ("stochastic", "nearest")
OURS = {*NAMES, "form", "_is_param"}  # attributes that a parameter may have by its class
Skip = str | Iterable[str] | Callable[[str, nn.Parameter], bool]
Slot = tuple[str, nn.Module, str, nn.Parameter]  # the whole name, the module, the name in it, what is there


def quantize_parameters_(model: nn.Module, bits: int = 12, group_size: int = 2048,
                         rounding: str = "stochastic", skip: Skip = (), *, seed: int = 0) -> nn.Module:
    """Keep the parameters of `model` in 8, 10 or 12 bits, in place; returns `model`.

    They become new parameters: make the optimizer, and compile, afterwards.

    Args:
        bits: of each element. A group takes 32 more for its scale.
        group_size: neighbours that share a scale, a multiple of 4.
        rounding: of every update: "stochastic", without bias, or "nearest". This conversion rounds
            to the nearest.
        skip: parameters that stay as they are: names, with `*` for any part of one, or a function
            of name and parameter.
        seed: what the stochastic rounding of all parameters depends on, with their names.

    Raises:
        QuantizationError: a setting or a parameter has no such format. The model is as it was.
    """
    form = _format(bits, group_size, rounding, seed)
    slots = _slots(model)
    skipped = _skipped(model, skip)
    _check_memory(slots, skipped)
    made: dict[int, nn.Parameter] = {}
    for name, _, _, p in slots:
        if id(p) in skipped or id(p) in made:
            continue
        _check(name, p)
        if p.numel():
            value = encoded(p, _capped(form, p.numel()), zlib.crc32(name.encode()) & 0xFFFF)
            made[id(p)] = _in_place_of(p, value)
    _replace(slots, made)
    return model


def dequantize_parameters_(model: nn.Module) -> nn.Module:
    """Give `model` ordinary parameters again, of the values that it computes with; returns `model`.

    Like `quantize_parameters_` it makes new ones. A model without low-precision parameters stays
    as it is.

    Raises:
        QuantizationError: a parameter is sharded. The model is as it was.
    """
    slots = _slots(model)
    made: dict[int, nn.Parameter] = {}
    for name, _, _, p in slots:
        if storage_of(p) is not None:
            raise _error(f"parameter {name!r} is sharded", "memopt.dequantize_parameters_",
                         "load what state_dict() gives, which are values, into an ordinary model")
        if isinstance(p, LowPrecisionTensor) and id(p) not in made:
            made[id(p)] = _in_place_of(p, p.detach().dequantize())
    _replace(slots, made)
    return model


def _format(bits: int, group_size: int, rounding: str, seed: int) -> Linear:
    if not isinstance(bits, Hashable) or bits not in LINEAR:
        raise _error(f"there is no format of {bits!r} bits", f"bits={bits!r}",
                     f"choose from {', '.join(map(str, LINEAR))}")
    whole = isinstance(group_size, int) and group_size > 0
    if not whole or group_size % TOGETHER:
        raise _error(f"group_size is {group_size!r}", f"group_size={group_size!r}",
                     f"choose a positive multiple of {TOGETHER}, so that no byte has codes of two groups")
    if rounding not in ROUNDINGS:
        raise _error(f"there is no rounding {rounding!r}", f"rounding={rounding!r}",
                     f"choose from {', '.join(ROUNDINGS)}")
    if not (isinstance(seed, int) and 0 <= seed < 2**32):
        raise _error(f"seed is {seed!r}", f"seed={seed!r}", "choose an integer from 0 to 2**32 - 1")
    return LINEAR[bits]._replace(block=group_size, seed=seed if rounding == "stochastic" else None)


def _capped(form: Linear, count: int) -> Linear:
    """`form` for so many elements: all of them in one group are no larger a group, and no memory is for the rest
    of it. (Groups of the usual size are left as they are.)"""
    return form._replace(block=min(form.block, max(LINEAR[form.bits].block, math.ceil(count / TOGETHER) * TOGETHER)))


def _slots(model: nn.Module) -> list[Slot]:
    """All places that have a parameter; tied ones have several."""
    if not isinstance(model, nn.Module):
        raise _error(f"the model is of type {type(model).__name__}", "model", "give a torch.nn.Module, or a part of one")
    return [(f"{path}.{name}" if path else name, module, name, p)
            for path, module in model.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)]


def _skipped(model: nn.Module, skip: Skip) -> set[int]:
    """A tied parameter is skipped by any of its names."""
    named = list(model.named_parameters(remove_duplicate=False))
    if callable(skip) and not isinstance(skip, type | nn.Module):
        return {id(p) for name, p in named if skip(name, p)}
    patterns = [skip] if isinstance(skip, str) or not isinstance(skip, Iterable) else list(skip)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise _error(f"skip is {skip!r}", "skip", "give names of parameters, or a function of name and parameter")
    found: set[int] = set()
    for pattern in patterns:
        matching = {id(p) for name, p in named if fnmatch.fnmatchcase(name, pattern)}
        if not matching:
            raise _error(f"no parameter is named {pattern!r}", "skip",
                         "give names as model.named_parameters() does, with * for any part of one")
        found |= matching
    return found


def _check_memory(slots: Sequence[Slot], skipped: set[int]) -> None:
    """Refuse several parameters of one memory, which would be trained apart from each other."""
    names: dict[int, dict[int, str]] = {}
    for name, _, _, p in slots:
        if not is_lazy(p) and type(p.data) is Tensor and p.layout is strided and p.device.type != "meta" and p.numel():
            names.setdefault(p.data_ptr(), {})[id(p)] = name
    for those in names.values():
        if len(those) > 1 and not those.keys() <= skipped:
            raise _error(f"parameters {', '.join(map(repr, those.values()))} are different ones of the same memory",
                         "model", "tie them, by the same nn.Parameter in all places, or name them in skip")


def _check(name: str, p: nn.Parameter) -> None:
    def refuse(what: str, do: str) -> QuantizationError:
        return _error(f"parameter {name!r} {what}", f"{type(p).__name__}, {p.dtype}",
                      f"{do}, or name it in skip")

    if isinstance(p, LowPrecisionTensor):
        raise refuse("is in low precision already", "call memopt.dequantize_parameters_ first")
    if is_lazy(p) or p.device.type == "meta":
        raise refuse("has no values yet", "run the model once, or load its weights, first")
    fake = trace.is_fake(p.data)  # of a model to be planned, which has no values
    if not (fake or type(p.data) is Tensor) or p.layout is not strided:
        raise refuse("is no ordinary dense tensor", "convert the model before it is wrapped or sharded")
    if p.is_complex():
        raise refuse("is complex", "make it torch.view_as_real of it")
    if not p.is_floating_point():
        raise refuse("holds no floating-point numbers", "make it a buffer")
    if finfo(p.dtype).bits < 16:
        raise refuse("has a type that PyTorch does not compute in", "convert it to torch.bfloat16")
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise refuse("has a gradient hook", "register hooks after the conversion")
    if not fake and not p.detach().isfinite().all():
        raise refuse("holds NaN or Inf", "load finite weights first")
    if not fake and not p.detach().float().isfinite().all():
        raise refuse("holds values beyond the range of float32, in which scales are", "scale it down")


def _in_place_of(p: nn.Parameter, value: Tensor) -> nn.Parameter:
    new = nn.Parameter(value, requires_grad=p.requires_grad)
    new.grad = p.grad
    vars(new).update((k, v) for k, v in vars(p).items() if k not in OURS)  # the user's own marks
    return new


def _replace(slots: Sequence[Slot], made: dict[int, nn.Parameter]) -> None:
    """Put what was made into its places, or, where a module refuses, into none."""
    done: list[Slot] = []
    for slot in slots:
        path, module, name, p = slot
        if id(p) not in made:
            continue
        done.append(slot)
        try:
            setattr(module, name, made[id(p)])
        except Exception as error:
            for _, touched, its_name, old in done:
                touched._parameters[its_name] = old
            raise _error(f"parameter {path!r} cannot be replaced: {error}", type(module).__name__, "convert the "
                         "model before others wrap or compile it, or name the parameter in skip") from error
    for path, _, _, p in done:
        replaced.note(p, path, replaced.CONVERSION)


def _error(what: str, where: str, do: str) -> QuantizationError:
    return QuantizationError(what, where=where, do=do)
