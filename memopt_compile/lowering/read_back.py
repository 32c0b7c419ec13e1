"""What the step writes into an input is read from there, for Inductor.

An update computes the new moment, copies it into the optimizer's state and reads it again for the parameter.
Where Inductor cannot have all that in one loop (the gradient is a sum over the parameter's rows, say, which
the parameter's own update would spoil), it keeps the moment a second time until the other loop.

Rules: a tensor of the step's own is copied into an input of the same layout and type; what reads it after
the copy, and before the input is written again, reads the input. The step's results stay what they were, and
so does a tensor that is written to itself.

Before:  m = add(..); c = copy_(s, m); p = div(m, v)
After:   m = add(..); c = copy_(s, m); p = div(c, v)

Memory: of two states 8 bytes a parameter, where the update comes in two loops; in one loop nothing, since
what it has written is still in a register. Numbers: the same to the bit; in low precision, where Inductor
would have read the moment before it was rounded, those of eager.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor, fx

from ..step_graph import StepGraph, aliased_args, mutated_args
from .pieces import root


def read_back(step: StepGraph) -> StepGraph:
    """The step, or a copy of it in which these readers read the inputs."""
    if not _readers(step):
        return step
    step = step.copy()
    for reader, value, copy in _readers(step):
        reader.replace_input_with(value, copy)
    return step


def _readers(step: StepGraph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(reader, what it reads, the copy that has it)"""
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    written: dict[fx.Node, list[int]] = {}
    for node, i in place.items():
        for into in mutated_args(node):
            written.setdefault(root(into), []).append(i)
    found = []
    for copy in step.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        into, value = copy.args[:2]
        if into.op != "placeholder" or not _computed(value) or value in written or not _alike(into, value):
            continue
        later = written[into][bisect.bisect(written[into], place[copy]):]
        end = later[0] if later else len(place) - 1  # the last node is the step's results
        found += [(user, value, copy) for user in value.users if place[copy] < place[user] < end]
    return found


def _computed(value: object) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_function" and not aliased_args(value)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    a, b = a.meta.get("val"), b.meta.get("val")
    return (isinstance(a, Tensor) and isinstance(b, Tensor)
            and all(isinstance(n, int) for n in (*a.shape, *b.shape))
            and (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device))
