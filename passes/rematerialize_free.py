"""Compute again in backward what fuses into its reader, instead of keeping it from forward.

A value that forward leaves for backward holds its bytes through the rest of forward. Where it
can be had again by operators that Inductor fuses into the kernel that reads it, keeping it
saves no time. Which values to keep is a minimum cut (as in torch's own partitioner, and
Chen et al. 2016 for the idea of trading computation for activations):

1. every forward value is an edge whose capacity is its bytes: cutting it means keeping it;
2. a value that cannot be computed again (a matrix product, a reduction to less than a quarter, anything random,
   what a checkpoint's policy keeps, what has read a weight that is written by then) hangs on the source; one that can hangs on its operands, so it is had again from them;
3. what backward reads hangs on the sink; inputs of the step and its results are free to keep;
4. a view is never kept itself: its base is, or it is taken again from a base had again;
5. what the update reads is kept: by then the operands may have been overwritten;
6. of several cuts of equal bytes the one nearest to backward is taken: less is computed twice.

Before:  h = addmm(..); a = gelu(h); ...      | backward: mm(dy, a); gelu'(dy, h)
After:   h = addmm(..); a = gelu(h); ...      | backward: a' = gelu(h); mm(dy, a'); gelu'(dy, h)

Memory: `a` dies in forward. Numbers: bit for bit the same operators on the same values. The
rewrite is taken back if it raises the predicted peak, or at an equal one the bytes over time: as
captured, the peak is often the pile of gradients at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import networkx as nx
from torch import fx

from memopt_compile.liveness import Workspace, lifetimes
from memopt_compile.ordering import fuses, reduces_little, weight
from memopt_compile.planning.recomputing import Writes, kept_by_the_user, recompute
from memopt_compile.step_graph import (
    Phase,
    StepGraph,
    aliased_args,
    nbytes,
    storage_roots,
)
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class RematerializeFree(StepPass):
    name: ClassVar[str] = "rematerialize_free"

    def requires(self, step: StepGraph) -> str | None:
        if any(phase is Phase.BACKWARD for phase in step.phases.values()):
            return None
        return "the graph has no backward to keep values for"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        before = _weight(step, costs)
        copies = recompute(step, values_to_recompute(step), (Phase.BACKWARD, Phase.UPDATE))
        if copies and _weight(step, costs, copies) >= before:
            for again, original in reversed(copies.items()):
                again.replace_all_uses_with(original)
                step.erase(again)


def _weight(step: StepGraph, workspace: Workspace | None,
            uncounted: Container[fx.Node] = ()) -> tuple[int, int]:
    return weight(list(step.computing()), lifetimes(step.graph), workspace, uncounted)


def values_to_recompute(step: StepGraph) -> set[fx.Node]:
    """The forward values that backward should compute again (rules 1 to 6)."""
    forward = [n for n in step.computing() if step.phase(n) is Phase.FORWARD]
    inside = set(forward)
    roots = storage_roots(step.graph)
    runs_again = _can_run_again(step, roots)
    results = {r for a in step.graph.output_node().all_input_nodes for r in roots[a]}
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for node in forward:
        view = bool(aliased_args(node))
        again = node in runs_again
        free = _late(step, node) or roots[node] <= results
        keep = None if view and again else 0 if free else nbytes(node.meta.get("val"))
        _edge(network, (node, "made"), (node, "kept"), keep)
        if again:  # rule 2
            for operand in node.all_input_nodes:
                if operand in inside:
                    _edge(network, (operand, "kept"), (node, "made"), None)
        else:
            _edge(network, "source", (node, "made"), None)
        if any(step.phase(user) is not Phase.FORWARD for user in node.users if user.op != "output"):
            _edge(network, (node, "kept"), "sink", None)  # rule 3
    behind = _nearest_cut(network)
    return {n for n in forward if _free(n) and (n, "made") in behind}


def _can_run_again(step: StepGraph, roots: Mapping[fx.Node, Collection[fx.Node]]) -> set[fx.Node]:
    """What of forward has its operands wherever it can have to run again: for its own readers, or for what is made of it again."""
    writes, again = Writes(step), set[fx.Node]()
    position = {node: at for at, node in enumerate(step.computing())}
    latest: dict[fx.Node, int] = {}  # position before which it can have to run again
    for node in reversed(position):
        if step.phase(node) is not Phase.FORWARD:
            continue
        latest[node] = max((latest[u] if u in again else -1 if step.phase(u) is Phase.FORWARD else position[u]
                            for u in node.users if u in position), default=-1)
        if _free(node) and not _late(step, node) and node not in writes.early and not writes.between(
                {r for a in node.all_input_nodes for r in roots[a]}, position[node], latest[node]):
            again.add(node)
    return again


def _late(step: StepGraph, node: fx.Node) -> bool:
    """Rule 5."""
    return any(step.phase(user) is Phase.UPDATE for user in node.users)


def _free(node: fx.Node) -> bool:
    return (fuses(node) or reduces_little(node)) and not kept_by_the_user(node)


def _edge(network: nx.DiGraph, tail: Any, head: Any, size: int | None) -> None:
    if size is None:
        network.add_edge(tail, head)  # no capacity: can never be cut
    else:
        network.add_edge(tail, head, capacity=size)


def _nearest_cut(network: nx.DiGraph) -> set[Any]:
    """The sink's side of the minimum cut that is nearest to the sink (rule 6)."""
    try:
        residual = nx.algorithms.flow.boykov_kolmogorov(network, "source", "sink")
    except nx.NetworkXUnbounded:  # something must be kept that has no bytes of its own to cut
        return set()
    behind, stack = {"sink"}, ["sink"]
    while stack:
        head = stack.pop()
        for tail in residual.predecessors(head):
            edge = residual[tail][head]
            if tail not in behind and edge["flow"] < edge["capacity"]:
                behind.add(tail)
                stack.append(tail)
    return behind
