"""Which values of a step all ranks of a tensor-parallel group have alike.

A tensor-parallel layer leaves its sum on every rank, and so do the norms, residuals and dropouts between
such layers: each rank holds the same activation. That a value is the same everywhere is shown, never
assumed:

1. An input is, if it is among `Group.inputs`. Whatever is written to it or to another storage in the step
   has to be the same too.
2. The result of an all-reduce, gather or broadcast over the group is.
3. What an operator makes is, if its operands are, and its other arguments are the same text on every rank:
   a rank that takes its own chunk of something names other rows. What draws random numbers is only if
   the generators of all ranks were in the same state.

The rest is taken to be this rank's own.
"""

from __future__ import annotations

import hashlib
import operator

import torch
from torch import fx

from ..collectives import OPERATOR, is_collective
from ..distributed.tensor_parallel import Group, digest
from ..ordering import is_random
from ..step_graph import StepGraph, describe, mutated_args, op_name, storage_roots

ALIKE = ("all_reduce", "all_gather_into_tensor", "broadcast")  # and in buckets
OF_A_SHAPE = ("bernoulli.p", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like")  # of the first operand


def alike(step: StepGraph) -> set[fx.Node]:
    """The values that every rank of `step.parallel` has, bit for bit. All its ranks have to call this."""
    group, nodes = step.parallel, list(step.graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    mine = [_text(step, node, number) for node in nodes]
    everyone = group.exchange([hashlib.sha256(text.encode()).hexdigest() for text in mine])
    if len({len(each) for each in everyone}) > 1:
        return set()
    same, roots = [len(set(texts)) == 1 for texts in zip(*everyone)], storage_roots(step.graph)
    written = {node: {root for value in mutated_args(node) for root in roots[value]} for node in nodes}
    own: set[fx.Node] = set()  # storages to which something is written that not all ranks have
    while True:
        found: set[fx.Node] = set()
        for node, alike in zip(nodes, same):
            if own.isdisjoint(roots[node]) and (node.name in group.inputs if node.op == "placeholder"
                                                else alike and _follows(node, found, group)):
                found.add(node)
        before = len(own)
        own.update(*(written[node] for node in nodes if node not in found))
        if len(own) == before:
            return found


def _text(step: StepGraph, node: fx.Node, number: dict[fx.Node, int]) -> str:
    """What `node` is and does, with numbers for nodes."""
    if node.op == "get_attr":
        value = getattr(step.module, node.target)
        return digest(value) if isinstance(value, torch.Tensor) else "a body"
    return f"{describe(node)} {node.target} {fx.map_arg((node.args, node.kwargs), lambda n: f'%{number[n]}')}"


def _follows(node: fx.Node, found: set[fx.Node], group: Group) -> bool:
    """Rules 2 and 3, for what is the same text everywhere."""
    if node.op == "get_attr":
        return True
    name, known = op_name(node), isinstance(node.target, OPERATOR) or node.target is operator.getitem
    if not known or name.startswith(("empty", "new_empty")) or is_random(node) and not group.random:
        return False
    if is_collective(node):
        return group.name in node.args and name.removesuffix("_coalesced") in ALIKE
    unread = node.args[:1] if name.startswith(OF_A_SHAPE) else ()
    return all(a in found or a in unread for a in node.all_input_nodes)
