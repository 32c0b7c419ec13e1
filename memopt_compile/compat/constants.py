"""Tensors that a step computes from nothing but constants: ``torch.tensor([[2, 3]])``, a mask of ones, ``torch.arange(n)``.

A number that is read off one (``shapes.tolist()``, ``if mask.any()``) is the same at each call, under the guards that make
the constants, and so is how much a mask chooses (``similarities[~torch.eye(n, dtype=torch.bool)].view(n, -1)``). So it is
computed while the step is traced, where Dynamo, which has no values, ends the graph. Checked against torch 2.11 and 2.13.

Before:  chosen = x[mask]
After:   chosen = x[torch.nonzero_static(mask, size=12).unbind(1)]
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from . import fake_value

LARGEST = 1 << 20  # elements; nobody reads a number off a large one, and each is computed again
FUNCTIONS = ("_operator", "torch", "torch.functional", "torch.nn.functional", "torch._C._nn")  # their modules


class _Varies(Exception):
    """An operator that may give something else at the next call."""


class _Refuse(TorchDispatchMode):
    """No operator that draws or leaves memory as it finds it, and none that torch does not know."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags or "empty" in function.__name__ or function.namespace != "aten":
            raise _Varies
        return function(*args, **(kwargs or {}))


def value_of(variable: Any) -> Tensor | None:
    """The tensor that a Dynamo variable stands for, if constants alone make it."""
    node = variable.as_proxy().node
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad(), _Refuse():
        for each in _with_what_writes(node):
            args, kwargs = (fx.map_arg(a, values.__getitem__) for a in (each.args, each.kwargs))
            function = each.target if each.op == "call_function" else getattr(type(args[0]), each.target)
            try:
                values[each] = function(*args, **kwargs)
            except (_Varies, RuntimeError, IndexError):  # or what eager raises too, when it comes to it
                return None
    return values[node] if values and all(_is_as_traced(v, n.meta.get("example_value")) for n, v in values.items()) else None


def _with_what_writes(node: fx.Node) -> list[fx.Node]:
    """The nodes that make this one and that write to what these make, in order; none if any of it is not constant."""
    made = _made_of_constants({node})
    while made:
        memory = {m for m in map(_memory, made) if m is not None}
        others = {n for n in node.graph.nodes if n not in made and n.op != "output" and _may_write(n) and any(
            _memory(given) in memory for given in n.all_input_nodes)}
        if not others:
            break
        made = _made_of_constants(made | others)
    return [each for each in node.graph.nodes if each in made]


def _made_of_constants(nodes: set[fx.Node]) -> set[fx.Node]:
    """These and all that makes them; none if there is anything among them that is not torch's, or an input."""
    found, stack = set(), [*nodes]
    while stack:
        each = stack.pop()
        if each in found:
            continue
        example = each.meta.get("example_value")
        if not _is_torchs(each) or isinstance(example, Tensor) and (
                example.is_inference() or not isinstance(example.numel(), int) or example.numel() > LARGEST):
            return set()
        found.add(each)
        stack.extend(each.all_input_nodes)
    return found


def _is_torchs(node: fx.Node) -> bool:
    return node.op == "call_method" or node.op == "call_function" and getattr(node.target, "__module__", "") in FUNCTIONS


def _may_write(node: fx.Node) -> bool:
    """By the name; where that does not say so, the versions do."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return not _is_torchs(node) or name.endswith("_") and not name.endswith("__") or name == "setitem" or "out" in node.kwargs


def _memory(node: fx.Node) -> int | None:
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, Tensor) and example.layout is torch.strided else None


def _is_as_traced(value: Any, example: Any) -> bool:
    """Whether a value is what Dynamo has in its place, written to as often: autocast and modes, say, are nodes of their own."""
    if not isinstance(example, Tensor):
        return not isinstance(value, Tensor)
    return type(value) is Tensor and (value.dtype, value.shape, value.device, value._version) == (
        example.dtype, example.shape, example.device, example._version)


def read(tensor: Any, name: str) -> Any:
    """``tensor.item()`` or ``tensor.tolist()`` of such a tensor; None of any other."""
    if name not in ("item", "tolist") or (known := value_of(tensor)) is None or known.is_meta:
        return None
    return getattr(known, name)() if name == "tolist" or known.numel() == 1 else None


def truth(tensor: Any) -> bool | None:
    """What ``if tensor:`` asks."""
    known = read(tensor, "item")
    return None if known is None else bool(known)


def chosen(tx: Any, function: Any, args: Any) -> Any:
    """The result of ``x[mask]`` with a mask of constants; None of anything else."""
    if function is not operator.getitem or len(args) != 2 or not all(isinstance(a.realize(), TensorVariable) for a in args):
        return None
    example = fake_value(args[1])
    if example.dtype is not torch.bool or not example.dim() or (mask := value_of(args[1])) is None or mask.is_meta:
        return None
    return UserFunctionVariable(_chosen).call_function(tx, [*args, ConstantVariable.create(int(mask.sum()))], {})


def _chosen(x: Tensor, mask: Tensor, count: int) -> Tensor:
    return x[torch.nonzero_static(mask, size=count).unbind(1)]
