"""``loss.backward()`` in a trace: it differentiates the leaves that the loss really reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..compat import breaks, dynamo, guards, hooks
from ..optim.gradients import keep_in_8_bits, round_gradient, rounds
from ..quantization.parameters import LowPrecisionTensor
from . import telling


@torch.library.custom_op("memopt::seed", mutates_args=())
def seed(loss: Tensor, given: Tensor | None = None) -> Tensor:
    """The gradient of the loss by itself, ones, or a copy of the one that the step gives. Marks the start of a backward."""
    return torch.ones_like(loss) if given is None else given.clone()


seed.register_fake(lambda loss, given=None: torch.empty_like(loss if given is None else given))


def marked(tx: Any, outputs: Any, given: Any) -> Any:
    """The ``grad_outputs`` of these outputs with their seeds; None where they have to stay as they are."""
    losses = dynamo.tensors_in(outputs)
    starts = [None] * len(losses) if dynamo.is_none(given) else dynamo.tensors_in(dynamo.sequence(tx, given))
    if not losses or len(starts) != len(losses) or any(
            compat.fake_value(loss).numel() != 1 if start is None else compat.fake_value(start).requires_grad
            for loss, start in zip(losses, starts)):
        return None
    mark = compat.VariableTracker.build(tx, torch.ops.memopt.seed.default)
    with compat.traced_without_grad(tx):
        return compat.list_variable([mark.call_function(tx, [loss] if start is None else [loss, start], {})
                                     for loss, start in zip(losses, starts)])


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
    if hasattr(compat.fake_value(self), "placements"):
        breaks.break_graph(
            "backward() of a DTensor", "as a loss is that is computed from what model.parameters() has of parameters that "
            "ranks share: this rank's rows", "read them from their modules, which gather them: layer.weight")
    if create_graph is not None and getattr(create_graph.realize(), "value", True):
        breaks.break_graph(
            "backward(create_graph=True)", "the gradients that it leaves in .grad can be differentiated again, and in the "
            "graph they are finished", "differentiate torch.autograd.grad(loss, parameters, create_graph=True)")
    if dynamo.is_none(inputs):
        known = compat.tensor_variables(tx.output)
        leaves = _leaves(compat.fake_value(self))
        variables = [known.get(id(leaf)) for leaf in leaves]
        if not leaves:
            breaks.break_graph("backward() of a loss that needs no gradient", "nothing that it is computed from "
                               "requires one", "compute it outside of torch.no_grad(), from trained parameters")
        if any(v is None for v in variables):
            breaks.break_graph(
                "backward() reaches leaves that the trace does not know",
                f"{sum(v is None for v in variables)} of {len(leaves)} leaf "
                "tensors of the loss were made outside the traced step",
                "compute the loss inside the compiled step, from parameters it can see",
            )
        # Order of first use as a graph input: the order in which eager would list parameters.
        position = {id(node): i for i, node in enumerate(tx.output.graph.nodes)}
        variables.sort(key=lambda v: position.get(id(v.as_proxy().node), 0))
        inputs = compat.list_variable(variables)
    rounded = [v for v in dynamo.tensors_in(inputs) if v.source is not None and _rounds(tx, v)]
    try:
        result = original(self, tx, gradient, retain_graph, create_graph, inputs)
    except RuntimeError as error:
        if "to not have been used in the graph" not in str(error):
            raise
        breaks.break_graph(
            "backward() reaches a parameter and gives it no gradient", "a derivative on the way to it is None, as "
            "of an autograd.Function that returns None for it", "detach the parameter before it is given there")
    with compat.traced_without_grad(tx):
        for variable in rounded:
            grad = compat.gradient(tx, variable)
            if isinstance(grad, compat.TensorVariable) and not isinstance(compat.fake_value(grad), LowPrecisionTensor):
                compat.VariableTracker.build(tx, keep_in_8_bits).call_function(tx, [variable], {})
    return result


def refuse_nested(tx: Any) -> None:
    """AOTAutograd cannot trace a derivative of a nested tensor whose sizes are symbols, as they always are."""
    if any(getattr(node.meta.get("example_value"), "is_nested", False) for node in tx.output.graph.nodes):
        breaks.break_graph("backward() in a step with nested tensors", "torch cannot trace their derivatives into "
                           "the step's graph", "pad them: nested.to_padded_tensor(0.0)")


def refuse_hooks(tx: Any, inputs: Any, notes: Any) -> None:
    """A derivative for `inputs` is traced only where no gradient hook would run outside of the graph.

    Those that the step itself registers Dynamo puts on the tensors of its caller when the graph has run.
    """
    if tx.output.side_effects.tensor_hooks:
        _refuse_hook()
    try:
        hooks.refuse_changed(tx)
    except compat.Unsupported as error:  # the forward alone would have the old one, too
        telling.tell_of_break(notes, error)
        if not breaks.demands_one_graph(tx.output):
            breaks.run_in_eager(error)
        raise
    sources = [variable.source for variable in inputs if variable.source is not None]
    if sources and guards.saved_tensors_are_hooked(sources[0]):
        breaks.break_graph("there are hooks on what autograd saves", "in the graph nothing is saved",
                           "take them away; a memory_budget does what save_on_cpu does")
    for variable in inputs:
        if variable.source is not None and compat.source_name(variable.source) not in _guarded(tx):
            _guard_hooks(tx, variable, lambda leaf: not leaf._backward_hooks)


def _rounds(tx: Any, variable: Any) -> bool:
    """Whether the hooks of a leaf round its gradient; the step is traced again once they are others."""
    leaf = compat.real_value(tx, variable)
    known = isinstance(leaf, Tensor) and rounds(leaf)
    _guard_hooks(tx, variable, lambda leaf: not leaf._backward_hooks and all(
        hook is round_gradient for hook in (leaf._post_accumulate_grad_hooks or {}).values()) and rounds(leaf) is known)
    return known


def _guard_hooks(tx: Any, variable: Any, fit: Callable[[Tensor], bool]) -> None:
    """Whatever is not a tensor now has no hooks. One registered later has to be noticed: the graph would run past it."""
    def holds(leaf: Any) -> bool:
        return not isinstance(leaf, Tensor) or fit(leaf)

    if not holds(compat.real_value(tx, variable)):
        _refuse_hook()
    name = compat.source_name(variable.source)
    compat.guard_value(variable.source, holds, f"no gradient hook on {name}")
    _guarded(tx).add(name)


def _guarded(tx: Any) -> set[str]:
    """The tensors whose hooks are guarded already; a set on the trace, which dies with it."""
    return vars(tx.output).setdefault("memopt_without_hooks", set())


def _refuse_hook() -> None:
    breaks.break_graph(
        "a tensor has a gradient hook", "hooks on parameters and inputs do not run inside the graph",
        "remove the hook, or apply the same change to the gradient behind the backward")
