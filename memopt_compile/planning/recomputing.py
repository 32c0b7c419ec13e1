"""Run operators of forward again in backward: the rewrite that two passes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..step_graph import Phase, StepGraph, aliased_args, mutated_args, storage_roots


def overwritten_early(step: StepGraph) -> set[fx.Node]:
    """Storages that something overwrites before the update: too early to read them again."""
    roots = storage_roots(step.graph)
    return {root for node in step.computing() if step.phase(node) is not Phase.UPDATE
            for argument in mutated_args(node) for root in roots[argument]}


def checkpointed(node: fx.Node) -> bool:
    """Whether `torch.utils.checkpoint` says of `node` that it shall run again."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE,
                                          CheckpointPolicy.PREFER_RECOMPUTE)


def kept_by_the_user(node: fx.Node) -> bool:
    """Whether the policy of a `torch.utils.checkpoint` says of `node` that it shall not run again."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


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
              ) -> dict[fx.Node, fx.Node]:
    """Give the `readers`, backward alone or the update too, a copy of their own of each value in
    `again`; returns original by copy.

    A copy stands right before its first reader, so that it lives no longer than it must; the items
    of an operator with several results stand behind it. What has a `source` is made by that.
    """
    copy_of: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for reader in list(step.computing()):
        if step.phase(reader) not in readers:
            continue
        for value in _needed(reader.all_input_nodes, again, copy_of, source):
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


def _needed(values: Iterable[fx.Node], again: set[fx.Node],
            done: Container[fx.Node], source: Container[fx.Node]) -> list[fx.Node]:
    """What has to be computed again for `values`, operands first."""
    order: dict[fx.Node, None] = {}

    def visit(value: fx.Node) -> None:
        if value in again and value not in done and value not in order:
            for operand in () if value in source else value.all_input_nodes:
                visit(operand)
            order[value] = None
            order.update(dict.fromkeys(u for u in value.users if u.target is operator.getitem
                                       and u in again and u not in done))

    for value in values:
        visit(value)
    return list(order)
