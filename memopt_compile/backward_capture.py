"""``loss.backward()`` in a trace: it differentiates the leaves that the loss really reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import compat


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves that autograd would give a gradient to, found in the loss's own graph."""
    seen, stack, leaves = set(), [loss.grad_fn], []
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if type(function).__name__ == "AccumulateGrad":
            leaves.append(function.variable)
        stack.extend(parent for parent, _ in function.next_functions)
    return leaves


def method_backward(original: Callable, self: Any, tx: Any, gradient: Any = None,
                    retain_graph: Any = None, create_graph: Any = None, inputs: Any = None) -> Any:
    if inputs is None:
        known = compat.tensor_variables(tx.output)
        leaves = _leaves(compat.fake_value(self))
        variables = [known.get(id(leaf)) for leaf in leaves]
        if not leaves or any(v is None or v.source is None for v in variables):
            compat.break_graph(
                "backward() reaches leaves that the trace does not know",
                f"{sum(v is None or v.source is None for v in variables)} of {len(leaves)} leaf "
                "tensors of the loss were made outside the traced step",
                "compute the loss inside the compiled step, from parameters it can see",
            )
        # Order of first use as a graph input: the order in which eager would list parameters.
        position = {id(node): i for i, node in enumerate(tx.output.graph.nodes)}
        variables.sort(key=lambda v: position.get(id(v.as_proxy().node), 0))
        for variable in variables:
            _refuse_hooks(compat.real_value(tx, variable))
            # A hook registered later has to be noticed: the graph would run past it.
            compat.guard_value(variable.source, _hookless,
                               f"no gradient hook on {compat.source_name(variable.source)}")
        inputs = compat.list_variable(variables)
    return original(self, tx, gradient, retain_graph, create_graph, inputs)


def _hookless(leaf: Any) -> bool:
    return not (isinstance(leaf, Tensor)
                and (leaf._backward_hooks or leaf._post_accumulate_grad_hooks))


def _refuse_hooks(leaf: Any) -> None:
    if not _hookless(leaf):
        compat.break_graph(
            "a parameter has a gradient hook", "hooks on parameters do not run inside the graph",
            "remove the hook, or apply the same change to p.grad between backward and step")
