"""What a module gives out when a parameter that `shard_` has shared is read: the rows of all ranks, gathered.

It is a value, not the parameter. What is written into it would be lost, and nothing would say so: eager code
gets a `Gathered` instead, which refuses that, and in a step that is compiled the write is found in its graph
(`compat.data.write_of_gathered`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..compat import subclass
from ..errors import OptionError
from ..quantization.parameters import LowPrecisionTensor
from . import meeting, redistributing
from .copying import copied as copied_tensor
from .lost import naming_the_lost
from .storage import storage_of

IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and",
                                                 "or", "xor", "lshift", "rshift")) | {"__setitem__", "__set__"}
DO = ("write to the parameter itself, under torch.no_grad(): it is among model.parameters(), and what is written "
      "to it is written to this rank's rows")


class Gathered(Tensor):
    """A plain tensor to whatever reads it."""

    read_from: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (written := _written(func, args, kwargs)) is not None:
            raise lost(written.read_from, f"{getattr(func, '__name__', func)}(..)")
        result = subclass.no_torch_function(func, types, args, kwargs)
        if func == Tensor.detach or func == Tensor.data.__get__:  # the same memory
            return gathered(result, args[0].read_from)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)


def gathered(value: Tensor, name: str) -> Tensor:
    """`value` of parameter `name`, with writes refused. One that is decoded when it is read stays as it is."""
    if type(value) is not Tensor:
        return value
    value = value.as_subclass(Gathered)
    value.read_from = name
    return value


def lost(name: str, where: str) -> OptionError:
    return OptionError(f"{name or 'a parameter'} is shared by ranks, and what a module gives out is gathered from them: "
                       "what is written into it is lost", where=where, do=DO)


def _written(func: Any, args: Any, kwargs: Any) -> Gathered | None:
    name = getattr(func, "__name__", "")
    places = [kwargs.get("out")]
    if name in IN_PLACE or name.endswith("_") and not name.endswith("__"):
        places += [args[0] if args else kwargs.get("tensor", kwargs.get("input"))]
    return next((place for place in places if isinstance(place, Gathered)), None)


def reading(kind: type[nn.Module], names: tuple[str, ...], replicas: Any) -> type[nn.Module]:
    """A subclass of a module's class that gathers these parameters when they are read."""
    return type(kind.__name__, (kind,), {
        **{name: property(_reader(name, replicas)) for name in names},
        "__deepcopy__": _copied(kind), "_apply": _converted(kind, names), "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _copied(kind: type[nn.Module]) -> Callable[[nn.Module, dict], nn.Module]:
    """`copy.deepcopy` of a module, such as for a mean of its weights. The copy has shards of its own, and is for
    eager code: nothing else is known of them."""

    def copied(module: nn.Module, memo: dict) -> nn.Module:
        for p in module._parameters.values():
            if isinstance(p, DTensor) and id(p) not in memo:
                copied_tensor(p, memo)
        if hasattr(kind, "__deepcopy__"):
            return kind.__deepcopy__(module, memo)
        make, given, state = module.__reduce_ex__(4)[:3]
        memo[id(module)] = new = make(*given)
        new.__setstate__(copy.deepcopy(state, memo))
        return new

    return copied


def _converted(kind: type[nn.Module], names: tuple[str, ...]) -> Callable[..., nn.Module]:
    """What ``module.to(..)``, ``.float()`` and their like do to each module: shared parameters may stay as they are."""

    def converted(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = module._parameters
        shared = {name: storage for name in names if (storage := storage_of(own[name])) is not None}
        for name, storage in shared.items():
            with torch.no_grad():
                rows = own[name].to_local()
                if not _same(rows, fn(rows)):
                    raise OptionError(
                        f"{storage.name} is shared by ranks, and cannot get another type, device or layout",
                        where=f"{kind.__name__}._apply(), as by .to(..)",
                        do="convert and move the model before its optimizer is made and memopt.shard_ is called")
        vars(module)["_parameters"] = {name: p for name, p in own.items() if name not in shared}
        try:
            return kind._apply(module, fn, recurse)
        finally:
            own.update(module._parameters)
            vars(module)["_parameters"] = own

    return converted


def _same(rows: Tensor, new: Tensor) -> bool:
    if isinstance(rows, LowPrecisionTensor) and isinstance(new, LowPrecisionTensor):
        return new.dtype == rows.dtype and all(a.data_ptr() == b.data_ptr() for a, b in zip(rows.parts, new.parts))
    return new is rows


def _reader(name: str, replicas: Any) -> Callable[[nn.Module], Tensor]:
    def whole(sharded: DTensor) -> Tensor:
        return sharded.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial("avg")])

    def whole_of_replicas(sharded: DTensor) -> Tensor:
        rows = DTensor.from_local(sharded.to_local(), replicas, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial("avg")])  # of gradients that have been scattered
        return DTensor.from_local(
            rows, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape,
            stride=sharded.stride()).redistribute(placements=[Replicate()]).to_local(
                grad_placements=[Partial("avg")])

    gather = whole if replicas is None else whole_of_replicas

    def read(module: nn.Module) -> Tensor:
        sharded = module._parameters[name]
        if not isinstance(sharded, DTensor):  # put there since, as by torch.func.functional_call
            return sharded
        if torch.compiler.is_compiling():
            return gather(sharded)
        storage = storage_of(sharded)
        if storage is None:  # a copy of the model
            return gathered(gather(sharded), name)
        with naming_the_lost(storage.all_ranks, f"reading {storage.name}"):
            meeting.come_together(f"reads {storage.name}", storage.all_ranks, f"reading {storage.name}")
        with redistributing.said():
            return gathered(gather(sharded), storage.name)

    return read
