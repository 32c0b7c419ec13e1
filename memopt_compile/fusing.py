"""What Inductor makes less of than the schedule of a step says.

The schedule counts the result of every operator. Without the following a GELU of forward holds four matrices in it where one loop
makes its result of its operand, a vocabulary's gradient that is added up over parts of the logits three where one is made, and
a plan pays for the rest.

1. A value that fuses, with nothing but what fuses up to its last reader, is never made: one loop has them all. What it is computed
   from is then read by that loop. One that forward makes and anything behind it reads is made: a plan may keep it.
2. A result that fuses is written over an operand that its loop reads as it is laid out itself, and nothing later.

This is a model, for plans; the peak that is predicted comes of Inductor's own code (`backends.inductor`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import fx

from .compat.trace import hinted
from .liveness import Lifetimes, lifetimes
from .ordering import fuses
from .step_graph import Phase, StepGraph, aliased_args, storage_roots


def fused(step: StepGraph) -> tuple[Lifetimes, dict[fx.Node, int]]:
    """The lifetimes of `step` in its order without what is never made, of no bytes there and each operand of which its readers
    touch too; and the bytes by which less is alive while an operator writes over an operand."""
    order, roots = list(step.computing()), storage_roots(step.graph)
    life, geometry = lifetimes(step.graph, roots=roots), functools.cache(_geometry)
    last = {root: i for i, node in enumerate(order) for root in life.touched[node]}
    last.update(dict.fromkeys(life.kept, len(order)))
    forward = [step.phase(node) is Phase.FORWARD for node in order]
    behind = {root for node, early in zip(order, forward) if not early for root in life.touched[node]}
    fusing = set(filter(fuses, order))
    end, until = [len(order)] * len(order), len(order)  # before which operator a loop that begins here has to end
    for i, node in reversed(list(enumerate(order))):
        end[i] = until
        until = until if node in fusing or _joins(node) else i

    made = {node: i for i, node in enumerate(order) if life.size.get(node) and node in fusing and not aliased_args(node)}
    unmade = set[fx.Node]()
    for node, i in reversed(made.items()):
        if last[node] < end[i] and not (forward[i] and node in behind):
            unmade.add(node)
            last |= {root: max(last[root], last[node]) for root in life.touched[node]}
    touched = dict(life.touched)
    reads: dict[fx.Node, set[tuple[fx.Node, tuple]]] = {}  # storages, and as what
    over: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        touched[node] = touched[node].union(*(touched[root] for root in touched[node] & unmade if root is not node))
        reads[node] = {read for a in node.all_input_nodes for root in roots[a]
                       for read in (reads[root] if root in unmade else {(root, geometry(a))})}
        if node in made and node not in unmade:
            mine = geometry(node)
            same = {root for root, its in reads[node] if its == mine and last.get(root) == i}
            if same.difference(root for root, its in reads[node] if its != mine):
                over[node] = life.size[node]
    nothing = dict.fromkeys(unmade, 0)
    return replace(life, size=life.size | nothing, born=life.born | nothing, touched=touched), over


def _joins(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is torch.ops.aten.copy_.default


def _geometry(node: fx.Node) -> tuple:
    """Of contiguous values any shape will do."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ()
    shape, stride = (tuple(map(hinted, each)) for each in (value.shape, value.stride()))
    return value.dtype, math.prod(shape), () if _is_dense(shape, stride) else stride


@functools.cache  # a fake tensor takes long to make
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()
