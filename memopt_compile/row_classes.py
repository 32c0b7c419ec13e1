"""Losses that have the classes in the middle: `cross_entropy(logits.transpose(1, 2), targets)`.

What a product makes of tokens has the classes last, and a loss of [batch, classes, tokens] is of a transposed view of
it, by operators for images. Each of these is the operator on the matrix [tokens, classes] of the same numbers
(`row_regions` knows rows of a matrix only). The rules, for a value whose classes lie in memory one behind the other:

1. `_log_softmax` and its gradient along dimension 1 are those along the last one of the matrix.
2. `nll_loss2d` and its gradient are `nll_loss` of the matrix.
3. What comes out is seen as it was; a view that shows the same as one it is made of is that one. A copy that turns classes
   into the middle goes.

Before:  z = view(mm(h, W), [B, T, V]); p = _log_softmax(z.transpose(1, 2), 1); nll_loss2d(view(p, [B, V, 1, T]), ..)
After:   p = _log_softmax(mm(h, W), 1); nll_loss(p, view(y, [B·T]), ..)

Numbers: the same sums, whose order follows from how they lie in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .step_graph import StepGraph, aliased_args, mutated_args, viewed

aten = torch.ops.aten
NLL = {aten.nll_loss2d_forward.default: aten.nll_loss_forward.default,
       aten.nll_loss2d_backward.default: aten.nll_loss_backward.default}
LOGS, LOGS_BACKWARD = aten._log_softmax.default, aten._log_softmax_backward_data.default


def classes_last(step: StepGraph) -> StepGraph:
    """Rules 1 to 3, in place."""
    losses = step.graph.find_nodes(op="call_function", target=aten.nll_loss2d_forward.default)
    classes = {node.args[0].meta["val"].shape[1] for node in losses if type(node.args[0].meta["val"].shape[1]) is int}
    moved: set[fx.Node] = set()  # what lies otherwise in memory than it did
    results = step.graph.output_node().all_input_nodes
    for node in list(step.computing()):
        if not moved.isdisjoint(node.all_input_nodes):
            _see_anew(step, node, moved)
        if node.target in (LOGS, LOGS_BACKWARD, *NLL):
            moved.update(_rewrite(step, node))
        elif _is_turned(node, classes) and node not in results:
            moved.add(node.args[0])
            step.replace(node, node.args[0])
        elif aliased_args(node) and node not in results:
            _plain(step, node)
    for node in reversed(list(step.computing())):
        if not node.users and aliased_args(node) and not mutated_args(node):
            step.erase(node)
    return step


def _is_turned(node: fx.Node, classes: set) -> bool:
    """Whether `node` is a copy that puts the classes in the middle of memory as well."""
    if node.target is not aten.clone.default:
        return False
    value, source = node.meta["val"], node.args[0].meta["val"]
    known = value.dim() > 2 and type(value.shape[1]) is int  # a symbolic size has no hash
    return known and value.shape[1] in classes and source.stride(1) == 1 != value.stride(1)


def _see_anew(step: StepGraph, node: fx.Node, moved: set[fx.Node]) -> None:
    """Bring the strides of `node` up to date. A view that the new strides do not allow is one of a copy."""
    def made() -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return node.target(*args, **kwargs)

    before = node.meta.get("val")
    try:
        node.meta["val"] = made()
    except RuntimeError:
        with step.graph.inserting_before(node):
            node.update_arg(0, _in_order(step, node, node.args[0]))
        node.meta["val"] = made()
    now = node.meta["val"]
    if not (isinstance(now, Tensor) and isinstance(before, Tensor) and now.stride() == before.stride()):
        moved.add(node)


def _rewrite(step: StepGraph, node: fx.Node) -> list[fx.Node]:
    """Rules 1 and 2: what stands for `node` now, if it is a matrix's."""
    wide = list(node.args[:2] if node.target is LOGS_BACKWARD else
                node.args[1:2] if node.target is aten.nll_loss2d_backward.default else node.args[:1])
    shape = wide[0].meta["val"].shape
    if len(shape) < 3 or any(type(s) is not int for s in shape) or (
                node.target not in NLL and node.args[len(wide)] not in (1, 1 - len(shape))):
        return []
    order = [0, *range(2, len(shape)), 1]
    if not all(a.meta["val"].stride(1) == 1 for a in wide):
        return []
    outer = [shape[i] for i in order[:-1]]
    with step.graph.inserting_before(node):
        def view(value: fx.Node, sizes: list[int]) -> fx.Node:
            return _plain(step, step.call(node, aten.view.default, _in_order(step, node, value), sizes))

        def matrix(value: fx.Node) -> fx.Node:
            last = _plain(step, step.call(node, aten.permute.default, value, order))
            return view(last, [-1, shape[1]])

        def back(value: fx.Node) -> fx.Node:
            value = view(value, [*outer, shape[1]])
            return step.call(node, aten.permute.default, value, [0, len(shape) - 1, *range(1, len(shape) - 1)])

        matrices, others = [matrix(a) for a in wide], list(node.args)
        if node.target not in NLL:
            made = back(step.call(node, node.target, *matrices, 1, *node.args[len(wide) + 1:]))
        elif node.target is aten.nll_loss2d_forward.default:
            others[0:2] = matrices[0], view(node.args[1], [-1])
            made = step.call(node, NLL[node.target], *others)
        else:
            upstream = node.args[0]
            upstream = view(upstream, [-1]) if upstream.meta["val"].dim() else upstream
            others[0:3] = upstream, matrices[0], view(node.args[2], [-1])
            made = back(step.call(node, NLL[node.target], *others))
    if node.target is aten.nll_loss2d_forward.default:
        _hand_on(step, node, made, outer)
    else:
        step.replace(node, made)
    return [made]


def _in_order(step: StepGraph, like: fx.Node, value: fx.Node) -> fx.Node:
    if value.meta["val"].is_contiguous():
        return value
    return step.call(like, aten.clone.default, value, memory_format=torch.contiguous_format)


def _hand_on(step: StepGraph, node: fx.Node, made: fx.Node, outer: list[int]) -> None:
    """Items of a loss: those of each target have the shape that they had."""
    for item in list(node.users):
        item.replace_input_with(node, made)
        item.meta["val"] = made.meta["val"][item.args[1]]
        if item.args[1] == 0 and item.meta["val"].dim():
            readers = list(item.users)
            with step.graph.inserting_before(item.next):
                shaped = step.call(item, aten.view.default, item, outer)
            for reader in readers:
                reader.replace_input_with(item, shaped)
    step.erase(node)


def _plain(step: StepGraph, node: fx.Node) -> fx.Node:
    """Rule 3: `node`, or the earliest value that it shows as it is; a view of the earliest that has the same order."""
    equal, straight = None, None
    for at in viewed(node):
        if at.op != "placeholder" and (place := _place(at)) is not None and (own := _place(node)) is not None:
            equal = at if place == own else equal
            straight = at if _in_line(at) and _in_line(node) and place[0::3] == own[0::3] else straight
    if equal is None and straight not in (None, node.args[0]):
        with step.graph.inserting_before(node):
            equal = step.call(node, aten.view.default, straight, list(node.meta["val"].shape))
    if equal is None:
        return node
    step.replace(node, equal)
    return equal


def _in_line(node: fx.Node) -> bool:
    return node.meta["val"].is_contiguous()


def _place(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or any(type(s) is not int for s in value.shape):
        return None
    return value.dtype, tuple(value.shape), value.stride(), (value.storage_offset(), value.numel())
