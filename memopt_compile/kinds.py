"""What kind of graph Dynamo has handed over.

- "step": a backward is in it, so that it is a training step, or meant to be one.
- "evaluation": all of a function that differentiates nothing. It has no activations to give up, but a peak that is known,
  which is what a budget asks of a function that trains by one call and evaluates by the next.
- "model": what autograd differentiates outside, or a part of a function. Nobody knows the peak of the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import compat, options
from .capture import Notes
from .compat import breaks, data


def kind_of(gm: fx.GraphModule, opts: options.Options, notes: Notes) -> str:
    """The kind of a graph with these notes of its frame. Where capture has seen no option that wants whole steps an evaluation is a
    model like others."""
    if _differentiates(gm):
        return "step"
    if not notes.needs or opts.arena or notes.resumed or notes.updates:
        return "model"
    part = breaks.is_cut(gm) or differentiable(gm) or data.write_that_is_followed(gm.graph)
    return "model" if part else "evaluation"


def differentiable(gm: fx.GraphModule) -> bool:
    """Whether a result of the graph can be differentiated."""
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in results(gm))


def results(gm: fx.GraphModule) -> list[Any]:
    """What the graph returned as it was traced."""
    return [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]


def _differentiates(gm: fx.GraphModule) -> bool:
    """Whether the graph holds a backward, by autograd or by `torch.func`."""
    if gm.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        return True
    # `torch.func.grad` of parameters leaves its results differentiable; once the step also writes to
    # a leaf in place, eager too could only have raised on a later backward through them.
    return any(compat.is_func_grad(n) for n in gm.graph.nodes) and (not differentiable(gm) or any(
        n.op == "call_method" and n.target.endswith("_") and n.args[0].op == "placeholder"
        for n in gm.graph.nodes))
