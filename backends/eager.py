"""Eager lowering: the step as a Python function that frees every value at its last use.

It runs the graph's own operators one by one in schedule order, so it is the oracle of the
tests and the way to debug. The program is generated and printable (`source`).
"""

from __future__ import annotations

import operator
from typing import Any, Callable

import torch
from torch import fx

from ..step_graph import StepGraph


def source(step: StepGraph) -> tuple[str, dict[str, Any]]:
    """The program as text, and the objects it names."""
    graph = step.graph
    names: dict[fx.Node, str] = {n: f"v{i}" for i, n in enumerate(graph.nodes)}
    objects: dict[str, Any] = {"getitem": operator.getitem}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for argument in (node, *node.all_input_nodes):
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
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {text(tuple(node.args[0]))}")
        elif node.op == "get_attr":
            lines.append(f"    {names[node]} = {bound(_attribute(step.module, node.target))}")
        elif node.op == "call_function":
            if node.target not in calls:
                calls[node.target] = bound(node.target)
            given = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            lines.append(f"    {names[node]} = {calls[node.target]}({', '.join(given)})")
        if node.op != "output" and dying.get(node):
            lines.append("    del " + ", ".join(names[d] for d in dying[node]))
    return "\n".join(lines) + "\n", objects


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
