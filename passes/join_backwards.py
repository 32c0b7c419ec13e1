"""Let several backwards through one forward go side by side, so that each activation dies once, and runs again once.

`loss.backward(retain_graph=True)` keeps all that forward made for the next backward. As captured, that one begins when
the first is through: activations live until then, and one that runs again in the first is there until the second.

1. A backward joins an earlier one if both read an activation: what forward makes of the batch or draws, not what
   it makes of parameters alone, such as a cast that micro-batches have in common.
2. Each operator of it, and of forward that stands between them and it needs, runs as soon as it safely can
   (`ordering`), but behind the earlier one's first read of an activation that both read, and behind all earlier
   reads in backward of what it reads itself. So the backwards come to each layer together.
3. One that needs what the earlier one has made (a gradient's penalty) stays behind that, by the same rule.
4. The new order is taken if its predicted peak is lower, or the same with fewer bytes over time. It may be higher: what
   backward makes at a layer is there once for each. Where the step does not fit a limit it is taken if backward's
   peak is lower with activations that are there from their first reader on alone, as those are that run again.

Before:  h = f(x) .. | dh = ..; w = mm(dh, h) | dk = ..; v = mm(dk, h); g = w + v
After:   h = f(x) .. | dh = ..; w = mm(dh, h); dk = ..; v = mm(dk, h); g = w + v

Memory: activations and the first backward's gradients die layer by layer. Numbers: bit for bit, sums keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import fx

from memopt_compile.liveness import Lifetimes, lifetimes, live_bytes, no_workspace, timeline
from memopt_compile.ordering import is_random, predecessors, weight
from memopt_compile.step_graph import Phase, Role, StepGraph, storage_roots
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class JoinBackwards(StepPass):
    """`peak_bytes` is the budget, of the whole step."""

    name: ClassVar[str] = "join_backwards"
    peak_bytes: int | None = None

    def requires(self, step: StepGraph) -> str | None:
        return None if joining(step, backwards(step)) else "no two backwards read one activation"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        given, life = list(step.computing()), lifetimes(step.graph)
        if self.peak_bytes is None:
            judged = partial(weight, life=life, workspace=costs)
        elif timeline(step, costs or no_workspace).peak_bytes > self.peak_bytes:
            judged = partial(backward_peak, step, life)
        else:
            return
        order = joined_order(step)
        if judged(order) < judged(given):  # rule 4
            step.reorder(order)


def backward_peak(step: StepGraph, life: Lifetimes, order: list[fx.Node]) -> int:
    """Transient bytes of `order` behind forward if what forward makes comes with its first reader there."""
    behind = [n for n in order if step.phase(n) is not Phase.FORWARD]
    made = {n for n in order if step.phase(n) is Phase.FORWARD}
    born = {n: life.born.get(n, 0) for n in behind}
    seen: set[fx.Node] = set()
    for node in behind:
        first = (life.touched[node] & made) - seen
        seen |= first
        born[node] += sum(life.size.get(root, 0) for root in first)
    return max(live_bytes(behind, replace(life, born=born)), default=0)


def backwards(step: StepGraph) -> dict[fx.Node, int]:
    """For each operator of backward the first backward whose gradients need it."""
    number: dict[fx.Node, int] = {}
    for node in reversed(list(step.computing())):
        if step.phase(node) is Phase.BACKWARD:
            later = [number[u] for u in node.users if u in number]
            own = [step.gradients[node]] if node in step.gradients else []
            if own or later:
                number[node] = min(own + later)
    return number


def activations(step: StepGraph) -> set[fx.Node]:
    """Storages that forward makes of the batch, or draws."""
    batch = {i.name for i in step.inputs if i.role is Role.BATCH}
    found = {n for n in step.placeholders if n.name in batch}
    for node in step.computing():
        if step.phase(node) is Phase.FORWARD and (is_random(node) or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    roots = storage_roots(step.graph)
    return {root for node in found for root in roots[node] if root.op != "placeholder"}


def joining(step: StepGraph, number: dict[fx.Node, int]) -> dict[int, fx.Node]:
    """The backwards that join an earlier one (rule 1), and the first operator there that reads what both read."""
    if len(set(number.values())) < 2:
        return {}
    reads = _reads(step, number)
    readers: dict[fx.Node, dict[int, fx.Node]] = {}  # by activation, the first in each backward
    for node in step.computing():
        for root in reads.get(node, ()):
            readers.setdefault(root, {}).setdefault(number[node], node)
    place = {node: i for i, node in enumerate(step.computing())}
    joins: dict[int, fx.Node] = {}
    for first in readers.values():
        for backward in first.keys() - {min(first)}:
            joins[backward] = min(joins.get(backward, first[backward]), first[min(first)], key=place.__getitem__)
    return joins


def _reads(step: StepGraph, number: dict[fx.Node, int]) -> dict[fx.Node, set[fx.Node]]:
    """The activations that each operator of these backwards reads."""
    shared, roots = activations(step), storage_roots(step.graph)
    return {node: {r for a in node.all_input_nodes for r in roots[a]} & shared for node in number}


def joined_order(step: StepGraph) -> list[fx.Node]:
    """The computing nodes with each backward beside the one that it joins (rule 2)."""
    number = backwards(step)
    joins, reads, before = joining(step, number), _reads(step, number), predecessors(step)
    order = list(before)
    given = {node: i for i, node in enumerate(order)}
    behind: dict[fx.Node, int] = {}  # what may move, and the first position that it may stand behind
    for node in reversed(order):
        if number.get(node) in joins:
            behind[node] = given[joins[number[node]]]
        elif step.phase(node) is Phase.FORWARD and (needed_by := [behind[u] for u in node.users if u in behind]):
            behind[node] = min(needed_by)
    place: dict[fx.Node, int] = {}
    latest: dict[fx.Node, int] = {}  # by activation, where the backwards so far read it last
    for i, node in enumerate(order):
        mine = reads.get(node, ())
        place[node] = i
        if behind.get(node, i) < i:
            place[node] = max((behind[node], *(place[b] for b in before[node]), *(latest[r] for r in mine if r in latest)))
        latest.update({r: max(latest.get(r, 0), place[node]) for r in mine})
    return sorted(order, key=place.__getitem__)
