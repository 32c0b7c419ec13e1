"""From the ATen graph that AOTAutograd hands over to a `StepGraph`: roles and phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import (
    capture,  # noqa: F401  (registers the marker operators)
    compat,
    data_sizes,
)
from .metadata import correct_types
from .step_graph import Input, Phase, Role, StepGraph, each_nbytes

SEED = torch.ops.memopt.seed.default
GRADIENT = torch.ops.memopt.gradient.default


def dynamo_inputs(module: fx.GraphModule) -> list[tuple[str, Any, bool]]:
    """(label, example, is a leaf that the step differentiates) per input of a Dynamo graph."""
    trained: set[fx.Node] = set()
    for node in module.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        wanted = node.args[1] if len(node.args) > 1 else node.kwargs["inputs"]
        trained.update(wanted if isinstance(wanted, (list, tuple)) else [wanted])
    found = []
    for node in module.graph.find_nodes(op="placeholder"):
        given = node.meta.get("grapharg")
        found.append((compat.source_name(getattr(given, "source", None)) or node.name,
                      getattr(given, "example", None), node in trained))
    return found


def hollow(origin: Sequence[tuple[str, Any, bool]]) -> list[tuple[str, Any, bool]]:
    """The same for `role_of`, without the user's tensors: a model's backward is lowered when those may be gone."""
    return [(label, torch.nn.Parameter(torch.empty(0)) if isinstance(example, torch.nn.Parameter) else
             torch.empty(0) if isinstance(example, Tensor) else None, trained) for label, example, trained in origin]


def role_of(label: str, example: Any, trained: bool) -> Role:
    """What an input is for, from the user's expression for it and its value."""
    if not isinstance(example, Tensor) or ".param_groups[" in label and "['params']" not in label:
        return Role.NUMBER
    if label.endswith(".grad"):
        return Role.GRADIENT
    if trained or isinstance(example, torch.nn.Parameter):
        return Role.PARAMETER
    if ".state[" in label:
        return Role.STATE
    if "_buffers[" in label:
        return Role.BUFFER
    return Role.BATCH


def step_graph(module: fx.GraphModule, origin: Sequence[tuple[str, Any, bool]],
               kind: str = "step") -> StepGraph:
    """Roles from `origin` (see `dynamo_inputs`), phases from the markers, markers removed."""
    if kind == "step":
        data_sizes.check_squeezes(module, "val")
        data_sizes.note_limits(module.graph)
    inputs = []
    nodes = module.graph.find_nodes(op="placeholder")
    sizes = each_nbytes(node.meta.get("val") for node in nodes)
    for position, (node, size) in enumerate(zip(nodes, sizes)):
        index = compat.input_descriptor_index(node)
        index = position if index is None else index
        label, example, trained = origin[index] if index < len(origin) else (node.name, None, False)
        value = node.meta.get("val")
        # The mesh of a DTensor is an input beside the tensor inside it.
        role = role_of(label, example, trained) if isinstance(value, Tensor) else Role.NUMBER
        inputs.append(Input(node.name, role, label, size, trained and isinstance(value, Tensor)))
    step = StepGraph(module, tuple(inputs), kind=kind)
    correct_types(module.graph)
    step.phases = _phases(module.graph)
    _remove_markers(step)
    return step


def _phases(graph: fx.Graph) -> dict[fx.Node, Phase]:
    """Trace order is the order in which eager ran: between a seed and the last gradient of its
    backward is backward; after that, what a later seed or its backward needs is the next micro-batch's
    forward and the rest is update."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    for_a_loss: set[fx.Node] = set()
    stack = [n for n in nodes if n.target in (SEED, GRADIENT)]
    while stack:
        node = stack.pop()
        if node not in for_a_loss:
            for_a_loss.add(node)
            stack.extend(node.all_input_nodes)
    ends: dict[fx.Node, fx.Node] = {}
    seed = None
    for node in nodes:
        if node.target is SEED:
            seed = node
        elif node.target is GRADIENT and seed is not None:
            ends[seed] = node
    phases: dict[fx.Node, Phase] = {}
    open_seed, after_first = None, False
    for node in nodes:
        if node.target is SEED:
            open_seed, after_first = node, True
        inside = open_seed is not None and open_seed in ends
        if inside:
            phases[node] = Phase.BACKWARD
        elif not after_first or node in for_a_loss:
            phases[node] = Phase.FORWARD
        else:
            phases[node] = Phase.UPDATE
        if inside and ends[open_seed] is node:
            open_seed = None
    return phases


def _remove_markers(step: StepGraph) -> None:
    backward = 0
    for node in list(step.graph.nodes):
        if node.target is GRADIENT:
            step.gradients[node] = backward
            step.replace(node, node.args[0])
        elif node.target is SEED:
            backward += 1
            if len(node.args) > 1:
                step.replace(node, node.args[1])
                continue
            value = node.meta["val"]
            with step.graph.inserting_before(node):
                ones = step.graph.call_function(
                    torch.ops.aten.full.default, (list(value.shape), 1),
                    {"dtype": value.dtype, "device": value.device, "pin_memory": False})
            ones.meta.update(node.meta)
            step.phases[ones] = Phase.BACKWARD
            step.replace(node, ones)
