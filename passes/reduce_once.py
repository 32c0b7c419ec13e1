"""Add gradients of one parameter up before they are communicated, not after.

A parameter that is read twice has its gradient in two parts, and so has one of several micro-batches.
Each part was captured with a reduce-scatter of its own.

1. A sum of two parts of one backward becomes the reduce-scatter of their sum.
2. So does, with `across`, a sum over micro-batches (ZeRO 1: once a mini-batch).
3. The parts have to go to the same groups with the same reductions, and nothing else may read them.
   With replicas of the model an all-reduce over those follows the reduce-scatter.

Before:  a = wait(reduce_scatter(g)); b = wait(reduce_scatter(h)); c = a + b
After:   c = wait(reduce_scatter(g + h))

Memory: without `across` a part stays whole until the other one is there; with it gradients stay
whole from micro-batch to micro-batch. In return they are communicated once. Numerics: a rank adds
its own parts first, as data parallel does; the sums are the same in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import is_wait
from memopt_compile.step_graph import Phase, StepGraph
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
REDUCE = torch.ops._c10d_functional.all_reduce.default


@dataclass(frozen=True)
class ReduceOnce(StepPass):
    name: ClassVar[str] = "reduce_once"
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    across: bool = False

    def run(self, step: StepGraph, costs: Any = None) -> None:
        for node in list(step.graph.find_nodes(op="call_function", target=aten.add.Tensor)):
            if node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
                continue
            parts = [_scattered(part) for part in node.args]
            if None in parts or not _alike(*parts) or node.args[0] is node.args[1]:
                continue  # rule 3
            if not self.across and any(n in step.gradients for part in parts for n in part):
                continue  # rule 2
            _join(step, node, *parts)


def _scattered(part: fx.Node) -> list[fx.Node] | None:
    """From a reduce-scatter to the part: it, its wait, on a rank with fewer rows the cut of what was
    padded, and a copy of that, and an all-reduce of it. None if `part` is something else, or is read
    elsewhere."""
    found = [part]
    while found[-1].target is not SCATTER:
        if not (found[-1].target in (aten.clone.default, aten.slice.Tensor, REDUCE) or is_wait(found[-1])):
            return None
        found.append(found[-1].args[0])
    return found[::-1] if all(len(node.users) == 1 for node in found) else None


def _alike(first: list[fx.Node], second: list[fx.Node]) -> bool:
    return len(first) == len(second) and all(
        a.target is b.target and a.args[1:] == b.args[1:] and a.meta["val"].shape == b.meta["val"].shape
        for a, b in zip(first, second))


def _join(step: StepGraph, total: fx.Node, first: list[fx.Node], second: list[fx.Node]) -> None:
    """Rule 1. The collective of the part that comes later stays, with the sum in place of that part."""
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    kept, gone = sorted((first, second), key=lambda part: -place[part[0]])
    with step.graph.inserting_before(kept[0]):
        # In the order of the addition that it stands for.
        added = step.call(kept[0], aten.add.Tensor, first[0].args[0], second[0].args[0])
    step.phases[added] = Phase.BACKWARD
    kept[0].args = (added, *kept[0].args[1:])
    step.replace(total, kept[-1])
    for node in reversed(gone):
        step.erase(node)
