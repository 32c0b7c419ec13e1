"""Order the step by simulated live bytes.

Starting from the order it is given, the pass tries moves that keep the step's numbers
(`ordering.predecessors`) and takes the best order it finds:

1. *late*: a node whose result is larger than what it lets die runs right before its first
   reader; so do views and fills, which hold nothing of their own;
2. *early*: a node that lets more die than it allocates runs as soon as its operands are there;
3. both, in either order, again on the best order so far, until nothing gets better;
4. not if the peak rises by it with what Inductor makes less of (`fusing`), which these moves do not know.

An item of a tuple stays behind the node that made the tuple. Only an order with a lower
predicted peak, or the same peak and fewer bytes over time, replaces the given one: moving cheap
nodes to their earliest place without such a check is known to raise the peak.

Before:  w = mm(dy, x); a = mm(dy, W); b = mul(a, m); update(w)
After:   w = mm(dy, x); update(w); a = mm(dy, W); b = mul(a, m)

Memory: the predicted peak falls or stays. Numbers: bit for bit, nothing is computed otherwise.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from memopt_compile.liveness import Lifetimes, Workspace, lifetimes, no_workspace, timeline
from memopt_compile.ordering import predecessors, weight
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass

Before = dict[fx.Node, list[fx.Node]]


@dataclass(frozen=True)
class ScheduleForPeak(StepPass):
    """`rounds` bounds how often the moves are tried; a round is linear in the graph."""

    name: ClassVar[str] = "schedule_for_peak"
    rounds: int = 4

    def run(self, step: StepGraph, costs: Any = None) -> None:
        given = list(step.computing())
        best = best_order(given, predecessors(step), lifetimes(step.graph), self.rounds, costs)
        if best is not given:
            before = timeline(step, costs or no_workspace).transient_peak_bytes
            step.reorder(best)
            if timeline(step, costs or no_workspace).transient_peak_bytes > before:  # rule 4
                step.reorder(given)


def best_order(given: list[fx.Node], before: Before, life: Lifetimes, rounds: int,
               workspace: Workspace | None = None) -> list[fx.Node]:
    """The best order found from `given`; `given` itself if none is better."""
    held = {node: workspace(node) for node in given} if workspace else None
    extra = held.__getitem__ if held else None  # asked for once, not for every order
    best, lightest = given, weight(given, life, extra)
    for _ in range(rounds):
        start = best
        late_first, early_first = late(start, before, life), early(start, before, life)
        for order in (late_first, early_first,  # rules 1 to 3
                      early(late_first, before, life), late(early_first, before, life)):
            found = weight(order, life, extra)
            if found < lightest:
                best, lightest = order, found
        if best is start:
            break
    return best


def late(order: list[fx.Node], before: Before, life: Lifetimes) -> list[fx.Node]:
    """Rule 1: results that grow the live bytes are made right before their first reader."""
    after: dict[fx.Node, list[fx.Node]] = {n: [] for n in order}
    for node in order:
        for earlier in before[node]:
            after[earlier].append(node)
    dies = _dying(order, life)
    place = {node: (i, 0) for i, node in enumerate(order)}
    for i in range(len(order) - 1, -1, -1):
        node = order[i]
        grows = life.size.get(node, 0) >= sum(life.size[r] for r in dies[i] if r is not node)
        if after[node] and grows and not _in_tuple(node):
            first = min(place[n] for n in after[node])
            # Behind what already stands before that reader, ahead of the reader itself.
            place[node] = (first[0], first[1] - 1)
    return sorted(order, key=place.__getitem__)


def early(order: list[fx.Node], before: Before, life: Lifetimes) -> list[fx.Node]:
    """Rule 2: what lets more die than it allocates runs as soon as it can."""
    dies = _dying(order, life)
    place = {node: (i, 0) for i, node in enumerate(order)}
    for i, node in enumerate(order):
        frees = sum(life.size[r] for r in dies[i] if r is not node)
        if before[node] and frees > life.size.get(node, 0) and not _in_tuple(node):
            last = max(place[n] for n in before[node])
            place[node] = (last[0], last[1] + 1)
    return sorted(order, key=place.__getitem__)


def _dying(order: list[fx.Node], life: Lifetimes) -> list[list[fx.Node]]:
    """For each position, the storages of the step that nothing later touches."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for root in life.touched[node]:
            last[root] = i
    dying: list[list[fx.Node]] = [[] for _ in order]
    for root, i in last.items():
        if root not in life.kept:
            dying[i].append(root)
    return dying


def _in_tuple(node: fx.Node) -> bool:
    return node.target is operator.getitem or any(u.target is operator.getitem for u in node.users)
