"""What Python would remember from one iteration of a loop to the next, as Dynamo tracks it.

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import schedulers

# Of a variable, what says where it came from and not what it is.
_NOT_STATE = {"source", "source_location", "mutation_type", "guards", "proxy", "parents_tracker",
              "user_code_variable"}

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def for_statement(tx: Any, iterator: Any) -> tuple[Any, int] | None:
    """The ``for`` statement over `iterator` itself that wants its next item, if it is one.

    Not in a generator: between two items it would hand over to readers, which may count or gather
    what it yields and are not seen here.
    """
    asks = (tx.current_instruction.opname == "FOR_ITER" and tx.stack and tx.stack[-1] is iterator
            and not tx.f_code.co_flags & _GENERATOR)
    return (tx, tx.instruction_pointer) if asks else None


def python_state(tx: Any, but: Any) -> tuple[tuple, list[Any]]:
    """Everything that the code still to be traced could see, in a form that compares by value,
    and the tensors in it: equal states have as many, in the same order.

    Locals and stacks of the frames being traced, and the objects from outside that they have
    changed; `but` is left out. A tensor is its dtype, shape and need of a gradient, and is told
    from other tensors but not from the one that has its place in another state: between two equal
    states only the numbers in tensors can differ.
    """
    seen: dict[int, int] = {id(but): 0}
    effects = tx.output.side_effects
    tensors: list[Any] = []
    keep: list[Any] = []  # what is looked up by `id` must not be freed meanwhile

    def state(value: Any) -> Any:
        if isinstance(value, LazyVariableTracker):
            if not value.is_realized():
                return "lazy", str(value.source or "")
            value = value.realize()
        if value is None or isinstance(value, int | float | str | bytes | complex):
            return type(value).__name__, value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return "symbol", str(value)
        if isinstance(value, ConstantVariable):
            return "constant", state(value.value)  # shared or not as it happens
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
        keep.append(value)
        if isinstance(value, TensorVariable):
            tensors.append(value)
            fake = value.as_proxy().node.meta.get("example_value")
            return ("tensor", type(fake).__name__, str(getattr(fake, "dtype", "")),
                    str(getattr(fake, "shape", "")), getattr(fake, "requires_grad", False),
                    getattr(fake, "grad_fn", None) is None, attributes(value))
        if isinstance(value, torch.fx.Proxy | torch.fx.Node | torch.Tensor):
            return "graph value"
        if isinstance(value, OutputGraph | SideEffects):
            return "the trace"  # some variables know it; what of it is state is looked at here
        if isinstance(value, dict):
            return "dict", tuple((state(k), state(v)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(map(state, value))
        if isinstance(value, InstructionTranslatorBase):
            return "frame", value.instruction_pointer, frame(value)
        if type(value).__module__.startswith("torch._dynamo"):
            content = sorted((k, v) for k, v in getattr(value, "__dict__", {}).items()
                             if k not in _NOT_STATE)
            return (type(value).__name__, tuple((k, state(v)) for k, v in content),
                    attributes(value))
        return "object", id(value)

    def attributes(value: Any) -> Any:
        changed = effects.store_attr_mutations.get(value) if isinstance(
            value, VariableTracker) else None
        return state(changed) if changed else None

    def frame(one: Any) -> tuple:
        return state(dict(one.symbolic_locals)), state(list(one.stack))

    frames = []
    while tx is not None:
        frames.append(frame(tx))
        root, tx = tx, getattr(tx, "parent", None)
    outside = [v for v in (*effects.id_to_variable.values(), *effects.store_attr_mutations)
               if isinstance(v, VariableTracker) and isinstance(
                   v.mutation_type, AttributeMutationExisting | ValueMutationExisting)]
    found = (tuple(frames), tuple(map(state, outside)), len(getattr(root, "random_calls", ())), len(schedulers.calls(root.output)))
    return found, _outermost(tensors)


def _outermost(tensors: list[Any]) -> list[Any]:
    """Without the tensors inside of those that are subclasses: read by themselves, they would be
    inputs a second time."""
    given = {id(v): getattr(v.as_proxy().node.meta.get("grapharg"), "example", None) for v in tensors}
    inside = {id(getattr(value, name)) for value in given.values()
              if is_traceable_wrapper_subclass(value) for name in value.__tensor_flatten__()[0]}
    return [v for v in tensors if id(given[id(v)]) not in inside]


def value_behind(variable: Any) -> Any:
    """The tensor that a variable is, the user's if the trace has not asked for it yet, else one without
    numbers; None where it is None, and the variable itself for anything else."""
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return variable.peek_value()
        variable = variable.realize()
    if isinstance(variable, TensorVariable):
        return variable.as_proxy().node.meta.get("example_value")
    return None if variable.is_python_constant() and variable.as_python_constant() is None else variable


def graph_of(tx: Any) -> fx.Graph:
    """The graph that Dynamo is adding to."""
    return tx.output.current_tracer.graph


@contextlib.contextmanager
def added_nodes(tx: Any) -> Iterator[list[fx.Node]]:
    """A list of the operators that are traced inside, there at the end."""
    graph, added = graph_of(tx), []
    before = set(graph.nodes)
    yield added
    added += [n for n in graph.nodes if n not in before and n.op != "placeholder"]
