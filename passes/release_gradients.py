"""Update each parameter as soon as its gradient is complete, so that the gradient can die.

A captured step holds every gradient until the whole backward has run, and writes every new
parameter and state back at its end. This pass keeps forward and backward in their order and puts
the update of each parameter, down to its last write-back, behind the node that its last
dependency needs. A global norm depends on every gradient and so holds all updates back; gradients
accumulated over micro-batches are complete in the last one.

Of the safe orders (`ordering`) the pass picks one by rule, the same one every time, and keeps
the given order unless the new one has a lower predicted peak, or an equal peak and fewer bytes
over time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx

from memopt_compile.liveness import lifetimes
from memopt_compile.ordering import predecessors, weight
from memopt_compile.step_graph import Phase, StepGraph, mutated_args
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class ReleaseGradients(StepPass):
    name: ClassVar[str] = "release_gradients"

    def requires(self, step: StepGraph) -> str | None:
        return None if step.kind == "step" else "a graph without an update has nothing to release"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        given = list(step.computing())
        order = released_order(step)
        life = lifetimes(step.graph)
        if weight(order, life, costs) < weight(given, life, costs):
            step.reorder(order)


def released_order(step: StepGraph) -> list[fx.Node]:
    """The computing nodes with each update behind the last dependency of its parameter."""
    before = predecessors(step)
    backbone = [n for n in step.computing() if step.phase(n) is not Phase.UPDATE]
    at = {node: i for i, node in enumerate(backbone)}
    ready: dict[fx.Node, int] = {}  # the last backbone node that must have run, -1 for none
    for node in step.computing():
        ready[node] = max((ready[b] for b in before[node]), default=-1)
        ready[node] = max(ready[node], at.get(node, -1))
    due: dict[int, list[list[fx.Node]]] = {}
    for unit in updates(step):
        when = max(ready[write] for write in unit)
        if when >= 0:  # else it waits for no gradient and stays at the end
            due.setdefault(when, []).append(unit)
    order: dict[fx.Node, None] = {}
    for i, node in enumerate(backbone):
        _place(node, before, order)
        for unit in due.get(i, []):
            for write in unit:
                _place(write, before, order)
    for node in step.computing():
        _place(node, before, order)
    return list(order)


def updates(step: StepGraph) -> Iterator[list[fx.Node]]:
    """The writes of the update, grouped by parameter.

    Writes that share a computed tensor belong together: new state and new parameter come from
    the same gradient. 0-dim tensors (step counts, norms, rates) tie no two parameters together,
    but the write of one goes with the first group that reads what it writes.
    """
    group: dict[fx.Node, list[fx.Node]] = {}  # by computed node, the writes that need it
    units: list[list[fx.Node]] = []
    writes = [n for n in step.computing() if step.phase(n) is Phase.UPDATE and mutated_args(n)]
    for write in sorted(writes, key=_is_scalar):  # a stable sort: 0-dim writes last
        needed = _update_nodes(step, write)
        shared = {
            id(group[n]): group[n]
            for n in needed
            if n in group and (_is_scalar(write) or not _is_scalar(n))
        }
        joined = sorted(shared.values(), key=units.index)[: 1 if _is_scalar(write) else None]
        unit = joined[0] if joined else []
        for other in joined[1:]:
            unit += other
            units = [u for u in units if u is not other]
            group.update({n: unit for n, g in group.items() if g is other})
        if not joined:
            units.append(unit)
        unit.append(write)
        for node in needed:
            group.setdefault(node, unit)
    return iter(units)


def _update_nodes(step: StepGraph, write: fx.Node) -> list[fx.Node]:
    """The update's nodes that `write` needs, not looking beyond 0-dim tensors."""
    found: dict[fx.Node, None] = {}
    stack = [write]
    while stack:
        node = stack.pop()
        if node in found or node.op == "placeholder" or step.phase(node) is not Phase.UPDATE:
            continue
        found[node] = None
        if node is write or not _is_scalar(node):
            stack.extend(node.all_input_nodes)
    return list(found)


def _place(node: fx.Node, before: dict[fx.Node, list[fx.Node]], order: dict[fx.Node, None]) -> None:
    """Append `node` to `order` behind whatever it still needs."""
    stack = [node]
    while stack:
        at = stack[-1]
        missing = [b for b in before[at] if b not in order]
        if missing:
            stack.extend(reversed(missing))
        else:
            order.setdefault(stack.pop())


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0
