"""Checks of data within a step, an ``assert`` on a tensor, which Dynamo traces as operators that raise.

In eager nothing behind a check has happened when it raises. What a step changes therefore comes after the checks before
it (`ordering`, rule 5). Of what gradients made that is not enough: there the update is fused with the backward that it
stands beside, and has begun. Such a step is not captured (`of_gradients`).
"""

from __future__ import annotations

import torch
from torch import fx

from .compat.trace import CHECKS, pytree


def is_check(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in CHECKS


def of_gradients(gm: fx.GraphModule) -> fx.Node | None:
    """The first check in a graph of Dynamo's that depends on a backward in it, by values or by what was changed."""
    made: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.target is torch.autograd.grad or not made.isdisjoint(node.all_input_nodes):
            if is_check(node):
                return node
            made.add(node)
            if str(getattr(node.target, "__name__", node.target)).endswith(("_", "setitem")):  # in place
                made.update(each for each in pytree.tree_leaves(node.args[:1]) if isinstance(each, fx.Node))
    return None
