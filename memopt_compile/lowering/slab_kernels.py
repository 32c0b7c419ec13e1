"""`memopt::compiled_update`: `memopt::quantized_update` by a kernel that Inductor makes, for its lowering;
and in place, `compiled_update_`.

The update of a slab is traced once for each kind of update: its decoding, arithmetic, rounding and encoding
become one graph, which Inductor fuses. Every parameter then goes through that kernel slab by slab, its
last slab filled up with zeros. What is held beside the result is what the kernel holds for one slab: so
Inductor may store what is read often, where writing it out again and again would make a formula grow
beyond all bounds (see `inlining`).

It draws what the eager code draws, since the draw of an element follows from its place, and computes the
same. But eager's kernels round a product and a sum at once, where these round twice: a scale may differ by
its last bit, and then a code in some thousands by one.

On a GPU, where what a launch takes counts, slabs are larger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat import inductor, trace
from ..optim.low_bit import Formats
from ..optim.one_operator import KEEP, change, subject
from ..quantization import arithmetic
from ..quantization.factored import Factored
from ..quantization.formats import Format
from ..quantization.named import form_of
from ..quantization.operators import (
    DECODE,
    DEQUANTIZE,
    QUANTIZE,
    elements_on,
    encode,
    some,
    whole_moment,
    whole_value,
)
from ..quantization.parameters import LowPrecisionTensor

# Of a slab: what a kernel stores between stays in a core's cache. Those of a large parameter are larger, so
# that calls take less of the time.
ELEMENTS, OF_LARGE = 1 << 15, 1 << 17
LARGE = 8 * OF_LARGE


class Part(NamedTuple):
    """How a tensor goes with the elements: how many of its own belong to so many of them, None for a tensor
    that every slab has whole; and its value for an element that is 0."""

    size: Callable[[int], int] | None = None
    zero: int = 0

    def cut(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """Of `count` elements from `first` on, a view."""
        return tensor if self.size is None else tensor.narrow(0, self.size(first), self.size(count))

    def filled(self, tensor: Tensor, length: int) -> Tensor:
        """With zeros to the size of a slab of `length` elements."""
        missing = 0 if self.size is None else self.size(length) - tensor.numel()
        return torch.nn.functional.pad(tensor, (0, missing), value=self.zero) if missing else tensor


@torch.library.custom_op("memopt::compiled_update", mutates_args=())
def compiled_update(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], method: str,
                    names: str, keys: str, values: list[float], numbers: list[Tensor],
                    layout: list[int], dtype: torch.dtype) -> list[Tensor]:
    """What `quantized_update` returns."""
    parts, states = [part.clone() for part in parameter], [each.clone() for each in state]
    slab_by_slab(parts, grad, states, method, names, keys, values, numbers, layout, dtype)
    return [*parts, *states]


@torch.library.custom_op("memopt::compiled_update_", mutates_args=("parameter", "state"))
def compiled_update_(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], method: str,
                     names: str, keys: str, values: list[float], numbers: list[Tensor],
                     layout: list[int], dtype: torch.dtype) -> None:
    """What `quantized_update_` does."""
    slab_by_slab(parameter, grad, state, method, names, keys, values, numbers, layout, dtype)


def slab_by_slab(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], method: str, names: str,
                 keys: str, values: list[float], numbers: list[Tensor], layout: list[int],
                 dtype: torch.dtype) -> None:
    """Change parameter and states in place."""
    optimizer, p, group = subject(parameter, state, method, keys, values, numbers, layout, dtype)
    if not group.get(KEEP, True):
        return
    formats = optimizer.formats(p, group)
    zeros_count = p.numel() % optimizer.block(p, group) and any(isinstance(form, Factored) for form in formats.values())
    if zeros_count or not optimizer.elementwise:  # in means, of blocks or of all rows and columns
        change(parameter, grad, state, method, names, keys, values, numbers, layout, dtype)
        return
    kinds = _parts(p, parameter, grad, dict(zip(names.split(), state)), formats)
    flat, states = ([t.view(-1) if t.dim() else t for t in tensors] for tensors in (parameter, state))
    given = [*flat, *(g.reshape(-1) for g in grad), *states]
    block, count, device = optimizer.block(p, group), p.numel(), given[0].device
    length = max(1, elements_on(device, ELEMENTS if count < LARGE else OF_LARGE) // block) * block
    kernel = _kernel((method, names, keys, tuple(values)), tuple(layout[:3]), dtype, length,
                     tuple((kind.size and kind.size(length), t.dtype, t.device) for kind, t in zip(kinds, given)),
                     (len(parameter), len(grad)), tuple((n.is_cuda or n.item() != 0, n.dtype, n.device) for n in numbers),
                     torch.get_num_threads())
    place = torch.empty((), dtype=torch.int32, device="cpu")
    counts = [(t, t.clone()) for k, t in zip(kinds, given) if not k.size]
    for first in some(range(0, count, length)):
        here = min(length, count - first)
        for each, before in counts:  # every slab is of the same step
            each.copy_(before)
        parts = [kind.cut(t, first, here) for kind, t in zip(kinds, given)]
        filled = parts if here == length else [kind.filled(part, length) for kind, part in zip(kinds, parts)]
        kernel([place.fill_(layout[3] + first), *filled, *numbers])
        for i, (part, made) in enumerate(zip(parts, filled)):
            if made is not part and not 0 <= i - len(parameter) < len(grad):
                part.copy_(made[:part.numel()])


@compiled_update.register_fake
def _(parameter: list[Tensor], grad: list[Tensor], state: list[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(t) for t in (*parameter, *state)]


def forget() -> None:
    """Drop all kernels: for `torch.compiler.reset`."""
    _kernel.cache_clear()


def _parts(p: Tensor, parameter: Sequence[Tensor], grad: Sequence[Tensor],
           state: Mapping[str, Tensor], formats: Formats) -> list[Part]:
    """Of all tensors that a kernel takes."""
    whole = Part(lambda n: n)
    kinds = [*_of_form(p.form), Part()] if isinstance(p, LowPrecisionTensor) else [whole]
    kinds = kinds * bool(parameter)
    kinds += [whole] * len(grad) if len(grad) < 2 else _of_form(form_of("linear", 8, p.form.block))
    for name, tensor in state.items():
        form = formats.get(name.removesuffix("_scale"))
        if form is None:
            kinds.append(Part(None if tensor.dim() == 0 else lambda n: n))
        else:
            kinds.append(_of_form(form)[name.endswith("_scale")])
    return kinds


def _of_form(form: Any) -> list[Part]:
    """Of codes and scales. In a map without a 0 what is least stands for it."""
    zero = 0
    if isinstance(form, Format) and form.decades:
        zero, _ = arithmetic.numbering(form)
        zero |= zero << 4 if form.bits == 4 else 0
    *planes, scales = (Part(lambda n, i=i: form.part_sizes(n)[i]) for i in range(len(form.part_sizes(0))))
    return [*(plane._replace(zero=zero) for plane in planes), scales]


class _TensorsForNumbers(TorchFunctionMode):
    """Where eager code gives an operator a number that it reads from a tensor, such as a bias correction:
    the arithmetic with that tensor, rounded as by the operator. And `settings` are known not to be 0."""

    def __init__(self, settings: Sequence[Tensor]) -> None:
        super().__init__()
        self.settings = {id(t) for t in settings}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in ("ne", "eq") and id(args[0]) in self.settings and args[1] == 0:
            return name == "ne"
        number = kwargs.get("alpha", kwargs.get("value"))
        if not isinstance(number, Tensor) or name not in ("add", "sub", "addcdiv", "addcmul"):
            return func(*args, **kwargs)
        into, first, *second = args
        scaled = first * number.to(first.dtype)
        if second:
            scaled = scaled / second[0] if name == "addcdiv" else scaled * second[0]
        return getattr(into, name[:3] + func.__name__[len(name):])(scaled)  # in place, if it is


@functools.cache
def _kernel(of: tuple, layout: tuple[int, ...], dtype: torch.dtype, length: int, shapes: tuple, counts: tuple,
            numbers: tuple, threads: int) -> Callable[[list], Sequence[Tensor]]:
    """The update of one slab in place, compiled: takes where it is, its tensors and the numbers, in a list."""
    parts, others = counts[0], sum(counts)
    place: Any = None

    def update(*tensors: Tensor) -> list[Tensor]:
        given = tensors[:len(shapes)]
        # `KEEP` is the one that is no number, and true by now.
        settings = [(kind is torch.bool or t) if other else 0.0
                    for t, (other, kind, _) in zip(tensors[len(shapes):], numbers)]
        parameter, grad, state = given[:parts], given[parts:others], given[others:]
        with _TensorsForNumbers(settings):
            first = 0 if layout[0] else place  # `quantized` knows it of a parameter in few bits
            change(parameter, grad, state, *of, settings, [*layout, first, length], dtype)
        return [*parameter, *state]

    def traced(first: Tensor, *tensors: Tensor) -> tuple[()]:
        nonlocal place
        place = first
        made = trace.functionalized(update)(*tensors)
        for old, new in zip((*tensors[:parts], *tensors[others:]), made):
            old.copy_(new)
        return ()

    def quantized(value: Tensor, draws: Tensor, *form: Any) -> list[Tensor]:
        return encode(value.reshape(-1), form_of(*form), draws, place, by=arithmetic)

    def example() -> list[Tensor]:
        return [torch.empty((), dtype=torch.int32, device="cpu"),
                *(torch.empty(() if size is None else (size,), dtype=kind, device=where) for size, kind, where in shapes),
                *(torch.empty((), dtype=kind, device=where) for _, kind, where in numbers)]

    with trace.real_tensors():
        module = trace.traced_as_compiled(traced, example, {
            **inductor.decompositions(), QUANTIZE: quantized, DEQUANTIZE: whole_value, DECODE: whole_moment,
            torch.ops.aten.dequantize.self: lambda value: value})
        return inductor.compile_graph(module, stores=True)[0]


COMPILED_UPDATE = torch.ops.memopt.compiled_update.default
COMPILED_UPDATE_ = torch.ops.memopt.compiled_update_.default
