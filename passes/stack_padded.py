"""Put gradients of a tensor's members side by side, in place of adding up tensors of zeros that have one each.

What reads a tensor member by member (the steps of a sequence, the samples of a batch in a loop) has each member's gradient padded
with zeros to the whole in backward, and as many tensors of that size are added up.

1. A sum of gradients padded so (`select_backward`; on Inductor a `select_scatter` into zeros) of every member along one
   dimension is these side by side (`cat`). Those of one member are added up first, in the order of the sum. What is a
   parameter's whole gradient by itself stays.
2. What else is added up is added behind them, where that adds the same numbers in the same order to every element.
3. Only where the peak of the step falls by that, in the best order with and without: if members are made in turn next to
   the sum it needs less to add up in place than to have all of them.

Before:  p = select_backward(da, [2, n], 0, 0); q = select_backward(db, [2, n], 0, 1); r = add(p, q); s = add(r, t)
After:   r = cat([unsqueeze(da, 0), unsqueeze(db, 0)], 0); s = add(r, t)

Memory: the whole once and no tensor of zeros. Numerics: bitwise, but for the sign of a zero.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.liveness import no_workspace, timeline
from memopt_compile.row_splits import padded, shape_of
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten
Sum = tuple[fx.Node, int, list[list[fx.Node]], list[fx.Node]]


@dataclass(frozen=True)
class StackPadded(StepPass):
    """`ordering`: the passes by which the peaks of rule 3 come about."""

    name: ClassVar[str] = "stack_padded"
    ordering: tuple[StepPass, ...] = ()

    def requires(self, step: StepGraph) -> str | None:
        return None if next(_sums(step), None) else "gradients of a tensor's members are not added up"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        stacked = step.copy()
        _stack(stacked)
        if self._peak(stacked, costs) < self._peak(step.copy(), costs):
            _stack(step)

    def _peak(self, step: StepGraph, workspace: Any) -> int:
        for each in self.ordering:
            if each.requires(step) is None:
                each.run(step, workspace)
        return timeline(step, workspace or no_workspace).transient_peak_bytes


def _stack(step: StepGraph) -> None:
    for total, dim, members, others in reversed(list(_sums(step))):  # one may be a term or a member of a later one
        add = functools.partial(step.call, total, aten.add.Tensor)
        with step.graph.inserting_before(total):
            parts = [step.call(total, aten.unsqueeze.default, functools.reduce(add, parts), dim) for parts in members]
            whole = functools.reduce(add, others, step.call(total, aten.cat.default, parts, dim))
        dead = total.all_input_nodes
        step.replace(total, whole)
        while dead:  # the sums within it, padded gradients, zeros
            if not (node := dead.pop()).users and not node._erased:
                dead += node.all_input_nodes
                step.erase(node)


def _sums(step: StepGraph) -> Iterator[Sum]:
    """Each sum of rule 1: the dimension, the gradients of its members, and what else is added up."""
    for node in step.computing():
        if not _adds(node) or _within(step, node) and _adds(next(iter(node.users))):
            continue
        terms = _terms(step, node)
        places = {term: found for term in terms if _within(step, term) and (found := padded(term))
                  and len(shape_of(found[0])) < len(shape_of(term))}
        for dim in dict.fromkeys(dim for _, dim, *_ in places.values()):
            of: dict[int, list[fx.Node]] = defaultdict(list)
            others: list[fx.Node] = []
            behind: dict[int, int] = {}  # how many others come before the last of a member's
            for term in terms:
                member, along, index, _ = places.get(term, (None,) * 4)
                if along == dim:
                    of[index].append(member)
                    behind[index] = len(others)
                else:
                    others.append(term)
            # Two numbers that are added up first may change places, but no more than these.
            in_order = all(before == 0 or before == len(of[i]) == 1 for i, before in behind.items())
            if in_order and len(of) == node.meta["val"].shape[dim] > 1:
                yield node, dim, [of[i] for i in range(len(of))], others
                break


def _adds(node: fx.Node) -> bool:
    """Whether it adds two tensors of its own shape and type, whose sizes are numbers."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    values = [n.meta["val"] for n in (node, *node.args)]
    return (all(type(n) is int for value in values for n in value.shape)
            and len({(tuple(value.shape), value.dtype) for value in values}) == 1)


def _within(step: StepGraph, node: fx.Node) -> bool:
    """Whether nothing but the sum that reads it asks for it."""
    return len(node.users) == 1 and node not in step.gradients


def _terms(step: StepGraph, node: fx.Node) -> list[fx.Node]:
    """What is added up, in order: one sum goes on, and what is added to it is a term, be that a sum or not."""
    terms: list[fx.Node] = []  # the last first
    while True:
        sums = [a for a in node.args if _adds(a) and _within(step, a)]
        if not sums:
            return [*node.args, *reversed(terms)]
        terms.append(node.args[1] if sums[0] is node.args[0] else node.args[0])
        node = sums[0]
