"""What only led to outputs of a compiled piece that the loss does not use gets no gradient, as in eager.

AOTAutograd's backward takes zeros for an output that nothing used, and hands zeros on: the pooler of a BERT whose loss
takes the other output would get optimizer state, and shrink by weight decay.

    before   pooler.weight.grad = zeros
    after    pooler.weight.grad = None
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .second_derivative import backward_of, edges, hook_if_asked


def sources(gm: fx.GraphModule) -> list[set[int]]:
    """For each output the positions of the inputs that it may depend on.

    By the graph, which knows what higher-order operators are given, and by autograd on its fake values, which knows
    what was changed in place.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in inputs]
    trained = [(i, v) for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
    outputs = gm.graph.output_node().args[0]
    if any(v.is_inference() or v._version for _, v in trained):  # where it was before is not known any more
        return [set(range(len(inputs)))] * len(outputs)
    nodes = {torch.autograd.graph.get_gradient_edge(v).node: i for i, v in trained}
    positions = {node: i for i, node in enumerate(inputs)}

    def found(output: Any) -> set[int]:
        if not isinstance(output, fx.Node):
            return set()
        by_graph = _behind(output, lambda node: node.all_input_nodes)
        by_autograd = _behind(getattr(output.meta.get("example_value"), "grad_fn", None),
                              lambda node: [n for n, _ in node.next_functions])
        return {positions[n] for n in by_graph & positions.keys()} | {nodes[n] for n in by_autograd & nodes.keys()}

    return [found(output) for output in outputs]


def _behind(start: Any, before: Callable[[Any], Collection[Any]]) -> set[Any]:
    seen: set[Any] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(before(node))
    return seen


def without_zeros(run: Callable, needed: Sequence[set[int]]) -> Callable:
    """`run`, compiled from a piece with the `sources` `needed`, giving no gradients but to what was used."""
    aligned: bool | None = None
    if all(each == needed[0] for each in needed):
        return run

    def giving_none(*inputs: Any) -> Any:
        nonlocal aligned
        outputs = run(*inputs)
        made = backward_of(inputs, outputs) if torch.is_grad_enabled() else None
        if made is None:
            return outputs
        node = made[0]
        if aligned is None:
            aligned = edges(inputs) == [edge for edge, _ in node.next_functions]
        if aligned:
            _drop(node, _needed(node, inputs, outputs, needed), [i for i, value in enumerate(inputs) if isinstance(value, Tensor)])
        return outputs

    return giving_none


def _needed(node: Any, inputs: Sequence[Any], outputs: Sequence[Any], needed: Sequence[set[int]]) -> dict[int, set[int]]:
    """The same for each result of `node`; outputs may be views that AOTAutograd takes of one, outside."""
    outside = {i.grad_fn for i in inputs if isinstance(i, Tensor)}
    found: dict[int, set[int]] = {}
    for output, behind in zip(outputs, needed, strict=True):
        edge = (output.grad_fn, output.output_nr) if isinstance(output, Tensor) else (None, 0)
        while edge[0] not in (None, node, *outside) and len(edge[0].next_functions) == 1:
            (edge,) = edge[0].next_functions
        if edge[0] is node:
            found[edge[1]] = found.get(edge[1], set()) | behind
    return found


def _drop(node: Any, needed: dict[int, set[int]], tensors: Sequence[int]) -> None:
    def ask(tangents: Sequence[Tensor | None]) -> tuple[None, Callable | None]:
        given = [number for number, tangent in enumerate(tangents) if tangent is not None]
        if len(given) == len(tangents) or any(number not in needed for number in given):
            return None, None
        used = set().union(*(needed[number] for number in given))
        return None, lambda gradients: tuple(g if i in used else None for i, g in zip(tensors, gradients, strict=True))

    hook_if_asked(node, ask)
