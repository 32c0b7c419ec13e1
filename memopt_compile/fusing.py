"""What Inductor makes less of than the schedule of a step says, behind forward.

The schedule counts the result of every operator. Without the following a vocabulary's gradient that is added up over parts of
the logits, and its update, hold three and four matrices of that size in it where one is made, and a plan pays for the rest.

1. A value that fuses, with nothing but what fuses up to its last reader, is never made: one loop has them all. What it is computed
   from is then read by that loop.
2. A result that fuses is written over an operand of its geometry that nothing reads later.

This is a model, for plans; the peak that is predicted comes of Inductor's own code (`backends.inductor`). Values of forward are
left out: what a plan does with them moves them.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import fx

from .liveness import lifetimes
from .ordering import fuses
from .step_graph import Phase, StepGraph, aliased_args


def unmade_bytes(step: StepGraph) -> list[int]:
    """For each operator of `step` in its order, the bytes by which less is alive while it runs."""
    order, life = list(step.computing()), lifetimes(step.graph)
    last = {root: i for i, node in enumerate(order) for root in life.touched[node]}
    last.update(dict.fromkeys(life.kept, len(order)))
    fusing = set(filter(fuses, order))
    end, until = [len(order)] * len(order), len(order)  # before which operator a loop that begins here has to end
    for i, node in reversed(list(enumerate(order))):
        end[i] = until
        until = until if node in fusing or _joins(node) else i
    less = [0] * (len(order) + 1)

    def alive(size: int, first: int, final: int) -> None:
        less[first] += size
        less[final + 1] -= size

    late, unmade = dict(last), set[fx.Node]()
    for i, node in reversed(list(enumerate(order))):
        if step.phase(node) is Phase.FORWARD or aliased_args(node) or node not in fusing or not (size := life.size.get(node, 0)):
            continue
        if late[node] < end[i]:
            unmade.add(node)
            alive(size, i, last[node])
            for root in life.touched[node] - {node}:
                late[root] = max(late[root], late[node])
        elif any(late[root] == i and root not in unmade and _geometry(root) == _geometry(node)
                 for root in life.touched[node] - {node}):
            alive(size, i, i)
    for root, final in late.items():
        if root not in unmade and final > last[root]:
            alive(-life.size.get(root, 0), last[root] + 1, final)
    return list(accumulate(less[:-1]))


def _joins(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is torch.ops.aten.copy_.default


def _geometry(node: fx.Node) -> tuple:
    value = node.meta["val"]
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else ()
