"""Eager lowering: the step as a Python function that frees every value at its last use.

It runs the graph's own operators one by one in schedule order, so it is the oracle of the
tests and the way to debug. The program is generated and printable (`source`).

A kernel may lay its result out otherwise than its fake version said (batch norm of a transposed
tensor, in torch 2.13; the backward of a dropout), and then views further on fail or read the wrong
elements. So what is no view, and not pointwise on operands of its own layout, is checked, and copied
into the promised layout if need be. So is what owns more bytes than it said (`col2im` does).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..step_graph import OPERATOR, StepGraph, aliased_args, operands


def source(step: StepGraph) -> tuple[str, dict[str, Any]]:
    """The program as text, and the objects it names."""
    graph = step.graph
    names: dict[fx.Node, str] = {n: f"v{i}" for i, n in enumerate(graph.nodes)}
    objects: dict[str, Any] = {"in_layout": in_layout}
    order = items_at_once(graph)
    last: dict[fx.Node, fx.Node] = {}
    for node in order:
        for argument in (node, *operands(node)):
            last[argument] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        dying.setdefault(user, []).append(node)

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, tuple):
            return "(" + "".join(text(v) + ", " for v in value) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(text(v) for v in value) + "]"
        if isinstance(value, slice):
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return bound(value)

    def bound(value: Any) -> str:
        name = f"c{len(objects)}"
        objects[name] = value
        return name

    calls: dict[Any, str] = {}
    lines = ["def run(inputs):"]
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    if arguments:
        lines.append(f"    [{', '.join(names[n] for n in arguments)}] = inputs")
    lines.append("    inputs.clear()")
    for node in order:
        if node.op == "output":
            lines.append(f"    return {text(tuple(node.args[0]))}")
        elif node.op == "get_attr":
            lines.append(f"    {names[node]} = {bound(_attribute(step.module, node.target))}")
        elif node.op == "call_function":
            if node.target not in calls:
                calls[node.target] = bound(node.target)
            given = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            lines.append(f"    {names[node]} = {calls[node.target]}({', '.join(given)})")
            if _may_surprise(node):
                value = node.meta["val"]
                most = value.untyped_storage().nbytes()
                promised = f"{tuple(value.stride())}, {most if isinstance(most, int) else None}"
                lines.append(f"    {names[node]} = in_layout({names[node]}, {promised})")
        if node.op != "output" and dying.get(node):
            lines.append("    del " + ", ".join(names[d] for d in dying[node]))
    return "\n".join(lines) + "\n", objects


def items_at_once(graph: fx.Graph) -> list[fx.Node]:
    """The nodes in order, but items right behind the tuple that they are of: it would hold all of
    them until the last is taken."""
    order: dict[fx.Node, None] = {}
    for node in graph.nodes:
        stack = [node]
        while stack:
            order[stack[-1]] = None
            stack += [u for u in stack.pop().users if u.target is operator.getitem]
    return list(order)


def in_layout(value: torch.Tensor, strides: tuple[int, ...], most: int | None = None) -> torch.Tensor:
    """`value` itself if it has these strides, wherever they matter, and no more than `most` bytes; else a copy."""
    fits = most is None or value.untyped_storage().nbytes() <= most
    if fits and (value.stride() == strides or all(
            size <= 1 or a == b for size, a, b in zip(value.shape, value.stride(), strides))):
        return value
    return value.new_empty_strided(value.shape, strides).copy_(value)


def _may_surprise(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or aliased_args(node):
        return False
    pointwise = isinstance(node.target, OPERATOR) and torch.Tag.pointwise in node.target.tags
    return (all(isinstance(s, int) for s in value.stride()) and value.dim() > 1
            and not (pointwise and all(_laid_out_as(n.meta.get("val"), value) for n in node.all_input_nodes)))


def _laid_out_as(operand: Any, value: torch.Tensor) -> bool:
    return not isinstance(operand, torch.Tensor) or operand.dim() == 0 or (
        operand.shape == value.shape and operand.stride() == value.stride())


def _attribute(module: torch.nn.Module, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def lower(step: StepGraph) -> Callable[[list], tuple]:
    """A boxed callable: takes the list of inputs, empties it, returns the tuple of outputs."""
    text, objects = source(step)
    scope = dict(objects)
    exec(compile(text, "<memopt eager step>", "exec"), scope)
    # Outside Dynamo's reach: AOTAutograd may call it from where frames are still traced.
    run = torch.compiler.disable(scope["run"])
    run._boxed_call = True
    return run
