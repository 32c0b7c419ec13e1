"""`LowPrecisionTensor`: a parameter whose memory is codes and scales of a linear format.

To PyTorch it is a tensor of its shape and type. Every operator that reads it gets it decoded; one
that writes to it in place gets it decoded, and what it has written is encoded again, with the
scale of each block computed anew. So forward, backward and updates are what they always are, and
`torch.compile`, which sees the tensors inside, captures decoding and encoding as operators.

`draws` counts the writes. It decides how the next one is rounded, goes into checkpoints with the
codes, and begins with a hash of the parameter's name: a run gives the same numbers again, eager,
captured or restarted, and two parameters draw different ones (but for one pair in 65,536, by chance).

A view of such a tensor is a copy of what it views: what is written into the view is lost. The
forms of that which are certain to be meant (``p[0] = 1``) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compat import subclass
from ..errors import QuantizationError
from .formats import Linear
from .loading import Loading
from .operators import decode, dequantize, encode, part_of, quantize

aten = torch.ops.aten
NAMES = ("low", "high", "scales", "draws")


class LowPrecisionTensor(Tensor):
    """A tensor of this size and type, kept in `parts`: the parts of `form`, and `draws`."""

    __torch_function__ = subclass.no_torch_function

    form: Linear
    loading: Loading | None = None

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], form: Linear, size: Sequence[int], dtype: torch.dtype,
                requires_grad: bool = False) -> LowPrecisionTensor:
        self = subclass.wrapper(cls, size, dtype, parts[0].device, requires_grad)
        self.form = form
        for name, part in zip(_names(form), parts):
            setattr(self, name, part)
        return self

    @property
    def parts(self) -> list[Tensor]:
        """[low, (high,) scales, draws]."""
        return [getattr(self, name) for name in _names(self.form)]

    @property
    def writes_in_float32(self) -> bool:
        """Whether operators that write to it compute in float32 rather than in its type, which would leave nothing of
        small changes to encode."""
        return self.dtype in (torch.bfloat16, torch.float16)

    def like_this(self, parts: Sequence[Tensor], **changes: Any) -> LowPrecisionTensor:
        """A tensor of other parts."""
        return LowPrecisionTensor(parts, changes.get("form", self.form),
                                  changes.get("size", self.shape), changes.get("dtype", self.dtype))

    # ------------------------------------------------------------------ for eager updates

    def as_vector(self) -> LowPrecisionTensor:
        """The same memory as a vector."""
        return self.like_this(self.parts, size=(self.numel(),))

    def read(self, first: int, length: int) -> Tensor:
        """Elements of a vector from a block's first on, in float32."""
        return decode(part_of(self.parts, self.form, first, length), self.form, length)

    def write(self, value: Tensor, first: int) -> None:
        """Encode what `read` gave after a change; `draws` has to count it before."""
        made = encode(value, self.form, self.draws, first)
        for part, new in zip(part_of(self.parts, self.form, first, value.numel()), made):
            part.copy_(new)

    # ------------------------------------------------------------------ for PyTorch

    @property
    def data(self) -> Tensor:
        """The same memory, of which autograd knows nothing."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Write these values, as `copy_` does: PyTorch's setter would change nothing, and say nothing."""
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise QuantizationError(
                f"`.data` of a low-precision parameter cannot become {tuple(value.shape)} of {value.dtype} on "
                f"{value.device}", where=f"a parameter of shape {tuple(self.shape)}, {self.dtype}, on {self.device}",
                do="give values of its shape, type and device; model.to(..) changes the latter")
        with torch.no_grad():
            self.copy_(value)

    def share_memory_(self) -> LowPrecisionTensor:
        """Move what it is kept in to memory that processes share. (PyTorch's would look for memory of its own.)"""
        for part in self.parts:
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(part.is_shared() for part in self.parts)

    def storage(self) -> NoReturn:
        """Asked for by safetensors, which would report an invalid one."""
        raise QuantizationError(
            "a low-precision parameter has no memory of its values", where=f"a parameter of shape {tuple(self.shape)} "
            f"in {self.form.bits} bits", do="save memopt.dequantize_parameters_(copy.deepcopy(model)); "
            "model.load_state_dict takes such weights")

    def apply_(self, function: Callable) -> Tensor:
        """As `Tensor.apply_`, which would write to memory that is not there."""
        return self.copy_(self.dequantize().apply_(function))

    def __get_tensor_shard__(self, index: Any) -> LowPrecisionTensor:
        """What torch.distributed.checkpoint saves, or narrows to load into it part by part."""
        here = self.detach()
        self.loading = self.loading or Loading(self.detach())
        here.narrow = self.loading.narrow  # type: ignore[method-assign]
        return here

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(_names(self.form)), (self.form, tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any,
                             stride: Any) -> LowPrecisionTensor:
        form, size, dtype = context
        return LowPrecisionTensor([inner[name] for name in _names(form)], form, size, dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func.overloadpacket)
        if special is not None:
            return special(func, *args, **kwargs)
        return cls.in_full_precision(func, args, kwargs)

    @classmethod
    def in_full_precision(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of such tensors, decoded, and encoded again if it has written to them."""
        written = _written(func, args, kwargs)
        values: dict[int, Tensor] = {}  # a tensor that is given twice is decoded once
        wide = len(written) == 1 and written[0].writes_in_float32 and _writes_once(func)

        def operand(t: Tensor) -> Tensor:
            dtype = torch.float32 if wide and t.dtype == written[0].dtype else t.dtype
            if not isinstance(t, LowPrecisionTensor):
                return t.to(dtype)
            if id(t) not in values:
                values[id(t)] = t.like_this(t.parts, dtype=dtype).dequantize()
            return values[id(t)]

        args, kwargs = subclass.on_tensors(Tensor, operand, (args, kwargs))
        result = func(*args, **kwargs)
        for t in written:
            t.copy_(values[id(t)])
            result = t if result is values[id(t)] else result
        return result

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise QuantizationError(
            "elements of a low-precision parameter cannot be written by index",
            where=f"a parameter of shape {tuple(self.shape)} in {self.form.bits} bits",
            do="write all of it: p.copy_(new), with new = p.dequantize() changed as you like")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (f"LowPrecisionTensor(size={tuple(self.shape)}, dtype={self.dtype}, "
                f"device={self.device}, bits={self.form.bits}, group_size={self.form.block})")


def encoded(value: Tensor, form: Linear, draws: int | Tensor = 0) -> LowPrecisionTensor:
    """`value` in a format, rounded to the nearest: there is nothing yet that could be lost."""
    count = draws if isinstance(draws, Tensor) else torch.tensor(
        draws, dtype=torch.int64, device=value.device)
    parts = quantize(value.detach(), count, form.map, form.bits, form.block, None)
    return LowPrecisionTensor([*parts, count], form, value.shape, value.dtype)


def _written(func: Any, args: Any, kwargs: Any) -> list[LowPrecisionTensor]:
    """The tensors of ours that an operator writes to.

    Raises:
        QuantizationError: it writes to several at once, which would all have to be decoded.
    """
    found = []
    for i, given in enumerate(func._schema.arguments):
        if given.alias_info is None or not given.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(given.name)
        if isinstance(value, LowPrecisionTensor):
            found.append(value)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, LowPrecisionTensor) for v in value):
            raise QuantizationError(
                "low-precision parameters cannot be updated all at once", where=str(func),
                do="leave foreach=True and fused=True out, and give AveragedModel avg_fn in place of multi_avg_fn: "
                   "then they come one at a time")
    return found


def _writes_once(func: Any) -> bool:
    return sum(given.alias_info is not None and given.alias_info.is_write for given in func._schema.arguments) == 1


def _names(form: Linear) -> tuple[str, ...]:
    return NAMES if form.bits > 8 else (NAMES[0], *NAMES[2:])


# ---------------------------------------------------------------------- operators by themselves


def _decode(func: Any, self: LowPrecisionTensor) -> Tensor:
    form = self.form
    return dequantize(self.parts[:-1], form.map, form.bits, form.block, list(self.shape), self.dtype)


def _each_part(func: Any, self: LowPrecisionTensor, **kwargs: Any) -> LowPrecisionTensor:
    """The same tensor of the same memory (`detach`), or of a copy of it (`clone`)."""
    return self.like_this([func(part) for part in self.parts])


def _view(func: Any, self: LowPrecisionTensor, size: Sequence[int]) -> Tensor:
    """The same tensor as `_each_part`, if it has this size."""
    if tuple(size) == tuple(self.shape):
        return self.like_this([aten.alias(part) for part in self.parts])
    return func(self.dequantize(), size)


def _to(func: Any, self: LowPrecisionTensor, dtype: Any = None, device: Any = None,
        non_blocking: bool = False, **kwargs: Any) -> Tensor:
    """A copy of another float type or on another device; a plain tensor of any other type."""
    if dtype is not None and not dtype.is_floating_point:
        return func(self.dequantize(), dtype=dtype, device=device, **kwargs)
    parts = [func(part, device=device, non_blocking=non_blocking) for part in self.parts]
    return self.like_this(parts, dtype=dtype or self.dtype)


def _decomposed(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """By the operators that it is made of. In inference mode and within an operator PyTorch leaves that to us; decoded
    first, ``p.to(torch.float32)`` of a parameter in bfloat16 would be what bfloat16 has of the value."""
    return func.decompose(*args, **kwargs)


def _copy(func: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(to, LowPrecisionTensor):
        return func(to, source.dequantize(), non_blocking)
    alike = isinstance(source, LowPrecisionTensor) and to.form[:2] == source.form[:2]
    if alike and to.shape == source.shape:
        parts: Sequence[Tensor] = source.parts
    else:
        if isinstance(source, LowPrecisionTensor):
            source = source.dequantize()
        value = source.to(to.device).expand(to.shape)
        count = to.draws + 1
        parts = [*quantize(value, count, to.form.map, *to.form), count]
    for part, new in zip(to.parts, parts):
        part.copy_(new, non_blocking)
    return to


def _where(func: Any, condition: Tensor, self: Tensor, other: Tensor) -> Tensor:
    """One of two such tensors, as it is, by a condition for all of it."""
    ours = [t for t in (self, other) if isinstance(t, LowPrecisionTensor)]
    alike = len(ours) == 2 and (self.form, self.shape) == (other.form, other.shape)
    if alike and condition.dim() == 0:
        return self.like_this([func(condition, a, b) for a, b in zip(self.parts, other.parts)])
    values = [t.dequantize() if isinstance(t, LowPrecisionTensor) else t
              for t in (condition, self, other)]
    return func(*values)


def _of_its_shape(func: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`zeros_like` and the like ask for no values: a plain tensor, or a fake one, and nothing is decoded."""
    like = self.parts[0].new_empty((), dtype=self.dtype).expand(self.shape)
    if kwargs.get("memory_format") in (None, torch.preserve_format):
        kwargs["memory_format"] = torch.contiguous_format
    return func(like, *args, **kwargs)


_SPECIAL: dict[Any, Callable] = {
    aten.dequantize: _decode,
    aten.detach: _each_part,
    aten.alias: _each_part,
    aten.view: _view,
    aten.clone: _each_part,
    aten._to_copy: _to,
    aten.to: _decomposed,
    aten.copy_: _copy,
    aten.where: _where,
    **dict.fromkeys((aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like,
                     aten.rand_like, aten.randn_like), _of_its_shape),
}


def register(operator: Any, function: Callable) -> None:
    """Let `function` of the operator and its arguments do what `operator` does to such tensors."""
    _SPECIAL[operator] = function


# Files of such parameters load with `torch.load(.., weights_only=True)`.
torch.serialization.add_safe_globals([LowPrecisionTensor, Linear])
