"""Hooks on tensors that the step computes: Dynamo traces one where it is registered, and eager runs it when the gradient is there.

What it reads of Python's may be another thing by then (``scale.value = 2.0`` between the two), and the step would train by the old one
without a word. So it is traced once more where a backward begins, and both traces have to be the same. Where no backward
follows in the graph nothing is known of what will be then: Python runs that function.

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo.variables.higher_order_ops import speculate_subgraph
from torch._dynamo.variables.tensor import TensorVariable

from . import breaks

REMEDY = "multiply the gradient in place of the hook, or register it where what it reads has its value"


def _known(output: Any) -> list[tuple[Any, Any, Any]]:
    """The hooks that are registered on computed tensors, these, and what each does."""
    return vars(output).setdefault("memopt_hooks", [])


def _register(original: Callable, self: Any, tx: Any, name: str, hook: Any) -> Any:
    if self.source:
        return original(self, tx, name, hook)
    if "memopt_hooks_left" in vars(tx.speculation_log):
        breaks.run_in_eager("a hook is registered for a backward elsewhere")
    result = original(self, tx, name, hook)
    _known(tx.output).append((hook, self, _does(tx, hook, self)))
    return result


def _does(tx: Any, hook: Any, tensor: Any) -> Any:
    """A trace of what the hook does with a gradient, in a form that compares."""
    (_, _), graph, given = speculate_subgraph(
        tx, hook, [tensor], {}, "register_hook", source_target=None, enable_grad=None,
        set_subgraph_inputs="automatic_with_forced_inputs", restore_side_effects=True)
    outside = [proxy.node for proxy in given if proxy.node is not tensor.as_proxy().node]
    places = {node: i for i, node in enumerate(graph.nodes)}
    return outside, [(node.op, "" if node.op == "placeholder" else str(node.target),
                      str(fx.map_arg((node.args, node.kwargs), places.__getitem__))) for node in graph.nodes]


def refuse_changed(tx: Any) -> None:
    """End the graph at a backward for which a hook does something else than where it was registered."""
    for hook, tensor, known in _known(tx.output):
        if _does(tx, hook, tensor) != known:
            breaks.break_graph("a tensor's hook reads what the step has changed since it was registered",
                               "a graph has one place for both", REMEDY)


def are_there(output: Any) -> bool:
    """Whether the graph has hooks on computed tensors."""
    return bool(_known(output))


def leave(output: Any) -> None:
    """Trace the frame again, and have Python run the function that registers them."""
    vars(output.root_tx.speculation_log)["memopt_hooks_left"] = True
    breaks.restart(output, "a hook is registered for a backward elsewhere")


REPLACED = [(TensorVariable, "_method_register_hook", _register)]
