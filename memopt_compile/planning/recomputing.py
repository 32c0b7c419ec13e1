"""Run operators of forward again in backward: the rewrite that two passes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..data_sizes import makes_sizes
from ..liveness import Lifetimes, lifetimes
from ..ordering import is_collective, is_random
from ..step_graph import WAIT, Phase, StepGraph, aliased_args, mutated_args, storage_roots


class Writes:
    """Where in the step something is written to a storage: what has read it cannot do so again behind that."""

    def __init__(self, step: StepGraph) -> None:
        roots = storage_roots(step.graph)
        self.at: dict[fx.Node, list[int]] = {}
        self.early: set[fx.Node] = set()  # storages that are overwritten before the update
        for at, node in enumerate(step.computing()):
            for root in {r for argument in mutated_args(node) for r in roots[argument]}:
                self.at.setdefault(root, []).append(at)
                if step.phase(node) is not Phase.UPDATE:
                    self.early.add(root)

    def between(self, storages: Iterable[fx.Node], start: int, end: int) -> bool:
        """Whether one of `storages` is written to from position `start` on, up to `end`."""
        return any(start <= at <= end for storage in storages for at in self.at.get(storage, ()))


def checkpointed(node: fx.Node) -> bool:
    """Whether `torch.utils.checkpoint` says of `node` that it shall run again."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE,
                                          CheckpointPolicy.PREFER_RECOMPUTE)


def kept_by_the_user(node: fx.Node) -> bool:
    """Whether the policy of a `torch.utils.checkpoint` says of `node` that it shall not run again."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def may_run_again(node: fx.Node) -> bool:
    """As far as the operator itself tells."""
    return not (is_random(node) or is_collective(node) or node.is_impure(impure_random=False) or mutated_args(node)
                or kept_by_the_user(node) or makes_sizes(node)  # the size is one number
                or node.target in (WAIT, torch.ops.aten._local_scalar_dense.default))


def loops(step: StepGraph, life: Lifetimes) -> dict[fx.Node, list[fx.Node]]:
    """By the last of it, what of forward runs again as one: operators whose result takes no bytes by `life`, since it fuses, nor
    does in a copy, since one operator or loop reads it. In order, with views, and without the last."""
    alone = lifetimes(step.graph)
    roots, fixed = storage_roots(step.graph), Writes(step).early
    end: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(list(step.computing())):
        if (step.phase(node) is Phase.FORWARD and life.size.get(node, 0) < alone.size.get(node, 0)
                and len(ends := readers.get(node, set())) == 1 and may_run_again(node)
                and node not in fixed):
            end[node], = ends
        if node in alone.size or mutated_args(node):
            maker = node.args[0] if node.target is operator.getitem else node
            for root in alone.touched[node] - {node}:
                readers.setdefault(root, set()).add(end.get(node, maker))
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in step.computing():
        if roots[node] and len(ends := {end.get(root) for root in roots[node]}) == 1 and (last := ends.pop()):
            found.setdefault(last, []).append(node)
    return found


def parts(step: StepGraph, nodes: Container[fx.Node]) -> set[fx.Node]:
    """Those of forward among `nodes`, with the items and views of what they make."""
    found: set[fx.Node] = set()
    for node in step.computing():
        of = node.args[:1] if node.target is operator.getitem else aliased_args(node)
        if step.phase(node) is Phase.FORWARD and (node in nodes or not found.isdisjoint(of)):
            found.add(node)
    return found


def last_of_forward(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """For each storage the last operator of forward that touches it."""
    roots = storage_roots(step.graph)
    return {root: node for node in step.computing() if step.phase(node) is Phase.FORWARD
            for touched in (node, *node.all_input_nodes) for root in roots[touched]}


def recompute(step: StepGraph, again: set[fx.Node],
              readers: Container[Phase] = (Phase.BACKWARD,),
              source: Mapping[fx.Node, Callable[[], fx.Node]] = MappingProxyType({}),
              loops: Mapping[fx.Node, list[fx.Node]] = MappingProxyType({})) -> dict[fx.Node, fx.Node]:
    """Give the `readers`, backward alone or the update too, a copy of their own of each value in
    `again`; returns original by copy.

    A copy stands right before its first reader, so that it lives no longer than it must; the items
    of an operator with several results stand behind it. What has a `source` is made by that. What is in one of the `loops`
    stands right before the last of it.
    """
    copy_of: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for reader in list(step.computing()):
        if step.phase(reader) not in readers:
            continue
        for value in _needed(reader.all_input_nodes, again, copy_of, source, loops):
            with step.graph.inserting_before(reader):
                copy = (source[value]() if value in source else
                        step.graph.node_copy(value, lambda n: copy_of.get(n, n)))
            step.phases[copy] = Phase.BACKWARD
            copy_of[value] = copy
            copies[copy] = value
        for value in reader.all_input_nodes:
            if value in copy_of and reader not in copies:
                reader.replace_input_with(value, copy_of[value])
    return copies


def operands_of(node: fx.Node, inside: Collection[fx.Node]) -> dict[fx.Node, None]:
    """What `node`, with what is `inside` its loop, reads from without."""
    return dict.fromkeys(a for each in (*inside, node) for a in each.all_input_nodes if a not in inside)


def _needed(values: Iterable[fx.Node], again: set[fx.Node], done: Container[fx.Node], source: Container[fx.Node],
            loops: Mapping[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """What has to be computed again for `values`, operands first."""
    order: dict[fx.Node, None] = {}

    def visit(value: fx.Node) -> None:
        if value in again and value not in done and value not in order:
            inside = loops.get(value, [])
            for operand in () if value in source else operands_of(value, inside):
                visit(operand)
            order.update(dict.fromkeys((*inside, value)))
            order.update(dict.fromkeys(u for u in value.users if u.target is operator.getitem
                                       and u in again and u not in done))

    for value in values:
        visit(value)
    return list(order)
