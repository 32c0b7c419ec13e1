"""What is read off tensors that constants alone make: numbers (``torch.arange(2, x.dim()).tolist()``), and how much a mask
chooses (``similarities[~torch.eye(n, dtype=torch.bool)].view(n, -1)``).

Dynamo has no values of tensors: it would end the graph, or read them when the step runs. What makes such a tensor is run
for its value instead, on the device that it is on. A choice is made of as many places as the value tells:

Before:  chosen = x[mask]
After:   chosen = x[torch.nonzero_static(mask, size=12).unbind(1)]
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

OPERATORS, ELEMENTS, READ = 100, 2**22, 1000  # the most that is run, and read as Python numbers


def numbers_of(tx: Any, tensor: Any, name: str) -> Any:
    """The result of ``tensor.item()`` or ``tensor.tolist()``; None for what constants alone do not make."""
    if name not in ("item", "tolist") or (value := value_of(tensor.as_proxy().node)) is None:
        return None
    return VariableTracker.build(tx, getattr(value, name)()) if value.numel() <= (READ if name == "tolist" else 1) else None


def chosen(tx: Any, function: Any, args: Any) -> Any:
    """The result of ``x[mask]``; None for anything else."""
    if function is not operator.getitem or len(args) != 2 or not all(isinstance(a.realize(), TensorVariable) for a in args):
        return None
    mask = value_of(args[1].as_proxy().node)
    if mask is None or mask.dtype is not torch.bool or not mask.dim():
        return None
    return UserFunctionVariable(_chosen).call_function(tx, [*args, ConstantVariable.create(int(mask.sum()))], {})


def _chosen(x: Tensor, mask: Tensor, count: int) -> Tensor:
    return x[torch.nonzero_static(mask, size=count).unbind(1)]


def value_of(tensor: fx.Node) -> Tensor | None:
    """The value of a node of Dynamo's graph that is made of constants, draws nothing and was not written; else None."""
    made: dict[fx.Node, None] = {}
    stack = [tensor]
    while stack:
        node = stack.pop()
        if node in made:
            continue
        if len(made) == OPERATORS or node.op not in ("call_function", "call_method") or not _is_known(node.meta.get("example_value")):
            return None
        made[node] = None
        stack.extend(node.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    with torch.random.fork_rng(), _disable_current_modes(), torch.no_grad():
        before = _random()
        for node in tensor.graph.nodes:
            if node in made:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = (getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method"
                                else node.target(*args, **kwargs))
                if _devices(values[node]) != _devices(node.meta["example_value"]):
                    return None
        return values[tensor] if all(map(torch.equal, before, _random())) else None


def _devices(value: Any) -> list[torch.device]:
    return [t.device for t in pytree.tree_leaves(value)]


def _random() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _is_known(value: Any) -> bool:
    """Whether it may be run: not what autocast would make in another precision."""
    if isinstance(value, tuple | list):
        return all(map(_is_known, value))
    return (isinstance(value, Tensor) and value._version == 0 and not value.requires_grad and isinstance(value.numel(), int)
            and value.numel() <= ELEMENTS and not (value.is_floating_point() and torch.is_autocast_enabled(value.device.type)))
