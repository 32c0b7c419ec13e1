"""What has to run before what: the orders of a step that give the same numbers.

Safe orders are those in which

1. operands come before their users,
2. a write comes after every earlier touch of its storage through any alias, and before every
   later one; a collective touches its operands until it has been waited for, and the arena is one storage,
3. random operators, and those that may be, keep their order, so that each draws the numbers it drew
   before;
4. collectives keep their order, so that every rank makes the same calls one after another,
   whatever else its graph holds (a smaller last batch gives a rank another peak),
5. checks of data keep their order, and a write to an input comes after every earlier check.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx

from .aliases import once
from .arena import WINDOW
from .checks import is_check
from .liveness import Lifetimes, Workspace, live_bytes, no_workspace
from .step_graph import (
    COLLECTIVES,
    OF_TORCH,
    OPERATOR,
    WAIT,
    Phase,
    StepGraph,
    aliased_args,
    is_collective,
    mutated_args,
    nbytes,
    operands,
    storage_roots,
)

# Operators of other libraries whose code was read: products of the experts of a Transformers model.
DRAW_NOTHING = ("transformers.grouped_mm_fallback.default",
                "transformers.grouped_mm_fallback_backward.default")

# Fused by Inductor like pointwise operators, but not tagged so. By name, because some are only
# registered once Inductor is imported.
FUSED = {
    "aten::clone", "aten::_to_copy", "aten::_unsafe_view", "aten::full", "aten::full_like",
    "aten::arange", "aten::constant_pad_nd", "aten::scalar_tensor", "aten::empty",
    "prims::convert_element_type", "prims::iota", "prims::fma", "prims::broadcast_in_dim",
    "aten::_unsafe_index", "aten::gather",
}


def predecessors(step: StepGraph, free: Container[Phase] = ()) -> dict[fx.Node, list[fx.Node]]:
    """For every node, in schedule order, the nodes that any safe order puts before it. Collectives of
    the phases `free` need no order (rule 4): whoever asks for that gives all ranks the same one."""
    before: dict[fx.Node, list[fx.Node]] = {}
    roots = storage_roots(step.graph)
    if step.graph.find_nodes(op="call_function", target=WINDOW):
        roots = {n: frozenset(r.args[0] if r.target is WINDOW else r for r in found) for n, found in roots.items()}
    touched: dict[fx.Node, list[fx.Node]] = {}
    drew: fx.Node | None = None
    called: fx.Node | None = None
    checked: fx.Node | None = None
    for node in step.computing():
        needs = [a for a in node.all_input_nodes if a.op != "placeholder"]  # rule 1
        for root in {r for argument in mutated_args(node) for r in roots[argument]}:
            needs += touched.pop(root, [])  # rule 2; what came before those they need themselves
        for root in {r for a in (node, *operands(node)) for r in roots[a]}:
            touched.setdefault(root, []).append(node)
        if is_random(node):
            needs += [drew] if drew else []  # rule 3
            drew = node
        if is_collective(node) and step.phase(node) not in free:
            needs += [called] if called else []  # rule 4
            called = node
        if checked and (is_check(node) or any(r.op == "placeholder" for a in mutated_args(node) for r in roots[a])):
            needs.append(checked)  # rule 5
        checked = node if is_check(node) else checked
        before[node] = [n for n in dict.fromkeys(needs) if n is not node]
    return before


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers, or may: PyTorch's operators say so, those of others and
    those with a body of their own (`torch.cond`) do not. An attention without dropout only could."""
    if _is_foreign(node.target):
        return True
    if not _draws(node.target):
        return False
    arguments = [a.name for a in node.target._schema.arguments]
    if "dropout_p" not in arguments:
        return True
    given = dict(zip(arguments, node.args), **node.kwargs)
    return given.get("dropout_p", 0.0) != 0.0


@once
def _is_foreign(target: Any) -> bool:
    return getattr(target, "namespace", None) not in (None, *OF_TORCH, COLLECTIVES) and str(target) not in DRAW_NOTHING


@once
def _draws(target: Any) -> bool:
    return isinstance(target, OPERATOR) and torch.Tag.nondeterministic_seeded in target.tags


@once
def _is_fused(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags or target._schema.name in FUSED


def weight(order: list[fx.Node], life: Lifetimes,
           workspace: Workspace | None = None,
           uncounted: Container[fx.Node] = ()) -> tuple[int, int]:
    """How good an order is, smaller first: transient peak in bytes, then bytes over time.

    A pass that has added operators leaves them `uncounted` in the latter: each is a moment more,
    whatever they save.
    """
    points = live_bytes(order, life, workspace or no_workspace)
    return max(points, default=0), sum(
        live for node, live in zip(order, points) if node not in uncounted)


def fuses(node: fx.Node) -> bool:
    """Whether Inductor can fold `node` into its reader: pointwise, a cast, a view, a fill, a look-up."""
    if not isinstance(node.target, OPERATOR) or mutated_args(node):
        return False
    if is_random(node) or node.target is WAIT:
        return False
    return _is_fused(node.target) or bool(aliased_args(node))


def reduces_little(node: fx.Node) -> bool:
    """Whether `node` is a reduction to a quarter of its operand or more, which Inductor folds into its reader as it
    does a pointwise operator: each result reads four numbers at most (torch's partitioner draws the line there)."""
    if not (isinstance(node.target, OPERATOR) and torch.Tag.reduction in node.target.tags):
        return False
    value = node.meta.get("val")
    return isinstance(value, Tensor) and 4 * nbytes(value) >= sum(nbytes(a.meta["val"]) for a in node.all_input_nodes)
