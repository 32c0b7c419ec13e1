"""Writes through ``.data`` (``p.data.clamp_(0, 1)``), which AOTAutograd takes for a step that is not whole.

Before:  data = _get_data_attr(p); data.clamp_(0, 1)
After:   data = _get_data_attr(p); set_grad_enabled(False); data.clamp_(0, 1); set_grad_enabled(True)

Numbers and memory: as before. Only writes of what autograd does not follow are changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from .dynamo import IN_PLACE

_SET = torch._C._set_grad_enabled
_DATA = torch._C._autograd._get_data_attr
_SAME_MEMORY = {("call_method", name) for name in ("detach", "view", "t")}


def without_grad(graph: fx.Graph) -> None:
    """Put every write through ``.data`` in ``torch.no_grad``."""
    for node, written in list(_writes(graph)):
        if written.target is _DATA and not any(map(_followed, node.all_input_nodes)):
            with graph.inserting_before(node):
                graph.call_function(_SET, (False,))
            with graph.inserting_after(node):
                graph.call_function(_SET, (True,))


def write_that_is_followed(graph: fx.Graph) -> fx.Node | None:
    """The first operator that changes a tensor while autograd follows it."""
    return next((node for node, written in _writes(graph) if _followed(written)), None)


def write_of_gathered(graph: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """The first operator that changes what a shared parameter was gathered to, and the parameter."""
    for node in graph.nodes:
        place = _written(node)
        value = node.args[place] if place is not None and place < len(node.args) else None
        while isinstance(value, fx.Node) and (value.target is _DATA or (value.op, value.target) in _SAME_MEMORY):
            value = value.args[0]
        if _is_method(value, "to_local") and _is_method(value.args[0], "redistribute"):
            return node, value.args[0].args[0]
    return None


def _is_method(value: object, name: str) -> bool:
    """Whether it is a call of this method of a DTensor's, in torch 2.11 a function that has its other arguments."""
    return isinstance(value, fx.Node) and getattr(value.target, "__name__", value.target) in (name, f"prim_{name}")


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What writes in place with gradients enabled, as they are where the step begins, and what it writes."""
    enabled = True
    for node in graph.nodes:
        if node.target is _SET:
            enabled = node.args[0]
        elif enabled and (place := _written(node)) is not None and isinstance(written := node.args[place], fx.Node):
            yield node, written


def _written(node: fx.Node) -> int | None:
    if node.op == "call_method":
        return 0 if node.target.endswith("_") and not node.target.endswith("__") else None
    if node.target is F.embedding:  # renormalizes its table
        return 1 if len(node.args) > 3 and node.args[3] is not None else None
    return 0 if node.target in IN_PLACE else None


def _followed(node: fx.Node) -> bool:
    return getattr(node.meta.get("example_value"), "requires_grad", False)
