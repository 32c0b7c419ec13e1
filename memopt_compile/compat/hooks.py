"""Hooks on tensors that the step computes: Dynamo traces one where it is registered, and eager runs it when the gradient is there.

What it reads of Python's may be another thing by then (``scale.value = 2.0`` between the two), and the step would train by the old one
without a word. So it is traced once more where a backward begins, and both traces have to be the same. Where no backward
follows in the graph nothing is known of what will be then: Python runs that function.

In the graph a hook is registered by a call (`register`), as torch 2.13 does it, and taken away by another (`remove`), for which no release
has a form. The older ones move what the hook reads to behind the tensor, also inputs of the graph and what an update
in between changes.

Before: ``hidden = linear(x, w); scale = hidden.abs().mean(); handle = hidden.register_hook(lambda g: g / scale); ..; handle.remove()``
After:  ``register = register(hidden, 0, hook_body_0, scale); ..; remove(register, 0)``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.exc import UnknownPropertiesDuringBackwardTrace, Unsupported
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.higher_order_ops import speculate_subgraph
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import RemovableHandleVariable

from . import breaks

REMEDY = "multiply the gradient in place of the hook, or register it where what it reads has its value"


def register(tensor: Tensor, number: int, body: Callable, *given: Any) -> Tensor:
    """In the graph: the tensor itself, with a hook that calls ``body(gradient, *given)``."""
    def hook(gradient: Tensor) -> Any:
        result = body(gradient, *given)
        return result if isinstance(result, Tensor) else next(iter(result or ()), None)

    vars(tensor).setdefault("memopt_handles", {})[number] = tensor.register_hook(hook)
    return tensor


def remove(tensor: Tensor, number: int) -> None:
    """In the graph: a backward that begins behind this runs no such hook."""
    vars(tensor)["memopt_handles"][number].remove()


class _Handle(RemovableHandleVariable):
    """What `Tensor.register_hook` returns for a computed tensor."""

    def __init__(self, tensor: Any = None, number: int = 0, **rest: Any) -> None:
        super().__init__(**rest)
        self.tensor, self.number = tensor, number

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "remove":
            return super().call_method(tx, name, args, kwargs)
        self.tensor.tracer.create_proxy("call_function", remove, (self.tensor, self.number), {})
        _known(tx.output).pop(self.number, None)
        self.idx = self.REMOVED
        return ConstantVariable.create(None)


def _known(output: Any) -> dict[int, tuple[Any, Any, Any]]:
    """The hooks that are registered on computed tensors, these, and what each does."""
    return vars(output).setdefault("memopt_hooks", {})


def _register(original: Callable, self: Any, tx: Any, name: str, hook: Any) -> Any:
    if self.source or name != "register_hook":
        return original(self, tx, name, hook)
    if "memopt_hooks_left" in vars(tx.speculation_log):
        breaks.run_in_eager("a hook is registered for a backward elsewhere")
    if self.as_proxy().tracer is not tx.output.current_tracer:
        breaks.break_graph("a tensor's hook is registered in a part of the step that is traced apart", "as a checkpoint is, "
                           "which is given the tensor", "register it where the tensor is computed")
    body, given = _traced(tx, hook, self)
    number = vars(tx.output)["memopt_hook"] = vars(tx.output).get("memopt_hook", -1) + 1
    _known(tx.output)[number] = hook, self, _does(body, given, self)
    modules = tx.output.tracing_context.module_context.copy_graphstate().nn_modules
    attribute = tx.output.install_subgraph("hook_body", fx.GraphModule(modules, body))
    tensor = self.as_proxy()
    self.proxy = tensor.tracer.create_proxy(
        "call_function", register, (tensor, number, tensor.tracer.create_proxy("get_attr", attribute, (), {}), *given), {})
    self.proxy.node.meta["example_value"] = tensor.node.meta["example_value"]
    self.synchronize_attributes(tx)
    return _Handle(self.proxy, number, mutation_type=ValueMutationNew())


def _traced(tx: Any, hook: Any, tensor: Any) -> tuple[fx.Graph, list[fx.Proxy]]:
    """A graph of what the hook does with a gradient, and what else it reads."""
    scopes = [tracer := tensor.as_proxy().tracer]
    while (tracer := tracer.parent) is not None:
        scopes.insert(0, tracer)
    try:
        with tx.strict_translation_mode(lambda variable: variable.is_tensor()), mock.patch.object(tx.output, "tracers", scopes):
            _, graph, given = speculate_subgraph(
                tx, hook, [tensor], {}, "register_hook", source_target=torch.ops.higher_order.wrap, enable_grad=None,
                set_subgraph_inputs="automatic_with_forced_inputs", restore_side_effects=True)
    except UnknownPropertiesDuringBackwardTrace:
        breaks.break_graph("a tensor's hook asks how a gradient lies in memory", "a trace does not know it", "ask of its shape only")
    except Unsupported as error:
        if "side effect" not in str(error):
            raise
        breaks.break_graph("a tensor's hook writes to what is not its own", "the graph has no place for it",
                           "have the gradient computed: torch.autograd.grad(loss, [*parameters, tensor])")
    return graph, list(given)


def _does(graph: fx.Graph, given: list[fx.Proxy], tensor: Any) -> Any:
    """The same in a form that compares."""
    outside = [proxy.node for proxy in given if proxy.node is not tensor.as_proxy().node]
    places = {node: i for i, node in enumerate(graph.nodes)}
    return outside, [(node.op, "" if node.op == "placeholder" else str(node.target),
                      str(fx.map_arg((node.args, node.kwargs), places.__getitem__))) for node in graph.nodes]


def refuse_changed(tx: Any) -> None:
    """End the graph at a backward for which a hook does something else than where it was registered."""
    for hook, tensor, known in _known(tx.output).values():
        if _does(*_traced(tx, hook, tensor), tensor) != known:
            breaks.break_graph("a tensor's hook reads what the step has changed since it was registered",
                               "a graph has one place for both", REMEDY)


def are_there(output: Any) -> bool:
    """Whether the graph has hooks on computed tensors."""
    return "memopt_hook" in vars(output)


def leave(output: Any) -> None:
    """Trace the frame again, and have Python run the function that registers them."""
    vars(output.root_tx.speculation_log)["memopt_hooks_left"] = True
    breaks.restart(output, "a hook is registered for a backward elsewhere")


REPLACED = [(TensorVariable, "_method_register_hook", _register)]
