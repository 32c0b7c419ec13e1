"""Draw a dropout's mask apart from applying it, so that only the mask has to be kept.

`native_dropout` draws and applies at once: to run it again would draw other numbers. Its two halves

1. draw the mask as it does, one byte an element,
2. multiply by the mask and by 1/(1 − p),

are two operators of which the second may run again. Only on the CPU, where drawing a mask by itself
takes the same numbers from the generator, and where a mask is drawn at all (which is not known of a size that
only the data tell).

Before:  y, mask = native_dropout(x, p, True)
After:   mask = bernoulli(empty_like(x), 1 − p); y = mul(mul(x, mask), 1/(1 − p))

The mask has the layout of `x` and is drawn in the order in which it lies in memory; `bernoulli` draws row
by row. So where `x` is transposed the mask is drawn in that order of dimensions. 1/(1 − p) is a number of
the type of `x`.

Memory: one temporary more while the dropout runs. Numbers: bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.compat.sizes import symbols_of_data
from memopt_compile.liveness import no_workspace, timeline
from memopt_compile.planning.recomputing import checkpointed
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten


@dataclass(frozen=True)
class ReplayDropout(StepPass):
    """`peak_bytes` is the budget: of a step that fits only what the user checkpoints is changed."""

    name: ClassVar[str] = "replay_dropout"
    peak_bytes: int | None = None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        fits = (self.peak_bytes is None
                or timeline(step, costs or no_workspace).peak_bytes <= self.peak_bytes)
        for node in step.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
            value = node.args[0].meta["val"]
            if fits and not checkpointed(node):
                continue
            if (node.args[2] is not False and value.device.type == "cpu" and not symbols_of_data(value)
                    and value.numel()):
                split(step, node)


def split(step: StepGraph, node: fx.Node) -> None:
    """Put the two halves of a dropout in its place."""
    x, p, _ = node.args
    scale = torch.tensor(0.0 if p == 1 else 1 / (1 - p), dtype=x.meta["val"].dtype).item()
    with step.graph.inserting_before(node):
        room = step.call(node, aten.empty_like.default, x, dtype=torch.bool)
        strides = room.meta["val"].stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if order == sorted(order):
            mask = step.call(node, aten.bernoulli.p, room, 1 - p)
        else:
            rows = step.call(node, aten.permute.default, room, order)
            drawn = step.call(node, aten.bernoulli.p, rows, 1 - p)
            mask = step.call(node, aten.permute.default, drawn, [order.index(dim) for dim in range(len(order))])
        kept = step.call(node, aten.mul.Tensor, x, mask)
        result = step.call(node, aten.mul.Tensor, kept, scale)
    for item in list(node.users):
        if item.target is operator.getitem:
            step.replace(item, (result, mask)[item.args[1]])
    step.erase(node)
